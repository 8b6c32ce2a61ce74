"""Where published versions lie: a folder each. Apart from `weights.py`, so that the weight server starts without torch."""

import shutil
from pathlib import Path


def folder(directory: Path, version: int) -> Path:
    """The folder of a version."""
    return directory / f"v{version:08d}"


def versions(directory: Path) -> list[int]:
    """Versions of the snapshots there, oldest first."""
    return sorted(int(path.name[1:]) for path in directory.glob("v????????"))


def prune(directory: Path, keep: set[int]) -> None:
    """Remove every snapshot whose version is not kept; a server that has it open may go on serving it."""
    for version in versions(directory):
        if version not in keep:
            shutil.rmtree(folder(directory, version), ignore_errors=True)
