"""A run whose objective and reward are those of an installed package, and their names alone are in its run file."""

import json
from pathlib import Path

import pytest

from support.packages import write_package
from support.runs.run_helper import SMALL, check_books, finish, inspect, launched

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SOURCE = """
from prefixrl.common.config.objectives import ObjectiveRecord


def score(question, text, gold):
    return {"reward": float(gold in text), "length": len(text)}


def advantages(rewards, groups):
    return [10.0 * reward - 1.0 for reward in rewards]


TENFOLD = ObjectiveRecord(advantage="10 r - 1", function=advantages)
"""
ENTRIES = "[prefixrl.objectives]\ntenfold = stranger:TENFOLD\n[prefixrl.rewards]\nhas_gold = stranger:score\n"


def test_a_run_takes_objective_and_reward_from_an_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_package(tmp_path, "stranger", ENTRIES, SOURCE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    directory = tmp_path / "run"
    settings = ("algorithm.name=tenfold", "reward.function=has_gold", "algorithm.iterations=3")
    with launched(
        directory, *SMALL, *settings, "algorithm.kl=0", "evaluation.problems=8"
    ) as process:
        check_books(finish(process, directory), directory)
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 3
    for line in lines:
        figures = line["figures"]
        assert figures["reward_part/length"] > 0 and "value_loss" not in figures
    rows = [row for group in inspect(directory) for row in group["rows"]]
    for row in rows:
        assert row["advantage"] == pytest.approx(10 * row["reward"] - 1, abs=1e-4)
    assert {row["reward"] for row in rows} == {0.0, 1.0}
