"""Anonymous memory that other processes map by a path; reused when it has no view.

A fresh page costs several times what it costs to copy into it. The content stays for as long as any view of it lives:
tensors keep their memory, and so does another process that holds the shared lock of `map_shared`.
"""

import errno
import fcntl
import mmap
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prefixrl.common.host.memory_use import free_memory_bytes


@dataclass(frozen=True)
class Memory:
    """Memory that processes of one user open by `path` while `data`, or a view of it, lives."""

    data: NDArray[np.uint8]
    path: str
    on_release: list[Callable[[], None]] = field(default_factory=list)
    """Called when no view is left in this process, before the memory is used again."""

    @property
    def view(self) -> memoryview:
        """The bytes."""
        return self.data.data


class _File(NamedTuple):
    size_bytes: int
    descriptor: int
    mapped: mmap.mmap


class MemoryFiles:
    """A pool of memory: it hands out free memory that was used before, else new memory."""

    def __init__(self) -> None:
        self._free: list[_File] = []

    def take_memory(self, size_bytes: int) -> Memory:
        """Return memory with arbitrary content; raises OSError when there is no room."""
        file = self._again(size_bytes) or _create(size_bytes)
        data = np.frombuffer(file.mapped, dtype=np.uint8, count=file.size_bytes)
        memory = Memory(data, f"/proc/{os.getpid()}/fd/{file.descriptor}")
        weakref.finalize(data, self._release, file, memory.on_release).atexit = False
        return memory

    def _release(self, file: _File, on_release: list[Callable[[], None]]) -> None:
        for call in on_release:
            call()
        self._free.append(file)

    def _again(self, size_bytes: int) -> _File | None:
        """Return a free file of this size; close files of other sizes, and files that others map."""
        reused = None
        while self._free:
            file = self._free.pop()
            if reused is None and file.size_bytes == size_bytes and _is_unshared(file.descriptor):
                reused = file
            else:
                os.close(file.descriptor)
        return reused

    def close(self) -> None:
        """Close the free files."""
        self._again(-1)


def _is_unshared(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return True


def map_shared(path: str, size_bytes: int) -> Memory | None:
    """Map another process's memory, which stays as it is; None where it cannot be had."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_size != max(1, size_bytes):
            raise OSError(f"{path} is of another size")
        # Private and writable, as tensors want it: a page is copied only where it is written to.
        mapped = mmap.mmap(descriptor, max(1, size_bytes), access=mmap.ACCESS_COPY)
    except OSError:
        os.close(descriptor)
        return None
    data = np.frombuffer(mapped, dtype=np.uint8, count=size_bytes)
    # The open file holds the lock.
    weakref.finalize(data, os.close, descriptor).atexit = False
    return Memory(data, f"/proc/{os.getpid()}/fd/{descriptor}")


def _create(size_bytes: int) -> _File:
    length = max(1, size_bytes)
    if length > (room := free_memory_bytes()):
        # Reserved all the same, it would have the kernel kill this process or others.
        raise OSError(
            errno.ENOMEM,
            f"a version takes {length / 2**20:,.0f} MiB, {room / 2**20:,.0f} MiB are free",
        )
    descriptor = os.memfd_create("prefixrl-weights")
    try:
        # Reserve now: without memory later, a write would end the process with SIGBUS.
        os.posix_fallocate(descriptor, 0, length)
        mapped = mmap.mmap(descriptor, length, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    except OSError:
        os.close(descriptor)
        raise
    return _File(size_bytes, descriptor, mapped)
