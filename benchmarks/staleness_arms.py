"""One run of the ablation of staleness: which prompts, which age, which correction, and what became of it."""

import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from benchmarks.aged_run import AgedRun, Target, Trained
from benchmarks.results import ROOT
from prefixrl.common.config.load import load
from prefixrl.common.config.run import RunConfig
from prefixrl.learner.data.problems import load as load_problems

RUN_FILE = ROOT / "deploy/examples/arithmetic/run.toml"
FIGURES = (
    "reward",
    "importance",
    "importance_ess_fraction",
    "importance_capped_fraction",
    "clip_fraction",
    "approx_kl",
    "behaviour_gap",
    "entropy",
    "reference_kl",
)
SETTINGS = (
    "algorithm.name=grpo",  # no critic, so no second learning rate to fix
    "algorithm.minibatches=4",
    "learner.warmup_ratio=0.0",
    "learner.min_lr_ratio=1.0",  # constant: a falling rate would make late samples less stale than early ones
    "scorer.temperature=0.0",  # a verdict is then a function of question and prefix, and is made once
)


class Arm(msgspec.Struct, frozen=True):
    """The choices that distinguish one run from another."""

    age: int
    correction: str
    seed: int
    actor_lr: float


class Run(msgspec.Struct, frozen=True):
    """The outcome of an arm."""

    arm: Arm
    ages: dict[int, int]
    """Samples trained at each age, in versions, once the window is as old as it gets."""
    warmup_ages: dict[int, int]
    """The same over the first `age` iterations, which train what version 0 wrote."""
    accuracy: list[tuple[int, float]]
    """(version, share of held-out problems)."""
    figures: dict[str, float]
    """Means over the iterations after the warm-up, of those of `FIGURES` that were finite."""
    actor_steps: int
    actor_steps_dropped: int
    wall_s: float

    @property
    def area(self) -> float:
        """Mean accuracy over the versions of the whole run."""
        return statistics.fmean(share for _, share in self.accuracy)

    @property
    def final(self) -> float:
        """Mean accuracy over the last quarter of the run's versions."""
        last = self.accuracy[-1][0]
        return statistics.fmean(share for version, share in self.accuracy if 4 * version >= 3 * last)


@dataclass(frozen=True)
class Size:
    """The size of the experiment."""

    ages: tuple[int, ...]
    seeds: tuple[int, ...]
    iterations: int
    groups: int
    problems: int
    evaluate_every: int
    changes: tuple[str, ...] = ()
    """KEY=VALUE over the ablation's own settings."""


def config_of(arm: Arm, size: Size) -> RunConfig:
    """The example's run file with the arm's settings."""
    own = (
        f"seed={arm.seed}",
        f"algorithm.max_staleness={arm.age}",
        f"algorithm.correction={arm.correction}",
        f"algorithm.iterations={size.iterations}",
        f"algorithm.groups_per_iteration={size.groups}",
        f"rollout.groups_per_task={size.groups}",
        f"learner.actor_lr={arm.actor_lr!r}",
    )
    return load(RUN_FILE, SETTINGS + own + size.changes)


def run_arm(arm: Arm, size: Size, target: Target) -> Run:
    """Train one arm from the example's adapter."""
    started_s = time.monotonic()
    config = config_of(arm, size)
    run = AgedRun(config, target)
    assert config.data.eval is not None
    heldout = [each.prompt() for each in load_problems(config.data.eval, config.data)]
    problems, accuracy, trained = heldout[: size.problems], [], []
    for version in range(size.iterations):
        if version % size.evaluate_every == 0:
            accuracy.append((version, run.mean_reward(problems)))
        run.fill()
        trained.append(run.train())
    accuracy.append((size.iterations, run.mean_reward(problems)))
    assert run.ledger.outstanding == 0, "the run is over"
    warmup, rest = ages_of(arm, trained[: arm.age]), ages_of(arm, trained[arm.age :])
    means = [each.metrics.means for each in trained]
    return Run(
        arm=arm,
        ages=rest,
        warmup_ages=warmup,
        accuracy=accuracy,
        figures={
            name: statistics.fmean(found)
            for name in FIGURES
            if (found := [each[name] for each in means[arm.age :] if name in each])
        },
        actor_steps=sum(len(each.metrics.steps) for each in trained),
        actor_steps_dropped=int(sum(each["actor_steps_dropped"] for each in means)),
        wall_s=round(time.monotonic() - started_s, 1),
    )


def ages_of(arm: Arm, trained: Sequence[Trained]) -> dict[int, int]:
    """Samples at each age, as they carry it; every one must be as old as the window allows at its iteration."""
    counted: Counter[int] = Counter()
    for each in trained:
        due = min(each.data.iteration, arm.age)
        assert set(each.ages) == {due}, f"{arm}: ages {each.ages} in iteration {each.data.iteration}"
        counted += each.ages
    return dict(counted)
