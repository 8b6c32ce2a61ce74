"""The tables of the real model: means over seeds, differences by problem, one run after the other in one file."""

from pathlib import Path

import msgspec
import pytest

from benchmarks import real_model
from benchmarks.real_model import by_subject, early_reward, gap, kept_seeds, main, markdown
from benchmarks.real_model_runs import Seed
from benchmarks.results import Report


def seed_of(
    number: int, subject: str = "prefixes", trained: str = "1110", none: str = "1000"
) -> Seed:
    return Seed(
        subject=subject,
        seed=number,
        commit="c",
        settings=(),
        rewards={"no_prefix.greedy": none, "trained_adapter.greedy": trained},
        curve=[0.1] * 16 + [0.5] * 24,
        target_tokens=[100] * 40,
        warm_start_tokens=0,
        train_s=60.0,
    )


def test_differences_are_paired_by_problem_and_their_mean_is_over_seeds() -> None:
    seeds = by_subject([seed_of(2, trained="1100"), seed_of(1)])
    first, second = seeds["prefixes"]
    assert (first.seed, second.seed) == (1, 2)
    paired = gap(first, "trained_adapter", "greedy", ())
    assert paired is not None and (paired.mean, paired.better, paired.worse) == (0.5, 2, 0)
    page = markdown(seeds)
    # Means 0.5 and 0.25, Student's interval of two values.
    assert "| prefixes | 2 | trained adapter | 0.625 | +0.375 (-1.213 to +1.963) |" in page
    assert "| prefixes | 2 | no prefix | 0.250 |  |" in page


def test_a_run_that_judged_its_adapter_alone_is_compared_with_the_run_of_its_seed() -> None:
    alone = msgspec.structs.replace(
        seed_of(2, "synchronous"), rewards={"trained_adapter.greedy": "1111"}
    )
    others = [seed_of(1, none="0000"), seed_of(2, none="1100")]
    page = markdown(by_subject([alone, *others]))
    assert "| synchronous | 1 | trained adapter | 1.000 | +0.500 (+0.500 to +0.500) |" in page


def test_samples_of_the_untrained_adapter_have_no_curve() -> None:
    best = msgspec.structs.replace(
        seed_of(1, "best_of"), rewards={"best_of_8_untrained.greedy": "1110"}, curve=[]
    )
    page = markdown(by_subject([best, seed_of(1)]))
    assert "| best_of | 1 | best of 8 untrained | 0.750 | +0.500 (+0.500 to +0.500) |" in page
    assert page.count("| best_of |") == 1


def test_a_curve_is_told_by_its_beginning_and_by_quarters() -> None:
    assert early_reward(seed_of(1)) == pytest.approx(0.1)
    page = markdown(by_subject([seed_of(1)]))
    assert "| prefixes | 0.100 | 0.100, 0.260, 0.500, 0.500 | 4,000 | 0 |" in page


def test_in_direct_mode_the_model_before_training_is_the_baseline() -> None:
    direct = msgspec.structs.replace(
        seed_of(1, "direct"),
        rewards={"untrained_adapter.greedy": "1000", "trained_adapter.greedy": "1111"},
    )
    assert "| direct | 1 | trained adapter | 1.000 | +0.750 (+0.750 to +0.750) |" in markdown(
        by_subject([direct])
    )


def test_runs_are_added_to_a_file_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        real_model, "trained_seed", lambda name, number, runs, settings: seed_of(number, name)
    )
    path = tmp_path / "real_model.json"
    for asked in ("prefixes:1", "plain:1", "prefixes:2", "prefixes:1"):
        main.main(["--json", str(path), "--run", asked], standalone_mode=False)
    kept = [(seed.subject, seed.seed) for seed in kept_seeds(path)]
    assert sorted(kept) == [("plain", 1), ("prefixes", 1), ("prefixes", 2)]
    report = msgspec.json.decode(path.read_bytes(), type=Report)
    assert {figure.name for figure in report.figures if figure.n == 2} == {
        "prefixes: accuracy, greedy",
        "prefixes: mean reward of the first 16 iterations",
    }
    assert "| plain | 1 |" in path.with_suffix(".md").read_text()
