"""The ablation's driver: ages are exact and true, and arms differ in what they name only."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from torch import Tensor

from benchmarks import kept, staleness_ablation
from benchmarks.aged_run import AgedRun, Target, Trained
from benchmarks.kept import KeptRuns, program_digest
from benchmarks.results import Report
from benchmarks.snapshots import snapshot_of
from benchmarks.staleness_ablation import arms_of, draw, figures_of, markdown, run_all
from benchmarks.staleness_arms import Arm, Run, Size, ages_of, config_of, run_arm
from prefixrl.common.engines.embedded.continuous import TransformersEngine
from prefixrl.learner.models.batch import IterationData
from support.models.tiny_model import DEEPSPEED_WARNINGS

pytestmark = DEEPSPEED_WARNINGS

LEARNING_RATE = 1e-3
COMPARED = ("none", "behaviour", "decoupled")
SIZE = Size((0, 2), (1,), iterations=5, groups=2, problems=8, evaluate_every=5)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(config_of(arm(), SIZE))


def arm(age: int = 2, form: str = "none") -> Arm:
    return Arm(age, form, 1, LEARNING_RATE)


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


@pytest.mark.nightly
@pytest.mark.parametrize("age", [0, 2])
def test_every_sample_has_the_age_asked_for_and_the_logprobs_of_the_version_it_names(
    target: Target, age: int
) -> None:
    config = config_of(arm(age), SIZE)
    run = AgedRun(config, target)
    iterations, weights = trained(run)
    engine = TransformersEngine(config.adapter.model, "cpu", "float32", 1)
    rows = SIZE.groups * config.algorithm.samples_per_prompt
    for number, each in enumerate(iterations):
        due = min(number, age)
        assert each.ages == Counter({due: rows})
        assert {int(sample.versions.min()) for sample in each.data.samples.values()} == {
            number - due
        }
        engine.install(snapshot_of(number - due, weights[number - due]))
        assert behaviour_gap(engine, each.data) < 1e-4
        engine.install(snapshot_of(number - due + 1, weights[number - due + 1]))
        assert behaviour_gap(engine, each.data) > 1e-2, "the next version must be told apart"
    assert run.ledger.counts.age_histogram == sum(
        (Counter({min(number, age): SIZE.groups}) for number in range(SIZE.iterations)), Counter()
    )
    assert run.ledger.outstanding == 0
    assert ages_of(arm(age), iterations[age:]) == {age: rows * (SIZE.iterations - age)}


def test_a_run_says_what_it_trained_and_cells_become_figures_table_and_picture(
    target: Target, tmp_path: Path
) -> None:
    run = run_arm(arm(2), SIZE, target)
    assert run.ages == {2: 48} and run.warmup_ages == {0: 16, 1: 16}
    assert run.actor_steps == 4 * SIZE.iterations and run.actor_steps_dropped == 0
    assert [version for version, _ in run.accuracy] == [0, 5]
    lrs = staleness_ablation.LEARNING_RATES
    runs = [
        told(each, 0.5 + 0.1 * each.seed - 0.01 * each.age) for each in arms_of(SEEDS, COMPARED)
    ]
    figures = {figure.name: figure for figure in figures_of(runs, SEEDS, COMPARED)}
    where = f"none, age 2, learning rate {lrs[0]:g}"
    assert figures[f"final accuracy, {where}"].value == pytest.approx(0.63)
    assert figures[f"final accuracy, {where}"].ratio == pytest.approx(0.63 / 0.65)
    assert figures[f"final accuracy less that of decoupled, {where}"].spread == pytest.approx(
        (0.0, 0.0)
    )
    report = Report(
        "staleness_ablation", True, {}, [], runs, "c0ffee", machine={"cores": 2, "cpu": "x"}
    )
    text = markdown(report, runs, SEEDS, COMPARED)
    assert "| 2 | decoupled | 0.630 [" in text and "| 0.969 | 0.580 |" in text
    draw(runs, SEEDS, COMPARED, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000


SEEDS = replace(SIZE, seeds=(1, 2))


def told(arm: Arm, final: float) -> Run:
    """A run that ended with this accuracy."""
    return Run(
        arm=arm,
        ages={arm.age: 1},
        warmup_ages={},
        accuracy=[(0, 0.1), (4, final), (5, final)],
        figures={"behaviour_gap": 0.1 + arm.age},
        actor_steps=4,
        actor_steps_dropped=0,
        wall_s=1.0,
    )


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Arm, Size]]:
    """The arms that were run; none is, in truth."""
    ran: list[tuple[Arm, Size]] = []

    def instead(arm: Arm, size: Size, target: Target) -> Run:
        ran.append((arm, size))
        return told(arm, 0.5 + 0.1 * arm.seed)

    monkeypatch.setattr(staleness_ablation, "run_arm", instead)
    return ran


def runs_in(folder: Path) -> KeptRuns[Run]:
    return KeptRuns(folder / "found.json", Run, ("learner/training/*.py",))


def test_it_goes_on_with_the_arms_that_are_missing_whatever_their_order(
    made: list[tuple[Arm, Size]], tmp_path: Path
) -> None:
    arms = [arm(age) for age in (0, 2, 8)]
    first = run_all([arms[2]], SIZE, runs_in(tmp_path))
    runs = run_all(arms, SIZE, runs_in(tmp_path))
    assert [run.arm for run in runs] == arms
    assert made == [(arms[2], SIZE), (arms[0], SIZE), (arms[1], SIZE)]
    assert runs[2] == first[0]
    assert run_all(arms, SIZE, runs_in(tmp_path)) == runs and len(made) == 3


def test_a_run_that_two_forms_share_is_made_once_and_stands_under_both(
    made: list[tuple[Arm, Size]], tmp_path: Path
) -> None:
    runs = run_all([arm(0, form) for form in ("none", "decoupled")], SIZE, runs_in(tmp_path))
    assert [run.arm.form for run in runs] == ["none", "decoupled"]
    assert made == [(arm(0, "none"), SIZE)]


def test_a_run_of_another_size_or_learning_rate_is_made_again(
    made: list[tuple[Arm, Size]], tmp_path: Path
) -> None:
    changed = replace(SIZE, changes=("algorithm.clip=0.1",))
    expected = [
        ([arm()], SIZE),
        ([arm()], replace(SIZE, groups=3)),
        ([arm()], changed),
        ([msgspec.structs.replace(arm(), actor_lr=1.0)], SIZE),
    ]
    for arms, size in expected:
        run_all(arms, size, runs_in(tmp_path))
    assert made == [(arms[0], size) for arms, size in expected]


def test_a_run_of_another_program_is_made_again_but_not_of_another_comment(
    made: list[tuple[Arm, Size]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "ROOT", tmp_path)
    source = tmp_path / "loss.py"
    texts = (
        'def loss():\n    """One."""\n    return 1\n',
        'def loss():\n    """The first."""\n    return 1  # one\n',
        "def loss():\n    return 2\n",
    )
    digests = []
    for text in texts:
        source.write_text(text)
        digests.append(program_digest(("*.py",)))
        run_all([arm()], SIZE, KeptRuns(tmp_path / "found.json", Run, ("*.py",)))
    assert digests[0] == digests[1] != digests[2]
    assert len(made) == 2


def test_the_whole_benchmark_ends_with_its_documents_and_keeps_no_runs(
    made: list[tuple[Arm, Size]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staleness_ablation, "QUICK", SEEDS)
    path = tmp_path / "found.json"
    staleness_ablation.main.callback(path, True, ("none", "decoupled"), (), (), ())  # type: ignore[misc]
    assert len(made) == 2 * len(staleness_ablation.LEARNING_RATES) * 3
    assert {each.suffix for each in tmp_path.iterdir()} == {".json", ".md", ".png"}
