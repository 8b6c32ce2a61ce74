"""Snapshots of weights: one file of raw tensor bytes, one manifest, checked tensor by tensor.

    <directory>/v00000012/manifest.msgpack   what stands where, with a checksum per tensor and one digest of the whole
    <directory>/v00000012/weights.bin        tensors by name, back to back

A snapshot is written beside and renamed, so that whoever sees its folder sees all of it.
"""

import mmap
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
import xxhash

from prefixrl.common.messages import Manifest, TensorEntry
from prefixrl.common.snapshots import folder

CHUNK_BYTES = 4 * 2**20
Buffer = bytearray | memoryview | mmap.mmap
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class BadSnapshot(Exception):
    """Bytes do not match their manifest, or a manifest does not describe its bytes; ask again."""


def describe(version: int, tensors: Mapping[str, torch.Tensor]) -> Manifest:
    """Manifest of tensors in the order of their names; raises ValueError for a dtype that is not fp32 or bf16."""
    entries, offset, whole = [], 0, xxhash.xxh3_128()
    for name in sorted(tensors):
        tensor = tensors[name]
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in _DTYPES:
            raise ValueError(f"weight {name} has dtype {dtype}; allowed are {', '.join(_DTYPES)}")
        data = as_bytes(tensor)
        checksum = xxhash.xxh3_64_hexdigest(data)
        shape = tuple(tensor.shape)
        whole.update(f"{name}:{dtype}:{shape}:{checksum};".encode())
        entries.append(
            TensorEntry(
                name,
                "float32" if dtype == "float32" else "bfloat16",
                shape,
                offset,
                data.nbytes,
                checksum,
            )
        )
        offset += data.nbytes
    return Manifest(version, whole.hexdigest(), offset, CHUNK_BYTES, tuple(entries))


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a CPU tensor, without a copy where it is contiguous."""
    return memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def check_manifest(manifest: Manifest) -> None:
    """Raise BadSnapshot unless entries are back to back, sizes fit shapes, and the digest fits the entries."""
    if manifest.chunk_bytes <= 0:
        raise BadSnapshot(f"manifest of version {manifest.version} has empty chunks")
    offset, whole = 0, xxhash.xxh3_128()
    for entry in manifest.tensors:
        count = 1
        for dimension in entry.shape:
            if dimension < 0:
                raise BadSnapshot(f"weight {entry.name} has a negative dimension in {entry.shape}")
            count *= dimension
        if (
            entry.offset_bytes != offset
            or entry.size_bytes != count * _DTYPES[entry.dtype].itemsize
        ):
            raise BadSnapshot(
                f"weight {entry.name} does not fit its place: {entry.size_bytes} bytes at {entry.offset_bytes}"
            )
        whole.update(f"{entry.name}:{entry.dtype}:{tuple(entry.shape)}:{entry.checksum};".encode())
        offset += entry.size_bytes
    if offset != manifest.size_bytes or whole.hexdigest() != manifest.digest:
        raise BadSnapshot(f"manifest of version {manifest.version} does not match its own digest")
    blocks, leads_to = -(-manifest.size_bytes // manifest.chunk_bytes), manifest.digest
    for delta in reversed(manifest.deltas):
        if delta.digest != leads_to or len(delta.sizes) != blocks or delta.plane_bytes < 1:
            raise BadSnapshot(
                f"the delta to version {delta.version} does not lead to version {manifest.version}"
            )
        leads_to = delta.base_digest


class Verifier:
    """Checks bytes against their manifest as they arrive, in order, while they are warm in the cache."""

    def __init__(self, manifest: Manifest, data: memoryview) -> None:
        self._manifest, self._data = manifest, data
        self._entry = self._position = 0
        self._hash = xxhash.xxh3_64()

    def advance(self, end_bytes: int) -> None:
        """Everything before `end_bytes` is there; raises BadSnapshot naming the first tensor that differs."""
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


def rebuild(manifest: Manifest, data: Buffer) -> dict[str, torch.Tensor]:
    """Tensors that share writable `data`, every checksum verified; raises BadSnapshot naming the first that differs."""
    view = memoryview(data)
    if len(view) != manifest.size_bytes:
        raise BadSnapshot(f"{len(view)} bytes for a snapshot of {manifest.size_bytes}")
    Verifier(manifest, view).advance(manifest.size_bytes)
    return view_tensors(manifest, view)


def view_tensors(manifest: Manifest, view: memoryview) -> dict[str, torch.Tensor]:
    """Tensors that share verified bytes."""
    tensors = {}
    for entry in manifest.tensors:
        dtype = _DTYPES[entry.dtype]
        piece = view[entry.offset_bytes : entry.offset_bytes + entry.size_bytes]
        flat = (
            torch.frombuffer(piece, dtype=dtype)
            if entry.size_bytes
            else torch.empty(0, dtype=dtype)
        )
        tensors[entry.name] = flat.reshape(entry.shape)
    return tensors


def write_snapshot(
    directory: Path, manifest: Manifest, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Write a snapshot's folder, beside and renamed; one of the same version is replaced."""
    directory.mkdir(parents=True, exist_ok=True)
    target = folder(directory, manifest.version)
    temporary = directory / f".v{manifest.version:08d}.{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    with (temporary / "weights.bin").open("wb") as file:
        for entry in manifest.tensors:
            file.write(as_bytes(tensors[entry.name]))
    (temporary / "manifest.msgpack").write_bytes(msgspec.msgpack.encode(manifest))
    shutil.rmtree(target, ignore_errors=True)
    temporary.rename(target)
