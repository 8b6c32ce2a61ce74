"""The ablation's driver: ages are exact and true, and arms differ in what they name only."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from torch import Tensor

from benchmarks import staleness_ablation
from benchmarks.aged_run import AgedRun, Target, Trained
from benchmarks.results import Report
from benchmarks.snapshots import snapshot_of
from benchmarks.staleness_ablation import CORRECTIONS, draw, figures_of, holds_to, markdown, run_all
from benchmarks.staleness_arms import Arm, Run, Size, ages_of, config_of, run_arm
from prefixrl.common.engines.hf import TransformersEngine
from prefixrl.learner.training.batch import IterationData
from support.tiny_model import DEEPSPEED_WARNINGS

pytestmark = DEEPSPEED_WARNINGS

LEARNING_RATE = 1e-3
SIZE = Size((0, 2), (1,), iterations=5, groups=2, problems=8, evaluate_every=5)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(config_of(arm(), SIZE))


def arm(age: int = 2, correction: str = "none") -> Arm:
    return Arm(age, correction, 1, LEARNING_RATE)


def trained(run: AgedRun) -> tuple[list[Trained], list[dict[str, Tensor]]]:
    """Every iteration, and the weights of every version."""
    weights, iterations = [run.models.state_dict_for_publication()], []
    for _ in range(SIZE.iterations):
        run.fill()
        iterations.append(run.train())
        weights.append(run.models.state_dict_for_publication())
    return iterations, weights


def behaviour_gap(engine: TransformersEngine, data: IterationData) -> float:
    """Largest difference between the logprobs samples carry and those of the weights installed in `engine`."""
    gaps = []
    for sample in data.samples.values():
        whole = np.concatenate([sample.prompt_tokens, sample.tokens])
        own = engine.logprobs(whole, 1.0)[-sample.tokens.size :]
        gaps.append(float(np.abs(own - sample.logprobs).max()))
    return max(gaps)


@pytest.mark.parametrize("age", [0, 2])
def test_every_sample_has_the_age_asked_for_and_the_logprobs_of_the_version_it_names(target: Target, age: int) -> None:
    config = config_of(arm(age), SIZE)
    run = AgedRun(config, target)
    iterations, weights = trained(run)
    engine = TransformersEngine(config.adapter.model, "cpu", "float32", 1)
    rows = SIZE.groups * config.algorithm.samples_per_prompt
    for number, each in enumerate(iterations):
        due = min(number, age)
        assert each.ages == Counter({due: rows})
        assert {sample.version for sample in each.data.samples.values()} == {number - due}
        engine.install(snapshot_of(number - due, weights[number - due]))
        assert behaviour_gap(engine, each.data) < 1e-4
        engine.install(snapshot_of(number - due + 1, weights[number - due + 1]))
        assert behaviour_gap(engine, each.data) > 1e-2, "the next version must be told apart"
    assert run.ledger.counts.age_histogram == sum(
        (Counter({min(number, age): SIZE.groups}) for number in range(SIZE.iterations)), Counter()
    )
    assert run.ledger.outstanding == 0
    assert ages_of(arm(age), iterations[age:]) == {age: rows * (SIZE.iterations - age)}


def test_an_age_that_is_not_the_arms_is_noticed(target: Target) -> None:
    iterations, _ = trained(AgedRun(config_of(arm(1), SIZE), target))
    with pytest.raises(AssertionError, match="ages"):
        ages_of(arm(2), iterations)


def test_arms_differ_in_their_correction_only_and_train_the_same_samples_until_it_acts(target: Target) -> None:
    arms = [arm(2, correction) for correction in CORRECTIONS]
    dumps: list[dict[str, Any]] = [config_of(each, SIZE).model_dump() for each in arms]
    assert [dump["algorithm"].pop("correction") for dump in dumps] == list(CORRECTIONS)
    assert dumps[0] == dumps[1] == dumps[2]
    runs = [trained(AgedRun(config_of(each, SIZE), target)) for each in arms]
    (first, weights), *others = runs
    # Version 1 was trained on samples of its own version, where the corrections agree; version 2 is the first that was
    # not.
    differ_from = 2 + 2
    for iterations, other_weights in others:
        for number, (mine, theirs) in enumerate(zip(first, iterations, strict=True)):
            prompts = [
                [sample.prompt_tokens.tobytes() for sample in each.data.samples.values()] for each in (mine, theirs)
            ]
            assert prompts[0] == prompts[1]
            assert is_same(mine.data, theirs.data) == (number < differ_from)
        assert furthest(weights[-1], other_weights[-1]) > 1e-4


def test_at_age_0_the_corrections_agree_to_rounding(target: Target) -> None:
    runs = [trained(AgedRun(config_of(arm(0, each), SIZE), target)) for each in CORRECTIONS]
    (first, weights), *others = runs
    for iterations, other_weights in others:
        assert furthest(weights[-1], other_weights[-1]) < 1e-4
        for mine, theirs in zip(first, iterations, strict=True):
            assert mine.data.rewards == theirs.data.rewards
            for name in ("clip_fraction", "approx_kl", "importance_ess_fraction"):
                assert mine.metrics.means[name] == pytest.approx(theirs.metrics.means[name], abs=1e-4)


def is_same(a: IterationData, b: IterationData) -> bool:
    rows = zip(a.samples.values(), b.samples.values(), strict=True)
    return a.rewards == b.rewards and all(
        np.array_equal(mine.tokens, theirs.tokens) and np.allclose(mine.logprobs, theirs.logprobs, atol=1e-5)
        for mine, theirs in rows
    )


def furthest(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return max(float((tensor - b[name]).abs().max()) for name, tensor in a.items())


def test_a_run_says_what_it_trained_and_cells_become_figures_table_and_picture(target: Target, tmp_path: Path) -> None:
    run = run_arm(arm(2), SIZE, target)
    assert run.ages == {2: 48} and run.warmup_ages == {0: 16, 1: 16}
    assert run.actor_steps == 4 * SIZE.iterations and run.actor_steps_dropped == 0
    assert [version for version, _ in run.accuracy] == [0, 5]
    runs = [
        told(replace(SIZE, seeds=(seed,)), age, correction, 0.5 + 0.1 * seed - 0.01 * age)
        for seed in (1, 2)
        for age in SIZE.ages
        for correction in CORRECTIONS
    ]
    figures = {figure.name: figure for figure in figures_of(runs, SIZE)}
    assert figures["final accuracy, none, age 2"].value == pytest.approx(0.63)
    assert figures["final accuracy, none, age 2"].ratio == pytest.approx(0.63 / 0.65)
    assert figures["final accuracy less that of age 0, none, age 2"].spread == pytest.approx((-0.02, -0.02))
    report = Report("staleness_ablation", True, {}, [], runs, "c0ffee", machine={"cores": 2, "cpu": "x"})
    assert "| 2 | decoupled | 0.630 [" in markdown(report, runs, SIZE)
    draw(runs, SIZE, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000


def told(size: Size, age: int, correction: str, final: float) -> Run:
    """A run that ended with this accuracy."""
    return Run(
        Arm(age, correction, size.seeds[0], LEARNING_RATE),
        {age: 1},
        {},
        [(0, 0.1), (4, final), (5, final)],
        {"reward": final},
        4,
        0,
        1.0,
    )


def test_an_arm_holds_up_to_the_last_age_before_the_first_that_falls() -> None:
    size = replace(SIZE, ages=(0, 2, 8, 32))
    finals = {0: 1.0, 2: 0.96, 8: 0.94, 32: 0.99}
    runs = [told(size, age, "none", final) for age, final in finals.items()]
    assert holds_to(runs, size, "none") == 2


# --- a benchmark that was interrupted -------------------------------------------------------------------------------


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Arm, Size]]:
    """The arms that were run; none is, in truth."""
    ran: list[tuple[Arm, Size]] = []

    def instead(arm: Arm, size: Size, target: Target) -> Run:
        ran.append((arm, size))
        run = told(size, arm.age, arm.correction, 0.5 + 0.1 * arm.seed)
        return msgspec.structs.replace(run, arm=arm)

    monkeypatch.setattr(staleness_ablation, "run_arm", instead)
    return ran


def test_it_goes_on_with_the_arms_that_are_missing_whatever_their_order(
    made: list[tuple[Arm, Size]], tmp_path: Path
) -> None:
    arms, kept = [arm(age) for age in (0, 2, 8)], tmp_path / "kept.jsonl"
    first = run_all([arms[2]], SIZE, kept)
    runs = run_all(arms, SIZE, kept)
    assert [run.arm for run in runs] == arms
    assert made == [(arms[2], SIZE), (arms[0], SIZE), (arms[1], SIZE)]
    assert runs[2] == first[0]
    assert run_all(arms, SIZE, kept) == runs and len(made) == 3


def test_a_run_of_another_size_or_learning_rate_is_made_again(made: list[tuple[Arm, Size]], tmp_path: Path) -> None:
    kept = tmp_path / "kept.jsonl"
    changed = replace(SIZE, changes=("algorithm.clip=0.1",))
    wanted = [
        ([arm()], SIZE),
        ([arm()], replace(SIZE, groups=3)),
        ([arm()], changed),
        ([msgspec.structs.replace(arm(), actor_lr=1.0)], SIZE),
    ]
    for arms, size in wanted:
        run_all(arms, size, kept)
    assert made == [(arms[0], size) for arms, size in wanted]


@pytest.mark.parametrize(("measured", "runs"), [("c0ffee", 1), ("c0ffee-dirty", 2), ("unknown", 2)])
def test_what_a_tree_with_changes_measured_is_not_gone_on_with(
    made: list[tuple[Arm, Size]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: str, runs: int
) -> None:
    monkeypatch.setattr(staleness_ablation, "commit", lambda: measured)
    monkeypatch.setattr(staleness_ablation, "QUICK", SIZE)
    path = tmp_path / "found.json"
    kept = path.with_suffix(f".{measured}.jsonl")
    first = Arm(0, CORRECTIONS[0], 1, staleness_ablation.LEARNING_RATE)
    run_all([first], SIZE, kept)
    staleness_ablation.main.callback(path, True, False, (), ())  # type: ignore[misc]
    assert sum(each == first for each, _ in made) == runs
    assert path.exists() and not kept.exists()
