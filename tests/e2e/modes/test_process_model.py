"""Runs whose reward comes from a process reward model in the scorer.

Training moves by its scores alone, and a scorer that is killed leaves no trace.
"""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from support.models.process_models import SEPARATOR, STEP_TAG_MODEL
from support.runs.run_helper import (
    ROOT,
    check_books,
    child,
    finish,
    inspect,
    launched,
    trained_iterations,
    wait_for,
)

pytestmark = [pytest.mark.timeout(600), pytest.mark.nightly]

RUN_FILE = ROOT / "deploy/examples/arithmetic_direct/run.toml"
SMALL = ("algorithm.groups_per_iteration=16", "evaluation.problems=64", "broker.silence_s=2")


PROCESS = tuple(
    f"scorer.prm.{key}"
    for key in (
        "format=step_tag",
        f"model={STEP_TAG_MODEL}",
        f"separator='{SEPARATOR}'",
        "aggregate=min",
        "max_tokens=128",
        "device=cpu",
    )
)


def figures(directory: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line)["figures"]
        for line in (directory / "metrics.jsonl").read_text().splitlines()
    ]


@pytest.mark.nightly
def test_training_moves_by_the_scores_of_steps_alone(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    # Synchronous, at the example's learning rate: at 1e-3 the policy soon finds answers that please the model alone.
    settings = (
        "algorithm.name=grpo",
        "algorithm.iterations=24",
        "algorithm.kl=0",
        "algorithm.max_staleness=0",
    )
    with launched(directory, *SMALL, *settings, *PROCESS, run_file=RUN_FILE) as run:
        summary = finish(run, directory)
    check_books(summary, directory)
    rows = [row for line in inspect(directory) for row in line["rows"]]
    # The verdict is not in the reward: right answers do not have 1, wrong ones not 0.
    assert all(0.0 < row["reward"] < 1.0 for row in rows if row["finish"] == "eos")
    actual = figures(directory)
    early, late = actual[:2], actual[-4:]

    def mean(of: list[dict[str, Any]], name: str) -> float:
        return float(sum(step[name] for step in of) / len(of))

    assert mean(late, "reward") > mean(early, "reward") + 0.2
    assert mean(late, "outcome") > mean(early, "outcome") + 0.1  # which nothing rewarded
    accuracy = summary["accuracy"]
    assert accuracy["trained_adapter"] > accuracy["untrained_adapter"] + 0.2
    assert accuracy["trained_adapter"] * 64 == pytest.approx(
        round(accuracy["trained_adapter"] * 64)
    )


def test_a_run_whose_scorer_was_killed_ends_with_the_same_adapter(
    tmp_path: Path,
) -> None:
    strict = (
        *SMALL,
        *PROCESS,
        "algorithm.iterations=6",
        "algorithm.max_staleness=0",
        "checkpoint.every=3",
    )
    strict += ("bitwise=true", "scorer.prm.coefficient=0.5", "scorer.prm.outcome_coefficient=0.5")
    with launched(tmp_path / "whole", *strict, run_file=RUN_FILE) as run:
        check_books(finish(run, tmp_path / "whole"), tmp_path / "whole")
    with launched(tmp_path / "killed", *strict, run_file=RUN_FILE) as run:
        wait_for(lambda: trained_iterations(tmp_path / "killed") >= 2, "the second iteration")
        wait_for(lambda: child(run, "prefixrl-scorer"), "the scorer").send_signal(signal.SIGKILL)
        check_books(finish(run, tmp_path / "killed"), tmp_path / "killed")
    weights = "checkpoints/step_00000006/hf/model.safetensors"
    assert (tmp_path / "whole" / weights).read_bytes() == (
        tmp_path / "killed" / weights
    ).read_bytes()
    assert [line["reward"] for line in figures(tmp_path / "whole")] == [
        line["reward"] for line in figures(tmp_path / "killed")
    ]
