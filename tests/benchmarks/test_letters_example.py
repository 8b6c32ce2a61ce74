"""The benchmark of the letters example: judges agree with what is known, outcomes become figures and a table."""

from pathlib import Path

import pytest

from benchmarks import letters_example
from benchmarks.kept import KeptRuns
from benchmarks.letters_example import (
    PROGRAM,
    SETTINGS,
    Outcome,
    figures_of,
    heldout_of,
    markdown,
    run_all,
    untrained,
)
from benchmarks.results import Report
from prefixrl.common.config.load import load

WITHOUT = {"target alone": [0.0, 1.0], "best opening per question": [1.0, 1.0]}


def told(setting: str, seed: int, *rewards: float) -> Outcome:
    """A run with these training rewards."""
    return Outcome(
        setting,
        seed,
        [0.25, 0.5],
        [1.0, 0.5 + seed / 4],
        [*rewards],
        [0.2] * len(rewards),
        2560,
        1.0,
    )


def test_the_best_opening_of_each_question_is_always_right_and_no_single_one_is() -> None:
    config = load(letters_example.RUN_FILE)
    actual = untrained(config, heldout_of(config)[:16])
    alone, single, best = actual.values()
    assert sum(best) == len(best) == 16 > sum(single) and sum(alone) < 12
    assert all(one <= most for one, most in zip(single, best, strict=True))


def test_reached_is_where_ten_iterations_in_a_row_have_the_reward() -> None:
    assert told("", 1, *[0.5] * 5, *[0.95] * 20).reached == 14
    assert told("", 1, *[0.5, 0.95] * 20).reached is None


def test_every_setting_of_every_seed_is_run_once_and_becomes_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def instead(name: str, config: object, _: object) -> Outcome:
        ran.append(name)
        return told(name, config.seed, *[0.95] * 10)  # type: ignore[attr-defined]

    monkeypatch.setattr(letters_example, "by_system", instead)
    monkeypatch.setattr(letters_example, "by_plain_loop", instead)
    for _ in range(2):
        outcomes = run_all((1, 2), (), KeptRuns(tmp_path / "found.json", Outcome, PROGRAM))
    assert ran == [*SETTINGS] * 2 and len(outcomes) == len(ran)
    figures = {figure.name: figure for figure in figures_of(outcomes, WITHOUT)}
    assert figures["adapter after training, system, S = 2"].value == pytest.approx(
        (0.875 + 1.0) / 2
    )
    assert figures["target alone"].value == 0.5
    text = markdown(
        outcomes,
        WITHOUT,
        Report("letters_example", True, {}, [], [], "c0ffee", machine={"cores": 2, "cpu": "x"}),
    )
    assert "| system, S = 2 | 0.875 (" in text and "| 0.950 | 10, 10 | 2,560 |" in text
