"""Direct mode on real processes.

The books are right, no target is loaded, and a user's functions are what is trained on.
"""

import json
from pathlib import Path

import psutil
import pytest

import prefixrl
from support.processes import titled
from support.runs.run_helper import (
    ROOT,
    check_books,
    finish,
    inspect,
    launched,
    trained_iterations,
    wait_for,
)

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]

RUN_FILE = ROOT / "deploy/examples/arithmetic_direct/run.toml"
SMALL = (
    "algorithm.groups_per_iteration=16",
    "algorithm.iterations=6",
    "evaluation.problems=64",
    "broker.silence_s=2",
)
MINE = """
import os


def score(question, answer, gold):
    if "biggest" in answer:
        raise ValueError("not of interest")
    reward = 0.25 if f"boxed{{{gold}}}" in answer else 0.125
    return {"reward": reward, "twice": 2 * reward, "key": len(os.environ["JUDGE_KEY"])}


def advantages(rewards, groups):
    best = {group: max(r for r, g in zip(rewards, groups) if g == group) for group in groups}
    return [reward - best[group] for reward, group in zip(rewards, groups)]
"""


def mapped_torch(process: psutil.Process) -> bool:
    return any("libtorch" in each.path for each in process.memory_maps())


@pytest.mark.parametrize(
    ("staleness", "swap"), [pytest.param(0, "drain", marks=pytest.mark.nightly), (2, "in_flight")]
)
def test_a_short_run_keeps_its_books_and_loads_no_target(
    tmp_path: Path, staleness: int, swap: str
) -> None:
    directory = tmp_path / "run"
    settings = (f"algorithm.max_staleness={staleness}", "rollout.answer_tokens=19")
    settings += (f"rollout.swap={swap}",)
    with launched(directory, *SMALL, *settings, run_file=RUN_FILE) as process:
        wait_for(lambda: trained_iterations(directory) >= 2, "the second iteration")
        working = titled(process.pid, "prefixrl-scorer")
        assert working and not any(mapped_torch(each) for each in working)
        summary = finish(process, directory)
    check_books(summary, directory)
    assert summary["groups"]["trained"] == 6 * 16
    assert set(summary["accuracy"]) == {"untrained_adapter", "trained_adapter"}
    assert summary["evaluations_incomplete"] == []
    assert summary["accuracy"]["untrained_adapter"] < 0.6
    assert summary["engine"] == {"rollout": "transformers", "scorer": "verifier"}
    assert json.loads((directory / "config.json").read_text())["target"] is None
    rows = [row for line in inspect(directory) for row in line["rows"]]
    assert max(len(row["prefix_ids"]) for row in rows) == 19
    for row in rows:
        assert sum(span["tokens"] for span in row["spans"]) == len(row["prefix_ids"])
        assert len(row["spans"]) == 1 or swap == "in_flight"
    cut = [row for row in rows if row["finish"] == "length"]
    # Answers with the longer openings have 20 tokens with their end: all of them are cut, the others never.
    assert cut and {(row["reward"], row["extracted"]) for row in cut} == {(0.0, "")}
    assert summary["truncated_fraction"] == pytest.approx(len(cut) / len(rows))
    assert {row["reward"] for row in rows} == {0.0, 1.0}
    lines = (directory / "evaluations/trained_adapter.greedy.jsonl").read_text().splitlines()
    assert all(json.loads(line)["prefix"] == "" for line in lines)


@pytest.mark.nightly
def test_grpo_on_fractional_rewards_with_parts_and_advantages_of_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    (tmp_path / "mine.py").write_text(MINE)
    settings = (
        "algorithm.name=grpo",
        f"reward.function={tmp_path}/mine.py:score",
        'reward.environment=["JUDGE_KEY"]',
        f"algorithm.advantage_function={tmp_path}/mine.py:advantages",
        "algorithm.kl=0",
    )
    directory = tmp_path / "run"
    with launched(directory, *SMALL, *settings, run_file=RUN_FILE) as process:
        summary = finish(process, directory)
    check_books(summary, directory)
    assert summary["groups"]["trained"] == 6 * 16
    assert summary["verifier_errors"] > 0
    lines = inspect(directory)
    for line in lines:
        kept = [row for row in line["rows"] if row["status"] != "error"]
        best = max((row["reward"] for row in kept), default=0.0)
        for row in kept:
            assert not row["reward"] or row["parts"] == {"twice": 2 * row["reward"], "key": 6}
            assert row["reward"] in ((0.25, 0.125) if row["finish"] == "eos" else (0.0,))
            assert row["advantage"] == pytest.approx(row["reward"] - best)
    for line in prefixrl.Run(directory).metrics():
        assert line["figures/reward_part/key"] == 6 and line["figures/reward_part/twice"] > 0.25
    assert "secret" not in (directory / "config.json").read_text()
    failed = [row for line in lines for row in line["rows"] if row["status"] == "error"]
    assert failed
    assert {row["extracted"] for row in failed} == {"ValueError: not of interest (mine.py, line 7)"}
    assert summary["accuracy"]["untrained_adapter"] < 0.25
