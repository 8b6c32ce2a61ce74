"""One run of the ablation of staleness: its prompts, its age, the form of its loss, its outcome."""

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
    "row_ess_fraction",
    "clip_fraction",
    "bounded_fraction",
    "approx_kl",
    "behaviour_gap",
    "entropy",
    "reference_kl",
)
SETTINGS = (
    "algorithm.name=grpo",  # no critic, so no second learning rate to fix
    "algorithm.minibatches=4",
    "algorithm.entropy=0.001",  # the product's default; the example's own is 30 times that
    "algorithm.kl_placement=reward",
    "learner.warmup_ratio=0.0",
    "learner.min_lr_ratio=1.0",  # constant: a falling rate would make late samples less stale than early ones
    "scorer.temperature=0.0",  # a verdict is then a function of question and prefix, and is made once
)


FORMS = {
    "none": ("correction=none", "ratio=token", "clip=0.2", "dual_clip=off", "bound_ratio=off"),
    "decoupled": (
        "correction=decoupled",
        "ratio=token",
        "clip=0.2",
        "dual_clip=off",
        "bound_ratio=off",
    ),
    "behaviour": (
        "correction=behaviour",
        "ratio=token",
        "clip=0.2",
        "dual_clip=3.0",
        "bound_ratio=off",
    ),
    "prefix_mean": (
        "correction=behaviour",
        "ratio=prefix_mean",
        "clip=0.1",
        "dual_clip=3.0",
        "bound_ratio=off",
    ),
    "none, bounded": (
        "correction=none",
        "ratio=token",
        "clip=0.2",
        "dual_clip=3.0",
        "bound_ratio=1.6",
    ),
    "decoupled, bounded": (
        "correction=decoupled",
        "ratio=token",
        "clip=0.2",
        "dual_clip=3.0",
        "bound_ratio=1.6",
    ),
}
"""Every form of the policy loss that is compared: keys of `[algorithm]`, all that matter, so that no default does."""
SAME_WHEN_FRESH = {"decoupled": "none", "decoupled, bounded": "none, bounded"}
"""Forms that are the same run at age 0 but for rounding (mu = p), so that it is made once."""


class Arm(msgspec.Struct, frozen=True):
    """The choices that distinguish one run from another."""

    age: int
    form: str
    """A key of `FORMS`."""
    seed: int
    actor_lr: float

    @property
    def made_as(self) -> "Arm":
        """The arm whose run is this one's too."""
        form = SAME_WHEN_FRESH.get(self.form, self.form) if self.age == 0 else self.form
        return Arm(self.age, form, self.seed, self.actor_lr)


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
        return statistics.fmean(
            share for version, share in self.accuracy if 4 * version >= 3 * last
        )


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
        f"algorithm.iterations={size.iterations}",
        f"algorithm.groups_per_iteration={size.groups}",
        f"rollout.groups_per_task={size.groups}",
        f"learner.actor_lr={arm.actor_lr!r}",
    )
    form = tuple(f"algorithm.{each}" for each in FORMS[arm.form])
    return load(RUN_FILE, SETTINGS + own + form + size.changes)


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
        assert set(each.ages) == {due}, (
            f"{arm}: ages {each.ages} in iteration {each.data.iteration}"
        )
        counted += each.ages
    return dict(counted)
