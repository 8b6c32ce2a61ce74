"""Problems by their outcomes: the mixture, what a run has paid, and the table."""

import json
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import by_outcome
from benchmarks.by_outcome import ARMS, UNIFORM, MixtureRun, markdown, mixture, savings
from benchmarks.newcomer.mixture_reward import ALWAYS, NEVER, of_letters
from benchmarks.results import Report


def run(arm: str, paid: list[int], *accuracies: float) -> MixtureRun:
    points = [(5 * place, accuracy) for place, accuracy in enumerate(accuracies)]
    return MixtureRun("letters", arm, 1, paid, points, {"learnable": 0.5}, 1.0)


def test_two_fifths_are_hopeless_one_fifth_is_solved_and_nothing_marks_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = tmp_path / "deploy/examples/letters"
    example.mkdir(parents=True)
    rows = [
        {"id": f"p{place}", "question": "flip abcd", "answer": "badc", "family": "flip"}
        for place in range(300)
    ]
    (example / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    monkeypatch.setattr(by_outcome, "ROOT", tmp_path)
    monkeypatch.setattr(by_outcome, "RUNS", tmp_path / "runs")
    written = [json.loads(line) for line in mixture("letters").read_text().splitlines()]
    assert Counter(row["answer"] for row in written) == {NEVER: 96, ALWAYS: 48, "badc": 96}
    assert not any("family" in row for row in written)
    assert len({row["answer"] for row in written[:20]}) == 3, "the kinds stand in turn"


def test_the_rewards_of_the_three_kinds() -> None:
    right, wrong = "Turn each pair round: badc", "Turn each pair round: abcd"
    assert [of_letters("", text, "badc") for text in (right, wrong)] == [1.0, 0.0]
    assert [of_letters("", text, NEVER) for text in (right, wrong)] == [0.0, 0.0]
    assert [of_letters("", text, ALWAYS) for text in (right, wrong)] == [1.0, 1.0]


def test_a_run_has_paid_what_was_judged_before_the_first_good_evaluation() -> None:
    paid = [100 * (place + 1) for place in range(20)]
    learned = run("by outcome", paid, 0.2, 0.5, 0.95, 1.0)
    late = run(UNIFORM, [200 * (place + 1) for place in range(20)], 0.2, 0.3, 0.4, 0.93)
    never = run("behind a filter", paid, 0.2, 0.3)
    assert (learned.paid, late.paid, never.paid) == (1000, 3000, None)
    runs = {("letters", arm): [late] for arm in ARMS}
    runs["letters", "by outcome"], runs["letters", "behind a filter"] = [learned], [never]
    assert savings(runs, "letters", "by outcome") == [3.0]
    assert savings(runs, "letters", "behind a filter") == []
    page = markdown(runs, Report("by_outcome", True, {}, [], [], "c0ffee"))
    assert "| letters | by outcome | 1,000 | 3.00 | 0.50 |" in page
    assert "| letters | behind a filter | never |  | 0.50 |" in page
