"""A policy that collapses onto one text, by real training, is named wherever a person looks."""

import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from prefixrl.common.run.prometheus import port_of
from support.fakes import free_pair
from support.runs.run_helper import (
    SMALL,
    check_books,
    finish,
    launched,
    trained_iterations,
    wait_for,
)

pytestmark = [pytest.mark.timeout(400), pytest.mark.nightly]

COLLAPSING = (
    "learner.actor_lr=2e-2",
    "algorithm.entropy=0.0",
    "algorithm.kl=0.0",
    "algorithm.iterations=30",
)
ONE_TEXT = "the adapter writes one and the same text in "
SOON = 10
"""Iterations after the collapse in which it must be named."""


def status(directory: Path) -> str:
    """All that `prefixrl status` prints, on lines that a pipe does not wrap, whatever its exit code."""
    done = subprocess.run(
        [sys.executable, "-m", "prefixrl.deploy", "status", str(directory)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    return " ".join((done.stdout + done.stderr).split())


def scraped(port: int) -> str:
    """The numbers that a process serves to Prometheus."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        result: str = answer.read().decode()
        return result


def test_a_collapse_is_named_on_the_console_in_status_and_in_the_report_within_ten_iterations(
    tmp_path: Path,
) -> None:
    directory = tmp_path / "run"
    metrics = directory / "metrics.jsonl"
    port = free_pair()
    with launched(directory, *SMALL, *COLLAPSING, f"log.prometheus_port={port}") as process:
        wait_for(lambda: metrics.exists() and b'"one_text"' in metrics.read_bytes(), "the alarm")
        # Both show the newest iteration, and an adapter on its way down may leave its text for one.
        wait_for(
            lambda: 'prefixrl_alarm{of="one_text"} 1.0' in scraped(port_of(port, "learner")),
            "the alarm's gauge",
        )
        wait_for(lambda: ONE_TEXT in status(directory), "the alarm in the status")
        seen = trained_iterations(directory)
        served = "".join(
            scraped(port_of(port, name)) for name in ("learner", "rollout-0", "scorer-0")
        )
        summary = finish_with_output(process, directory)
    console = (tmp_path / "console.txt").read_text()
    lines = [json.loads(each) for each in metrics.read_text().splitlines()]
    collapse = next(
        each["iteration"] for each in lines if each["figures"]["commonest_text_fraction"] > 0.9
    )
    assert min(each["figures"]["entropy"] for each in lines) < 0.01, "it has collapsed"
    first = next(each for each in summary["alarms"] if each["kind"] == "one_text")
    assert first["first"] <= collapse + SOON
    assert "prefixrl_worker_tokens" in served
    assert all(f'role="{role}",run="run"' in served for role in ("learner", "rollout", "scorer"))
    assert seen < 30, "status named it while the run went on"
    assert f"ALARM iteration {first['first']}: {ONE_TEXT}" in console
    assert ONE_TEXT in status(directory)
    page = (directory / "report.html").read_text()
    assert (
        ONE_TEXT in page
        and '"groups":[["Newest",[{"iteration":29,' in page
        and "no samples" not in page
    )
    assert f"iteration {first['first']}: {ONE_TEXT}" in (directory / "logs/learner.log").read_text()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_collapse_is_answered_by_earlier_weights_and_half_the_rates(
    ranks: int, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    answer = ("algorithm.on_collapse=go_back", "checkpoint.every=1", "broker.stall_s=300")
    settings = (*SMALL, *COLLAPSING, *answer, f"launch.learner_ranks={ranks}")
    with launched(directory, *settings) as process:
        summary = finish(process, directory)
    check_books(summary, directory)
    changes = [json.loads(line) for line in (directory / "changes.jsonl").read_text().splitlines()]
    rates = [(each["before"], each["after"]) for each in changes if "rates" in each["key"]]
    assert rates and rates[0] == (1.0, 0.5)
    weights = [each for each in changes if each["key"] == "version of the weights"]
    assert all(each["after"] < each["before"] == each["iteration"] for each in weights)
    assert ONE_TEXT in weights[0]["reason"] or "collapsed" in weights[0]["reason"]
    lines = [json.loads(each) for each in (directory / "metrics.jsonl").read_text().splitlines()]
    entropies = {each["iteration"]: each["figures"]["entropy"] for each in lines}
    first = weights[0]["iteration"]
    assert max(entropies[i] for i in entropies if i > first) > 10 * entropies[first - 1]


def finish_with_output(process: "subprocess.Popen[str]", directory: Path) -> dict[str, Any]:
    """Wait for the end; keep what the console said beside the run."""
    output, _ = process.communicate(timeout=240)
    (directory.parent / "console.txt").write_text(output)
    assert process.returncode == 0, output
    result: dict[str, Any] = json.loads((directory / "summary.json").read_text())
    return result
