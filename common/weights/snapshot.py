"""Snapshots of weights: one file of raw tensor bytes and one manifest, checked by tensor.

<directory>/v00000012/manifest.msgpack   what stands where, with a checksum per tensor and one digest of the whole
<directory>/v00000012/weights.bin        tensors by name, back to back
"""

import math
import mmap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
import xxhash

from prefixrl.common.weights.folders import folder, written_beside
from prefixrl.common.weights.memory import Memory
from prefixrl.common.wire.messages.weights import Manifest, TensorEntry

if TYPE_CHECKING:
    # Imported where tensors are made: a simulated engine, which makes none, starts without torch.
    import torch

MOST_BLOCKS = 2**20
"""Most chunks of a snapshot: 4 TiB of the usual size."""
CHUNK_BYTES = 4 * 2**20
Buffer = bytes | bytearray | memoryview | mmap.mmap
Dtype = Literal["float32", "bfloat16"]
_ITEM_BYTES: dict[Dtype, int] = {"float32": 4, "bfloat16": 2}


class BadSnapshot(Exception):
    """Bytes do not match their manifest, or a manifest does not describe its bytes; ask again."""


@dataclass(frozen=True)
class Snapshot:
    """A verified version in memory; its bytes stay the same while it, or a tensor of it, lives."""

    manifest: Manifest
    memory: Memory

    @property
    def version(self) -> int:
        """The version of the weights."""
        return self.manifest.version

    @property
    def tensors(self) -> "dict[str, torch.Tensor]":
        """The tensors, which share the memory: they must not be written to."""
        return view_tensors(self.manifest, self.memory.view)


def describe(version: int, tensors: "Mapping[str, torch.Tensor]") -> Manifest:
    """Return the manifest of tensors, ordered by name; ValueError for a dtype not fp32 or bf16."""
    ordered = ((name, tensors[name]) for name in sorted(tensors))
    return manifest_of(
        version,
        ((name, _dtype(name, each), tuple(each.shape), as_bytes(each)) for name, each in ordered),
    )


def _dtype(name: str, tensor: "torch.Tensor") -> Dtype:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in _ITEM_BYTES:
        raise ValueError(f"weight {name} has dtype {dtype}; allowed are {', '.join(_ITEM_BYTES)}")
    return "float32" if dtype == "float32" else "bfloat16"


def manifest_of(
    version: int, weights: Iterable[tuple[str, Dtype, tuple[int, ...], memoryview]]
) -> Manifest:
    """Return the manifest of weights: name, dtype, shape and bytes of each, ordered by name."""
    entries = []
    offset = 0
    whole = xxhash.xxh3_128()
    for name, dtype, shape, data in weights:
        checksum = xxhash.xxh3_64_hexdigest(data)
        # Without the version: equal weights have one digest, whenever they are published.
        whole.update(f"{name}:{dtype}:{shape}:{checksum};".encode())
        entry = TensorEntry(
            name=name,
            dtype=dtype,
            shape=shape,
            offset_bytes=offset,
            size_bytes=data.nbytes,
            checksum=checksum,
        )
        entries.append(entry)
        offset += data.nbytes
    return Manifest(
        version=version,
        digest=whole.hexdigest(),
        size_bytes=offset,
        chunk_bytes=CHUNK_BYTES,
        tensors=tuple(entries),
    )


def as_bytes(tensor: "torch.Tensor") -> memoryview:
    """Return the bytes of a CPU tensor, without a copy where it is contiguous."""
    import torch

    return memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def check_manifest(manifest: Manifest) -> None:
    """Raise BadSnapshot unless offsets, sizes, shapes, digest and deltas fit each other."""
    if manifest.chunk_bytes <= 0:
        raise BadSnapshot(f"manifest of version {manifest.version} has empty chunks")
    offset = 0
    whole = xxhash.xxh3_128()
    for entry in manifest.tensors:
        if any(dimension < 0 for dimension in entry.shape):
            raise BadSnapshot(f"weight {entry.name} has a negative dimension in {entry.shape}")
        size_bytes = math.prod(entry.shape) * _ITEM_BYTES[entry.dtype]
        # It comes from a peer: memory is cut by these numbers, so none of them is trusted.
        if (entry.offset_bytes, entry.size_bytes) != (offset, size_bytes):
            raise BadSnapshot(
                f"weight {entry.name} does not fit its shape: {entry.size_bytes} bytes at {entry.offset_bytes}"
            )
        whole.update(f"{entry.name}:{entry.dtype}:{tuple(entry.shape)}:{entry.checksum};".encode())
        offset += entry.size_bytes
    if offset != manifest.size_bytes or whole.hexdigest() != manifest.digest:
        raise BadSnapshot(f"manifest of version {manifest.version} does not match its own digest")
    blocks = -(-manifest.size_bytes // manifest.chunk_bytes)
    leads_to = manifest.digest
    if blocks > MOST_BLOCKS:
        raise BadSnapshot(
            f"manifest of version {manifest.version} has {blocks} chunks, {MOST_BLOCKS} at most"
        )
    # From this version back: each delta must end where the one after it begins.
    for delta in reversed(manifest.deltas):
        if delta.digest != leads_to or len(delta.sizes) != blocks or delta.plane_bytes < 1:
            raise BadSnapshot(
                f"the delta to version {delta.version} does not lead to version {manifest.version}"
            )
        leads_to = delta.base_digest


class Verifier:
    """Check of bytes against their manifest as they arrive, in order, while they are cached."""

    def __init__(self, manifest: Manifest, data: memoryview) -> None:
        self._manifest = manifest
        self._data = data
        self._entry = self._position = 0
        self._hash = xxhash.xxh3_64()

    def advance(self, end_bytes: int) -> None:
        """Check everything before `end_bytes`; BadSnapshot with the first tensor that differs."""
        entries = self._manifest.tensors
        while self._entry < len(entries):
            entry = entries[self._entry]
            whole = entry.offset_bytes + entry.size_bytes
            reached = min(whole, end_bytes)
            if self._position < reached:
                self._hash.update(self._data[self._position : reached])
                self._position = reached
            if self._position < whole:
                return
            if self._hash.hexdigest() != entry.checksum:
                raise BadSnapshot(
                    f"weight {entry.name} of version {self._manifest.version} arrived damaged"
                )
            self._entry += 1
            self._hash.reset()


def view_tensors(manifest: Manifest, view: memoryview) -> "dict[str, torch.Tensor]":
    """Return tensors that share verified bytes."""
    import torch

    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    tensors = {}
    for entry in manifest.tensors:
        dtype = dtypes[entry.dtype]
        piece = view[entry.offset_bytes : entry.offset_bytes + entry.size_bytes]
        flat = (
            torch.frombuffer(piece, dtype=dtype)
            if entry.size_bytes
            else torch.empty(0, dtype=dtype)
        )
        tensors[entry.name] = flat.reshape(entry.shape)
    return tensors


def write_snapshot(
    directory: Path, manifest: Manifest, tensors: "Mapping[str, torch.Tensor]"
) -> None:
    """Write a snapshot's folder, beside and renamed; one of the same version is replaced."""
    with written_beside(folder(directory, manifest.version)) as temporary:
        with (temporary / "weights.bin").open("wb") as file:
            for entry in manifest.tensors:
                file.write(as_bytes(tensors[entry.name]))
        (temporary / "manifest.msgpack").write_bytes(msgspec.msgpack.encode(manifest))
