"""The tasks of `benchmarks.own_tasks`: what is asked, answered and held out; a run that learned nothing is told so."""

import json
from pathlib import Path

import pytest

from benchmarks.newcomer.tasks import TASKS, problems, write_problems
from benchmarks.own_tasks import Outcome, figures_of, markdown
from benchmarks.results import Report


@pytest.mark.parametrize("task", TASKS)
def test_the_right_opening_brings_the_gold_answer_and_hardly_another_does(
    task: str, tmp_path: Path
) -> None:
    kinds, rows = TASKS[task].kinds, problems(TASKS[task])
    write_problems(TASKS[task], tmp_path, 0)
    held, train = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("heldout", "train")
    )
    gold = {row["question"]: row["answer"] for row in (*held, *train)}
    assert len(gold) == len(held) + len(train) == 4 * len(held) and len(kinds) == 6
    right = [[f"{{{gold[row.question]}}}" in row.answered(kind) for kind in kinds] for row in rows]
    assert all(map(any, right)) and sum(map(sum, right)) < 1.1 * len(right)


def test_a_run_without_a_gain_is_counted_by_whether_it_says_so() -> None:
    told = (
        "a gain: x",
        "no gain shown: x. `prefixrl docs your_own_task`, section 9, says what to try",
        "x",
    )
    runs = [
        Outcome(
            "units",
            "as printed",
            seed,
            [0.0],
            [0.0],
            [1.0],
            [0.5] * 9 + [0.95] * 10,
            [],
            [],
            said,
            1.0,
        )
        for seed, said in enumerate(told)
    ]
    text = markdown(
        runs, Report("own_tasks", True, {}, [], [], "c0ffee", machine={"cores": 2, "cpu": "x"})
    )
    assert "as printed: 1 of 3 runs show a gain" in text and "without a word of it: 1" in text
    assert [(each.name, each.value) for each in figures_of(runs)] == [("units, as printed", 1.0)]
    assert runs[0].reached == 18
