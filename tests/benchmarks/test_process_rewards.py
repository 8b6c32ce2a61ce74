"""The comparison of process rewards with outcomes alone: its task, and its figures from given runs."""

import json
import random
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from benchmarks.process_rewards import DIGITS, Outcome, build, figures_of
from prefixrl.deploy.examples.arithmetic import problems


def test_the_bar_is_reached_by_the_mean_of_five_iterations_and_not_by_a_single_one() -> None:
    def outcome(*rewards: float) -> Outcome:
        return Outcome("outcome", 1, list(rewards), [], 0.5, 1.0)

    assert outcome(0, 1, 0, 0, 0, 0).steps_to_bar is None
    assert outcome(0.5, 0.8, 0.8, 0.8, 0.8, 0.8).steps_to_bar == 6
    actual = {
        each.name: each.value
        for each in figures_of([outcome(1, 1, 1, 1, 1), outcome(0, 0, 0, 0, 0)], 5)
    }
    assert actual == {"iterations to a reward of 0.8, outcome": 5.0, "final accuracy, outcome": 0.5}


def test_the_best_ranking_is_of_five_iterations_and_of_the_seeds_that_have_one() -> None:
    ranked = Outcome(
        "prime", 1, [0.0] * 7, [0.5, 0.9, 0.9, 0.9, 0.9, 0.9, 0.4], 0.5, 1.0, [0.5] * 7
    )
    unranked = Outcome("prime", 2, [0.0] * 7, [], 0.5, 1.0)
    actual = {each.name: each.value for each in figures_of([ranked, unranked], 7)}
    assert actual["best pairwise accuracy, prime"] == pytest.approx(0.9)
    assert (
        actual["iterations to a pairwise accuracy of 0.8, prime"] == 5
    )  # the mean of the first five is 0.82


def test_the_task_has_answers_of_more_than_30_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(problems, "DIGITS", problems.DIGITS)
    build(tmp_path, lessons=1)
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert {len(row["question"].split()) for row in rows} == {1 + DIGITS}
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "policy")
    problem = next(problems.stream(random.Random(1), set()))
    lengths = [
        len(tokenizer.encode(problem.worked(opening), add_special_tokens=False)) + 1
        for opening in range(4)
    ]
    assert min(lengths) > 30 and max(lengths) <= 48
