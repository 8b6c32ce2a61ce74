"""The lossless difference of two snapshots of the same layout: XOR of their bytes, sorted by byte of the value, zstd level 1.

A training step of a small learning rate changes few bits of few values: in bf16 most values keep all bits, in fp32 the high
bytes stay. XOR turns what stays into zeros, and sorting by byte keeps the bytes that change together. Blocks are independent of
each other, so they arrive in any order, and a pull that was interrupted keeps those it has. XOR is its own inverse and
commutes: several deltas in a row may be applied block by block.
"""

import mmap
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import zstandard
from numpy.typing import NDArray

from prefixrl.common.messages import Delta, Manifest
from prefixrl.common.snapshots import delta_folder, folder
from prefixrl.common.weights import BadSnapshot, Buffer

Bytes = NDArray[np.uint8]
LEVEL = 1
PAYS_BELOW = 0.5
"""A delta is written, and a chain of them pulled, only while it is smaller than this share of the snapshot."""
SAMPLE_EVERY = 16


def is_same_layout(one: Manifest, other: Manifest) -> bool:
    """Whether two snapshots have the same tensors in the same places, so that a delta between them makes sense."""
    places = [
        [(entry.name, entry.dtype, entry.shape, entry.offset_bytes) for entry in manifest.tensors]
        for manifest in (one, other)
    ]
    return places[0] == places[1] and one.chunk_bytes == other.chunk_bytes


def plane_bytes(manifest: Manifest) -> int:
    """Bytes of the narrowest value in the snapshot, which divides every tensor's size."""
    return 2 if any(entry.dtype == "bfloat16" for entry in manifest.tensors) else 4


def encode(base: Buffer, new: Buffer, block_bytes: int, planes: int) -> Iterator[bytes]:
    """Per block of `new`, what leads there from `base`; empty where nothing changed."""
    compressor = zstandard.ZstdCompressor(level=LEVEL)
    before, after = as_array(base), as_array(new)
    assert before.size == after.size
    for start in range(0, after.size, block_bytes):
        changed = before[start : start + block_bytes] ^ after[start : start + block_bytes]
        yield compressor.compress(_split(changed, planes).data) if changed.any() else b""


def write_delta(directory: Path, base: int, version: int) -> Delta | None:
    """Write what leads from one snapshot there to another, beside and renamed; None where it would not pay.

    It does not when it takes more than `PAYS_BELOW` of the snapshot; a sample of blocks tells beforehand.
    """
    (old, before), (new, after) = (_open(directory, each) for each in (base, version))
    if not is_same_layout(old, new) or not new.size_bytes:
        return None
    planes, block = plane_bytes(new), new.chunk_bytes
    if _sampled_share(before, after, block, planes) > PAYS_BELOW:
        return None
    temporary = directory / f".d{version:08d}.{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    with (temporary / "delta.bin").open("wb") as file:
        sizes = tuple(file.write(piece) for piece in encode(before, after, block, planes))
    delta = Delta(version, new.digest, old.digest, planes, sizes)
    (temporary / "delta.msgpack").write_bytes(msgspec.msgpack.encode(delta))
    target = delta_folder(directory, version)
    shutil.rmtree(target, ignore_errors=True)
    temporary.rename(target)
    return delta


def _open(directory: Path, version: int) -> tuple[Manifest, Buffer]:
    place = folder(directory, version)
    manifest = msgspec.msgpack.decode((place / "manifest.msgpack").read_bytes(), type=Manifest)
    if not manifest.size_bytes:
        return manifest, bytearray()
    with (place / "weights.bin").open("rb") as file:
        return manifest, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _sampled_share(before: Buffer, after: Buffer, block_bytes: int, planes: int) -> float:
    """Share of a delta's size of every 16th block's."""
    taken = compressed = 0
    for start in range(0, len(after), SAMPLE_EVERY * block_bytes):
        one, other = (memoryview(each)[start : start + block_bytes] for each in (before, after))
        taken += len(other)
        compressed += sum(map(len, encode(one, other, block_bytes, planes)))
    return compressed / taken


def decode(data: memoryview | bytes, size_bytes: int, planes: int) -> Bytes:
    """The XOR of one block of `size_bytes`; raises BadSnapshot unless `data` holds exactly that."""
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


def as_array(data: Buffer) -> Bytes:
    """Bytes as an array that shares them."""
    return np.frombuffer(data, dtype=np.uint8)


def _split(block: Bytes, planes: int) -> Bytes:
    whole = block.size - block.size % planes
    sorted_ = block[:whole].reshape(-1, planes).T
    return np.concatenate([sorted_.reshape(-1), block[whole:]])


def _join(block: Bytes, planes: int) -> Bytes:
    whole = block.size - block.size % planes
    values = block[:whole].reshape(planes, -1).T
    return np.concatenate([values.reshape(-1), block[whole:]])
