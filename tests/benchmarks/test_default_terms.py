"""The terms that are compared: which runs a stage has, what ended well, what fell; the tasks that are kept back."""

from pathlib import Path

import pytest

from benchmarks.default_terms import (
    ARMS,
    LARGEST_BONUS,
    TARGET_ENTROPY,
    Outcome,
    bonus_towards_target,
    cells_of,
    ended_well,
    grouped,
    markdown,
)
from benchmarks.newcomer.kept_back import KEPT_BACK
from benchmarks.newcomer.tasks import problems, write_problems
from benchmarks.results import Report


def outcome(arm: str, seed: int, *rewards: float) -> Outcome:
    heldout = [(10 * place, reward) for place, reward in enumerate(rewards)]
    return Outcome("letters", "held", arm, seed, heldout, [], [], [], 1.0)


def test_a_seed_ended_well_near_the_best_of_any_arm_and_fell_where_it_was_higher() -> None:
    runs = [
        outcome("no terms", 1, 0.2, 0.5, 0.9, 0.9),
        outcome("no terms", 2, 0.2, 0.8, 0.5, 0.5),
        outcome("go_back", 1, 0.2, 0.5, 0.8, 0.86),
    ]
    groups = grouped(runs)
    assert ended_well(groups, "letters", "held", "no terms") == [1.0, 0.0]
    assert ended_well(groups, "letters", "held", "go_back") == [1.0]
    assert [run.has_fallen for run in runs] == [False, True, False]
    page = markdown(runs, Report("default_terms", True, {}, [], [], "c0ffee"))
    assert "| letters | held | no terms | 1 of 2 | 0.700 | 0.50, 0.90 | 1 | 0 |" in page


def test_defaults_are_chosen_and_shown_on_different_tasks() -> None:
    choice, shown = (list(cells_of(stage, False)) for stage in ("choice", "shown"))
    assert len(choice) == 4 * 5 * len(ARMS) and len(shown) == 3 * 10 * 2 * 4
    assert not {cell.task for cell in choice} & {cell.task for cell in shown}


def test_the_bonus_grows_below_the_target_entropy_and_shrinks_above_it() -> None:
    assert bonus_towards_target(0.01, TARGET_ENTROPY / 2) > 0.01
    assert bonus_towards_target(0.01, TARGET_ENTROPY * 2) < 0.01
    assert bonus_towards_target(LARGEST_BONUS, 0.0) == LARGEST_BONUS


@pytest.mark.parametrize("name", KEPT_BACK)
def test_the_right_opening_of_a_task_kept_back_is_nearly_always_the_only_one(
    name: str, tmp_path: Path
) -> None:
    task = KEPT_BACK[name]
    write_problems(task, tmp_path, 0)
    rows = problems(task)
    held_out = (tmp_path / "heldout.jsonl").read_text().count("\n")
    assert held_out == len(rows) // 4 and len({row.question for row in rows}) == len(rows)
    equal = [
        sum(kind.result(row.number) == row.kind.result(row.number) for kind in task.kinds)
        for row in rows
    ]
    assert min(equal) == 1 and sum(equal) < 1.2 * len(rows)
