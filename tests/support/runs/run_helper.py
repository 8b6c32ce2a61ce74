"""Starts real runs of the arithmetic example in tests and reads what they leave."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from support.fakes import wait_until
from support.paths import ROOT
from support.processes import titled

RUN_FILE = ROOT / "deploy/examples/arithmetic/run.toml"


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = 240.0) -> Any:
    """Poll until the condition is true, as long as a whole run may take; its value."""
    return wait_until(condition, what, timeout_s, poll_s=0.05)


SMALL = (
    "algorithm.groups_per_iteration=16",
    "algorithm.iterations=8",
    "checkpoint.every=2",
    "evaluation.problems=64",
    "evaluation.selection_problems=16",
    "evaluation.sampled_candidates=1",
    "broker.silence_s=2",
    "launch.scorers=1",
)


def command(directory: Path, *settings: str, run_file: Path = RUN_FILE) -> list[str]:
    """`prefixrl launch` of a run file, the example's by default, into a directory."""
    flags = [
        flag for setting in (f"directory={directory}", *settings) for flag in ("--set", setting)
    ]
    return [sys.executable, "-m", "prefixrl.deploy", "launch", str(run_file), *flags]


@contextmanager
def launched(
    directory: Path, *settings: str, run_file: Path = RUN_FILE
) -> Iterator["subprocess.Popen[str]"]:
    """A launch under way; whatever it started is gone afterwards."""
    with subprocess.Popen(
        command(directory, *settings, run_file=run_file),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def finish(
    process: "subprocess.Popen[str]", directory: Path, timeout_s: float = 240.0
) -> dict[str, Any]:
    """Wait for a launch to end well; its summary."""
    output, _ = process.communicate(timeout=timeout_s)
    assert process.returncode == 0, output + logs(directory)
    summary: dict[str, Any] = json.loads((directory / "summary.json").read_text())
    return summary


def logs(directory: Path) -> str:
    """The ends of all logs of a run."""
    parts = [
        f"\n== {path.name}\n" + path.read_text()[-3000:]
        for path in (directory / "logs").glob("*.log")
    ]
    return "".join(parts)


def _json_of(command: str, directory: Path) -> str:
    """The output of a command about a run, with --json."""
    return subprocess.run(
        [sys.executable, "-m", "prefixrl.deploy", command, str(directory), "--json"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def status(directory: Path) -> dict[str, Any]:
    """`prefixrl status --json`."""
    document: dict[str, Any] = json.loads(_json_of("status", directory))
    return document


def inspect(directory: Path) -> list[dict[str, Any]]:
    """`prefixrl inspect --json`."""
    return [json.loads(line) for line in _json_of("inspect", directory).splitlines()]


def trained_iterations(directory: Path) -> int:
    """Lines of metrics.jsonl so far."""
    path = directory / "metrics.jsonl"
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def child(process: "subprocess.Popen[str]", title: str) -> psutil.Process | None:
    """A process below the launch by its title, for example prefixrl-broker."""
    return next(iter(titled(process.pid, title)), None)


def check_books(summary: dict[str, Any], directory: Path) -> None:
    """Check what is true of every finished run, whatever happened in it."""
    groups = summary["groups"]
    assert groups["outstanding"] == 0
    ended = groups["trained"] + groups["filtered"] + groups["failed"] + groups["expired"]
    assert groups["issued"] == ended
    lines = inspect(directory)
    seqs = [line["seq"] for line in lines]
    assert len(seqs) == len(set(seqs)) == groups["trained"], "a group was trained twice"
    ages = [line["version_trained"] - line["version_sampled"] for line in lines]
    assert min(ages) >= 0
    assert max(ages) <= summary["staleness"]["window"]


def losses(directory: Path) -> list[dict[str, float]]:
    """The losses of every iteration."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    names = ("policy_loss", "value_loss", "reference_kl", "entropy", "reward")
    return [{name: line["figures"][name] for name in names} for line in lines]
