"""The lossless delta of two snapshots of the same layout.

It is the XOR of their bytes, sorted by byte of the value, zstd level 1: a small training step leaves most bytes as they
are, and XOR turns these into zeros. Blocks are independent: they arrive in any order, and an interrupted pull keeps
those it has. XOR commutes: several deltas in a row may be applied block by block.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import zstandard
from numpy.typing import NDArray

from prefixrl.common.weights.folders import delta_folder, folder, read_mapped, written_beside
from prefixrl.common.weights.snapshot import BadSnapshot, Buffer
from prefixrl.common.wire.messages.weights import Delta, Manifest

Bytes = NDArray[np.uint8]
LEVEL = 1
PAYS_BELOW = 0.5
"""Share of the snapshot below which a delta is written, and a chain of them pulled."""
SAMPLE_EVERY = 16


def is_same_layout(first: Manifest, second: Manifest) -> bool:
    """Return True if two snapshots have the same tensors at the same offsets, as a delta needs."""
    layouts = [
        (
            each.chunk_bytes,
            [(entry.name, entry.dtype, entry.shape, entry.offset_bytes) for entry in each.tensors],
        )
        for each in (first, second)
    ]
    return layouts[0] == layouts[1]


def plane_bytes(manifest: Manifest) -> int:
    """Return the bytes of the narrowest value in a snapshot, which divides every tensor's size."""
    return 2 if any(entry.dtype == "bfloat16" for entry in manifest.tensors) else 4


def encode(base: Buffer, new: Buffer, block_bytes: int, planes: int) -> Iterator[bytes]:
    """Return, per block of `new`, its delta from `base`; empty where nothing changed."""
    compressor = zstandard.ZstdCompressor(level=LEVEL)
    before, after = (np.frombuffer(each, dtype=np.uint8) for each in (base, new))
    assert before.size == after.size
    for start in range(0, after.size, block_bytes):
        changed = before[start : start + block_bytes] ^ after[start : start + block_bytes]
        yield compressor.compress(_split(changed, planes).data) if changed.any() else b""


def write_delta(directory: Path, base: int, version: int) -> Delta | None:
    """Write the delta between two snapshots; None where a sample takes more than `PAYS_BELOW`."""
    (old, before), (new, after) = (
        read_mapped(folder(directory, each), Manifest) for each in (base, version)
    )
    if not is_same_layout(old, new) or not new.size_bytes:
        return None
    planes = plane_bytes(new)
    block = new.chunk_bytes
    # A sample tells before all of it is encoded: a larger delta is not worth its decoding.
    if _sampled_share(before, after, block, planes) > PAYS_BELOW:
        return None
    with written_beside(delta_folder(directory, version)) as temporary:
        with (temporary / "delta.bin").open("wb") as file:
            sizes = tuple(file.write(piece) for piece in encode(before, after, block, planes))
        delta = Delta(
            version=version,
            digest=new.digest,
            base_digest=old.digest,
            plane_bytes=planes,
            sizes=sizes,
        )
        (temporary / "delta.msgpack").write_bytes(msgspec.msgpack.encode(delta))
    return delta


def _sampled_share(before: Buffer, after: Buffer, block_bytes: int, planes: int) -> float:
    sampled_bytes = compressed = 0
    for start in range(0, len(after), SAMPLE_EVERY * block_bytes):
        old, new = (memoryview(each)[start : start + block_bytes] for each in (before, after))
        sampled_bytes += len(new)
        compressed += sum(map(len, encode(old, new, block_bytes, planes)))
    return compressed / sampled_bytes


def decode(data: memoryview | bytes, size_bytes: int, planes: int) -> Bytes:
    """Return the XOR of one block; raises BadSnapshot unless `data` holds `size_bytes` of it."""
    if not len(data):
        return np.zeros(size_bytes, dtype=np.uint8)
    try:
        # The frame itself names its size: a lie about it is refused before memory is taken for it.
        if zstandard.frame_content_size(data) != size_bytes:
            raise BadSnapshot(f"a block of a delta does not hold {size_bytes} bytes")
        raw = zstandard.ZstdDecompressor().decompress(data)
    except zstandard.ZstdError as error:
        raise BadSnapshot(f"a block of a delta arrived damaged: {error}") from None
    return _join(np.frombuffer(raw, dtype=np.uint8), planes)


def _split(block: Bytes, planes: int) -> Bytes:
    whole = block.size - block.size % planes
    sorted_ = block[:whole].reshape(-1, planes).T
    return np.concatenate([sorted_.reshape(-1), block[whole:]])


def _join(block: Bytes, planes: int) -> Bytes:
    whole = block.size - block.size % planes
    values = block[:whole].reshape(planes, -1).T
    return np.concatenate([values.reshape(-1), block[whole:]])
