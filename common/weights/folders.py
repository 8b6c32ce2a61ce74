"""Folders of published versions and deltas. Without torch: the weight server needs none."""

import contextlib
import mmap
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from prefixrl.common.wire.messages.weights import Delta, Manifest

DELTAS_KEPT = 8
FILES = {Manifest: ("manifest.msgpack", "weights.bin"), Delta: ("delta.msgpack", "delta.bin")}
Mapped = mmap.mmap | bytes
T = TypeVar("T", Manifest, Delta)


def folder(directory: Path, version: int) -> Path:
    """Return the folder of a version."""
    return directory / f"v{version:08d}"


def versions(directory: Path) -> list[int]:
    """Return the versions of the snapshots there, oldest first."""
    return sorted(int(path.name[1:]) for path in directory.glob("v????????"))


def delta_folder(directory: Path, version: int) -> Path:
    """Return the folder of the delta that leads to a version."""
    return directory / f"d{version:08d}"


def prune(directory: Path, keep: set[int]) -> None:
    """Remove the snapshots that are not kept, and old deltas; open files stay readable."""
    for version in versions(directory):
        if version not in keep:
            shutil.rmtree(folder(directory, version), ignore_errors=True)
    newest = max(keep, default=-1)
    for path in directory.glob("d????????"):
        if not newest - DELTAS_KEPT < int(path.name[1:]) <= newest:
            shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def written_beside(target: Path) -> Iterator[Path]:
    """Provide a folder to fill that then replaces `target`: readers see all of it or nothing."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
    except BaseException:
        shutil.rmtree(
            temporary, ignore_errors=True
        )  # what was written takes room on a disk that may be full
        raise
    shutil.rmtree(target, ignore_errors=True)
    temporary.rename(target)


def read_mapped(path: Path, kind: type[T]) -> tuple[T, Mapped]:
    """Return the description in a folder of a snapshot or delta, and its bytes, mapped."""
    head, body = FILES[kind]
    description = msgspec.msgpack.decode((path / head).read_bytes(), type=kind)
    with (path / body).open("rb") as file:
        is_empty = os.fstat(file.fileno()).st_size == 0
        return description, (
            b"" if is_empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        )
