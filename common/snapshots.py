"""Where published versions lie: a folder each. Apart from `weights.py`, so that the weight server starts without torch."""

import shutil
from pathlib import Path

DELTAS_KEPT = 8


def folder(directory: Path, version: int) -> Path:
    """The folder of a version."""
    return directory / f"v{version:08d}"


def versions(directory: Path) -> list[int]:
    """Versions of the snapshots there, oldest first."""
    return sorted(int(path.name[1:]) for path in directory.glob("v????????"))


def delta_folder(directory: Path, version: int) -> Path:
    """The folder of the delta that leads to a version."""
    return directory / f"d{version:08d}"


def deltas(directory: Path) -> list[int]:
    """Versions to which a delta leads, oldest first."""
    return sorted(int(path.name[1:]) for path in directory.glob("d????????"))


def prune(directory: Path, keep: set[int]) -> None:
    """Remove every snapshot whose version is not kept; a server that has it open may go on serving it.

    Deltas take little room: those of the last `DELTAS_KEPT` versions stay, for workers that are a few versions behind.
    """
    for version in versions(directory):
        if version not in keep:
            shutil.rmtree(folder(directory, version), ignore_errors=True)
    newest = max(keep, default=-1)
    for version in deltas(directory):
        if not newest - DELTAS_KEPT < version <= newest:
            shutil.rmtree(delta_folder(directory, version), ignore_errors=True)
