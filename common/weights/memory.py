"""Anonymous memory that other processes map by a path; reused when no view of it is left.

A fresh page costs several times what it costs to copy into it, so a worker that stages one version after another uses
the pages of earlier ones. The content stays for as long as any view of it lives: tensors keep their memory.
"""

import mmap
import os
import weakref
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Memory:
    """Memory that processes of one user open by `path` while `data`, or a view of it, lives."""

    data: NDArray[np.uint8]
    path: str

    @property
    def view(self) -> memoryview:
        """The bytes."""
        return self.data.data


@dataclass(frozen=True)
class _File:
    size_bytes: int
    descriptor: int
    mapped: mmap.mmap


class MemoryFiles:
    """A pool of memory: it hands out free memory that was used before, else new memory."""

    def __init__(self) -> None:
        self._free: list[_File] = []

    def take(self, size_bytes: int) -> Memory:
        """Return memory with arbitrary content; raises OSError when there is no room."""
        file = self._again(size_bytes) or _create(size_bytes)
        data = np.frombuffer(file.mapped, dtype=np.uint8, count=file.size_bytes)
        weakref.finalize(data, self._free.append, file).atexit = False
        return Memory(data, f"/proc/{os.getpid()}/fd/{file.descriptor}")

    def _again(self, size_bytes: int) -> _File | None:
        """Return a free file of this size; those of other sizes, of an earlier model, are closed."""
        found = None
        while self._free:
            file = self._free.pop()
            if found is None and file.size_bytes == size_bytes:
                found = file
            else:
                os.close(file.descriptor)
        return found

    def close(self) -> None:
        """Close the free files."""
        self._again(-1)


def _create(size_bytes: int) -> _File:
    length = max(1, size_bytes)
    descriptor = os.memfd_create("prefixrl-weights")
    try:
        # Reserve now: without memory later, a write would end the process with SIGBUS.
        os.posix_fallocate(descriptor, 0, length)
        mapped = mmap.mmap(descriptor, length, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    except OSError:
        os.close(descriptor)
        raise
    return _File(size_bytes, descriptor, mapped)
