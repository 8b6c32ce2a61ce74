"""The second task's driver: it goes on where it was interrupted, and settings become figures, a table and a picture."""

from pathlib import Path

import pytest

from benchmarks import second_task
from benchmarks.aged_run import Target
from benchmarks.kept import KeptRuns
from benchmarks.openings.arms import RUN_FILE, Iteration, Outcome, Setting, Size
from benchmarks.results import Report
from benchmarks.second_task import (
    FRESH,
    PROGRAM,
    SETTINGS,
    draw,
    figures_of,
    less_fresh,
    markdown,
    run_all,
)
from prefixrl.common.config.algorithm import AlgorithmConfig
from prefixrl.common.config.run import RunConfig

USUAL = AlgorithmConfig()
DEFAULTS = {
    "correction": USUAL.correction,
    "bound_ratio": USUAL.bound_ratio,
    "ratio": USUAL.ratio_used,
}
SIZE = Size((1, 2), iterations=20, heldout=8, evaluate_every=10)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The settings and seeds that were run; none is, in truth."""
    ran: list[tuple[str, int]] = []

    def instead(
        name: str, setting: Setting, config: RunConfig, size: Size, target: Target
    ) -> Outcome:
        ran.append((name, config.seed))
        return told(name, config.seed, 0.9 - 0.1 * setting.age)

    monkeypatch.setattr(second_task, "run_arm", instead)
    return ran


def told(setting: str, seed: int, final: float, ess: float = 0.9) -> Outcome:
    """A run that ended with this reward."""
    last = Iteration(final, 0.02, ess, 0.3)
    return Outcome(
        setting, seed, [(0, 0.3), (20, final)], [Iteration(0.5, 0.2, 1.0, 0.3), last], 11, last, 1.0
    )


def test_it_goes_on_with_what_is_missing_and_names_of_one_config_share_their_runs(
    made: list[tuple[str, int]], tmp_path: Path
) -> None:
    kept = KeptRuns(tmp_path / "found.json", Outcome, PROGRAM)
    default = "product, S = 2, default"
    settings = {name: SETTINGS[name] for name in (FRESH, default)}
    run_all(settings, SIZE, RUN_FILE, kept)
    assert made == [(FRESH, 1), (default, 1), (FRESH, 2), (default, 2)]
    twin = {
        **settings,
        "the same": SETTINGS[default],
        "plain loop, delay 2": SETTINGS["plain loop, delay 2"],
    }
    outcomes = run_all(twin, SIZE, RUN_FILE, kept)
    assert made[4:] == [("plain loop, delay 2", 1), ("plain loop, delay 2", 2)]
    assert [each.setting for each in outcomes] == [*twin] * 2
    assert [each.final for each in outcomes if each.setting == "the same"] == pytest.approx(
        [0.7, 0.7]
    )


def test_settings_of_a_default_that_is_named_are_one(
    made: list[tuple[str, int]], tmp_path: Path
) -> None:
    names = ("product, S = 8, default", "product, S = 8, the same")
    keys = tuple(f"algorithm.{key}={value}" for key, value in DEFAULTS.items())
    settings = {names[0]: SETTINGS[names[0]], names[1]: Setting(8, keys)}
    run_all(settings, SIZE, RUN_FILE, KeptRuns(tmp_path / "found.json", Outcome, PROGRAM))
    assert made == [(names[0], 1), (names[0], 2)]


def test_outcomes_become_figures_table_and_picture(tmp_path: Path) -> None:
    late = "product, S = 2, default"
    outcomes = [told(FRESH, seed, 0.9 + 0.01 * seed) for seed in (1, 2)]
    outcomes += [told(late, seed, 0.2 + 0.01 * seed, ess=0.1 * seed) for seed in (2, 1)]
    assert less_fresh(outcomes, late) == pytest.approx([-0.7, -0.7])
    figures = {figure.name: figure for figure in figures_of(outcomes, [FRESH, late])}
    assert figures[f"final reward less that of S = 0, {late}"].value == pytest.approx(-0.7)
    assert (
        figures[f"collapsed, {late}"].value == 1.0 and figures[f"collapsed, {FRESH}"].value == 0.0
    )
    report = Report("second_task", True, {}, [], [], "c0ffee", machine={"cores": 2, "cpu": "x"})
    text = markdown(outcomes, [FRESH, late], SIZE, report)
    assert f"| {late} | 0.215 [" in text and "| 0.150, 0.100 | 2 of 2 |" in text
    draw(outcomes, [FRESH, late], tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000
