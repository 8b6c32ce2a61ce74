"""A disk of a few megabytes that a test fills and makes room on."""

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class SmallDisk:
    """A mounted tmpfs and the file that takes its room away."""

    path: Path

    @property
    def _ballast(self) -> Path:
        return self.path / "ballast"

    def fill(self, but_bytes: int = 0) -> None:
        """Take all room but the given one away."""
        with self._ballast.open("ab", buffering=0) as file:
            try:
                while True:
                    file.write(b"\0" * 4096)
            except OSError as error:
                assert error.errno == errno.ENOSPC, error
        if but_bytes:
            os.truncate(self._ballast, max(0, self._ballast.stat().st_size - but_bytes))

    def make_room(self) -> None:
        """Give all room back."""
        self._ballast.unlink()


@contextmanager
def small_disk(path: Path, size_bytes: int) -> Iterator[SmallDisk]:
    """Mount one at a new folder; the test is skipped where this user may not."""
    path.mkdir()
    try:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "none", str(path)], check=True
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs the right to mount a tmpfs")
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)
