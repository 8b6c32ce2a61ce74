"""A snapshot without a weight server, for benchmarks and tests that install weights of their own process."""

from collections.abc import Mapping

import torch

from prefixrl.common.weights.memory import MemoryFiles
from prefixrl.common.weights.snapshot import Snapshot, as_bytes, describe

_FILES = MemoryFiles()


def snapshot_of(version: int, tensors: Mapping[str, torch.Tensor]) -> Snapshot:
    """A snapshot of tensors of this process, copied."""
    manifest = describe(version, tensors)
    memory = _FILES.take_memory(manifest.size_bytes)
    for entry in manifest.tensors:
        memory.view[entry.offset_bytes : entry.offset_bytes + entry.size_bytes] = as_bytes(
            tensors[entry.name]
        )
    return Snapshot(manifest, memory)
