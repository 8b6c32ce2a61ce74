"""Memory without a name that other processes may map by a path, and that is used again when nobody looks at it any more.

A fresh page costs several times what it costs to copy into it, so a worker that stages one version after another uses the pages
of those that are gone. What was put there stays for as long as any view of it lives: tensors keep their memory.
"""

import mmap
import os
import weakref
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Memory:
    """`path` opens it from any process of the same user while `data`, or a view of it, lives."""

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
    """Hands out memory of a size, preferably some that was handed out before and is in use no more."""

    def __init__(self) -> None:
        self._free: list[_File] = []

    def take(self, size_bytes: int) -> Memory:
        """Its content is whatever stood there. Raises OSError when there is no room."""
        file = self._again(size_bytes) or _create(size_bytes)
        data = np.frombuffer(file.mapped, dtype=np.uint8, count=size_bytes)
        weakref.finalize(data, self._free.append, file).atexit = False
        return Memory(data, f"/proc/{os.getpid()}/fd/{file.descriptor}")

    def _again(self, size_bytes: int) -> _File | None:
        """A free one of this size; those of other sizes are of a model that is gone."""
        found = None
        while self._free:
            file = self._free.pop()
            if found is None and file.size_bytes == size_bytes:
                found = file
            else:
                os.close(file.descriptor)
        return found

    def close(self) -> None:
        """Give back what is free."""
        self._again(-1)


def _create(size_bytes: int) -> _File:
    length = max(1, size_bytes)
    descriptor = os.memfd_create("prefixrl-weights")
    try:
        # Fails here where memory is short; a page that is missing later would end the process.
        os.posix_fallocate(descriptor, 0, length)
        mapped = mmap.mmap(descriptor, length, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    except OSError:
        os.close(descriptor)
        raise
    return _File(size_bytes, descriptor, mapped)
