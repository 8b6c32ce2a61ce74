"""A policy that collapses onto one text, by real training, is named wherever a person looks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.run_helper import SMALL, launched, trained_iterations, wait_for

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]

COLLAPSING = ("learner.actor_lr=2e-2", "algorithm.entropy=0.0", "algorithm.kl=0.0", "algorithm.iterations=30")
ONE_TEXT = "the adapter writes one and the same text in "
COLLAPSED = "the policy has collapsed: entropy "
SOON = 10
"""Iterations after the collapse in which it must be named."""


def status(directory: Path) -> str:
    """All that `prefixrl status` prints, on lines that a pipe does not wrap, whatever its exit code."""
    done = subprocess.run(
        [sys.executable, "-m", "prefixrl.deploy", "status", str(directory)], capture_output=True, text=True, timeout=60
    )
    return " ".join((done.stdout + done.stderr).split())


def test_a_collapse_is_named_on_the_console_in_status_and_in_the_report_within_ten_iterations(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    metrics = directory / "metrics.jsonl"
    with launched(directory, *SMALL, *COLLAPSING) as process:
        wait_for(lambda: metrics.exists() and b'"one_text"' in metrics.read_bytes(), "the alarm")
        while_it_goes_on, seen = status(directory), trained_iterations(directory)
        summary = finish_with_output(process, directory)
    console = (tmp_path / "console.txt").read_text()
    lines = [json.loads(each) for each in metrics.read_text().splitlines()]
    collapse = next(each["iteration"] for each in lines if each["figures"]["commonest_text_fraction"] > 0.9)
    assert lines[-1]["figures"]["entropy"] < 0.01, "it has collapsed"
    first = {each["kind"]: each["first"] for each in reversed(summary["alarms"])}
    assert first["one_text"] <= collapse + SOON and first["entropy"] <= collapse + SOON
    assert seen < 30 and ONE_TEXT in while_it_goes_on
    for said in (ONE_TEXT, COLLAPSED):
        assert f"iteration {first['one_text' if said == ONE_TEXT else 'entropy']}: {said}" in console
        assert said in status(directory)
        assert said in (directory / "report.html").read_text()
        assert said in (directory / "logs/learner.log").read_text()


def finish_with_output(process: "subprocess.Popen[str]", directory: Path) -> dict[str, list[dict[str, object]]]:
    """Wait for the end; keep what the console said beside the run."""
    output, _ = process.communicate(timeout=240)
    (directory.parent / "console.txt").write_text(output)
    assert process.returncode == 0, output
    found: dict[str, list[dict[str, object]]] = json.loads((directory / "summary.json").read_text())
    return found
