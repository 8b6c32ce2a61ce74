"""Runs with a loss function of one's own: each shipped one trains, on two ranks too; a broken one ends the start."""

import json
from pathlib import Path

import pytest

from support.paths import ROOT
from support.runs.run_helper import SMALL, check_books, finish, launched

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SHORT = (*SMALL, "algorithm.iterations=3", "evaluation.problems=8", "algorithm.name=grpo")
METRICS = {
    "cispo": {"clipped"},
    "sapo": {"gate"},
    "squared_log_ratio": {"outside", "square"},
    "vespo": {"phi"},
    "dppo": {"past_bound"},
    "opsm": {"stale"},
    "a3po": {"weight"},
    "topr": {"tapered"},
    "bands": {"masked"},
}


EVERY_DAY = "cispo"
"""The loss that is tried for every change, with two ranks; its siblings have twins of their formulas."""
CASES = [
    pytest.param(name, marks=[] if name == EVERY_DAY else pytest.mark.nightly) for name in METRICS
]


@pytest.mark.parametrize("name", CASES)
def test_a_run_trains_with_a_shipped_loss(tmp_path: Path, name: str) -> None:
    file = ROOT / f"deploy/examples/losses/{name}.py"
    settings = (
        f"algorithm.loss_function={file}:loss",
        f"launch.learner_ranks={2 if name == EVERY_DAY else 1}",
    )
    with launched(tmp_path / "run", *SHORT, *settings) as process:
        check_books(finish(process, tmp_path / "run"), tmp_path / "run")
    lines = [
        json.loads(line)["figures"]
        for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    ]
    for each in lines:
        assert {key.removeprefix("loss/") for key in each if key.startswith("loss/")} == METRICS[
            name
        ]
    assert all(each["actor_grad_norm"] > 0 and each["bounded_fraction"] == 0 for each in lines)


def test_a_broken_loss_ends_the_run_at_its_start_as_the_users_fault(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def loss(logprobs, proximal, behaviour, advantages, mask):\n    return 0.0, {}\n"
    )
    with launched(
        tmp_path / "run", *SHORT, f"algorithm.loss_function={tmp_path}/mine.py:loss"
    ) as process:
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 2, output
    assert (
        f"algorithm.loss_function = '{tmp_path}/mine.py:loss' returned (float, dict); expected"
        in output
    )
