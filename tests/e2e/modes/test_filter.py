"""Real daemons on real models with a prompt filter.

A run that goes on with what passes, and one that nothing passes.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from support.runs.run_helper import RUN_FILE, SMALL, check_books, finish, inspect, launched, logs

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]

MIXED = "filter.accuracy=[0.01, 0.99]"


def test_a_run_trains_on_what_passes_and_counts_the_rest_by_cause(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    settings = (*SMALL, "algorithm.iterations=5", MIXED, "filter.over_sampling=1.5")
    with launched(directory, *settings) as process:
        summary = finish(process, directory)
    check_books(summary, directory)
    assert summary["groups"]["trained"] == 5 * 16
    causes = summary["causes"]
    filtered = {"filtered: accuracy 0", "filtered: accuracy 1"}
    assert set(causes) <= filtered | {"expired: surplus"}
    assert sum(causes.get(each, 0) for each in filtered) == summary["groups"]["filtered"] > 0
    assert causes.get("expired: surplus", 0) == summary["groups"]["expired"]
    judged = summary["groups"]["trained"] + summary["groups"]["filtered"]
    assert summary["filter_pass_fraction"] == pytest.approx(summary["groups"]["trained"] / judged)
    assert summary["eval_problems"] == 64, "evaluations are never filtered"
    for line in inspect(directory):
        rewards = [row["reward"] for row in line["rows"] if row["status"] != "error"]
        assert 0 < sum(rewards) < len(rewards)
    shown = subprocess.run(
        [sys.executable, "-m", "prefixrl.deploy", "inspect", str(directory)],
        capture_output=True,
        text=True,
        check=True,
    )
    last = shown.stdout.splitlines()[-1]
    assert last.startswith("ended untrained: ")
    assert all(f"{count} {cause}" in last for cause, count in causes.items())


def unanswerable(folder: Path) -> Path:
    """The example with answers that nothing can be right about."""
    example = RUN_FILE.parent
    rows = [json.loads(line) for line in (example / "train.jsonl").read_text().splitlines()]
    lines = [json.dumps(row | {"answer": "-12345"}) + "\n" for row in rows]
    (folder / "train.jsonl").write_text("".join(lines))
    for name in ("adapter", "target", "heldout.jsonl"):
        (folder / name).symlink_to(example / name)
    (folder / "run.toml").write_text(RUN_FILE.read_text())
    return folder / "run.toml"


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.chaos)])
def test_a_filter_that_nothing_passes_ends_the_run_by_name_and_sends_everybody_home(
    ranks: int, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    settings = (*SMALL, MIXED, "filter.limit_batches=2", f"launch.learner_ranks={ranks}")
    with launched(directory, *settings, run_file=unanswerable(tmp_path)) as process:
        started_s, family = time.monotonic(), {}
        while process.poll() is None and time.monotonic() - started_s < 240:
            for each in psutil.Process(process.pid).children(recursive=True):
                family[each.pid] = each
            time.sleep(0.1)
        output = process.communicate(timeout=30)[0]
    assert process.returncode == 5, output + logs(directory)
    message = "error: iteration 0 gets no batch: 0 of the last 32 judged groups passed"
    assert message in output
    assert message in (directory / "logs/learner.log").read_text()
    assert "filtered: accuracy 0" in output and "filter.min_pass_rate = 0.01" in output
    for log in (directory / "logs").glob("*.log"):
        assert "Traceback" not in log.read_text(), log.name
    for name in ("rollout-0", "scorer-0"):
        assert "leaving: iteration 0 gets no batch" in (directory / f"logs/{name}.log").read_text()
    assert not [each for each in family.values() if each.is_running()]
