"""One run of the letters example, by the product at an exact age or by the plain loop.

*Collapsed*, fixed before any stale run was seen: the policy writes one prefix in at least 99 % of the last iteration's
rows; or over the last ten iterations its entropy is below 0.05 nats per token and its reward at least 0.1 below the
best ten iterations of the run. A policy that has learnt the task has little entropy too, but loses no reward."""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.aged_run import AgedRun, Target
from benchmarks.plain_grpo import PlainLoop, Recipe
from benchmarks.results import last_quarter
from prefixrl.common.config.load import load
from prefixrl.common.config.run import RunConfig
from prefixrl.common.wire.messages.groups import Prompt
from prefixrl.common.wire.packing import pack_tokens
from prefixrl.learner.data.problems import load as load_problems

RUN_FILE = Path(__file__).parent / "run.toml"
SPAN = 10
"""Iterations that are looked at together."""
ONE_PREFIX_SHARE, LOW_ENTROPY, REWARD_LOSS = 0.99, 0.05, 0.1


@dataclass(frozen=True)
class Setting:
    """A row of the table."""

    age: int
    changes: tuple[str, ...] = ()
    """KEY=VALUE over the task's run file."""
    is_plain: bool = False
    """True for the plain loop, which knows no changes but of what its `Recipe` holds."""


@dataclass(frozen=True)
class Size:
    """The size of the experiment."""

    seeds: tuple[int, ...]
    iterations: int
    heldout: int
    evaluate_every: int
    changes: tuple[str, ...] = ()
    """KEY=VALUE over the settings of every arm."""


class Iteration(msgspec.Struct, frozen=True):
    """The figures of one iteration."""

    reward: float
    entropy: float
    """Nats per token."""
    ess: float
    """Effective sample size of the ratios of the trained policy to that of the samples, as a share of their number."""
    top_share: float
    """Share of rows with the most frequent prefix."""


class Outcome(msgspec.Struct, frozen=True):
    """The outcome of one run."""

    setting: str
    seed: int
    heldout: list[tuple[int, float]]
    """(version, mean reward on held-out questions, one sampled prefix each)."""
    spans: list[Iteration]
    """Per span of iterations: means, and of `ess` the least."""
    least_ess_at: int
    """Iteration of the least effective sample size."""
    last: Iteration
    wall_s: float

    @property
    def final(self) -> float:
        """Mean held-out reward over the last quarter of the versions."""
        return last_quarter(self.heldout)

    @property
    def least_ess(self) -> float:
        """The least effective sample size of an iteration."""
        return min(span.ess for span in self.spans)

    @property
    def is_collapsed(self) -> bool:
        """See the module text."""
        end, best = self.spans[-1], max(span.reward for span in self.spans)
        has_lost = end.entropy < LOW_ENTROPY and best - end.reward >= REWARD_LOSS
        return has_lost or self.last.top_share >= ONE_PREFIX_SHARE


def config_of(run_file: Path, setting: Setting, seed: int, size: Size) -> RunConfig:
    """A run file with the settings of one run."""
    base = load(run_file)
    own = (
        f"seed={seed}",
        f"algorithm.max_staleness={setting.age}",
        f"algorithm.iterations={size.iterations}",
        f"rollout.groups_per_task={base.algorithm.groups_per_iteration}",
    )
    return load(run_file, own + size.changes + setting.changes)


def run_arm(name: str, setting: Setting, config: RunConfig, size: Size, target: Target) -> Outcome:
    """Train once, evaluating on the way."""
    started_s = time.monotonic()
    heldout = [each.prompt() for each in load_problems(config.data.eval, config.data)][
        : size.heldout
    ]
    iterate, mean_reward = (_plain if setting.is_plain else _product)(config, heldout, target)
    rewards, seen = [], []
    for version in range(size.iterations):
        if version % size.evaluate_every == 0:
            rewards.append((version, mean_reward()))
        seen.append(iterate())
    rewards.append((size.iterations, mean_reward()))
    return Outcome(
        setting=name,
        seed=config.seed,
        heldout=rewards,
        spans=[_span(seen[first : first + SPAN]) for first in range(0, len(seen), SPAN)],
        least_ess_at=min(range(len(seen)), key=lambda number: seen[number].ess),
        last=seen[-1],
        wall_s=round(time.monotonic() - started_s, 1),
    )


def _span(seen: Sequence[Iteration]) -> Iteration:
    return Iteration(
        reward=round(statistics.fmean(each.reward for each in seen), 4),
        entropy=round(statistics.fmean(each.entropy for each in seen), 4),
        ess=round(min(each.ess for each in seen), 4),
        top_share=round(statistics.fmean(each.top_share for each in seen), 4),
    )


Parts = tuple[Callable[[], Iteration], Callable[[], float]]
"""One iteration, and the mean reward of the present version on held-out questions."""


def _product(config: RunConfig, heldout: Sequence[Prompt], target: Target) -> Parts:
    run = AgedRun(config, target)

    def iterate() -> Iteration:
        run.fill()
        trained = run.train()
        due = min(trained.data.iteration, config.algorithm.max_staleness)
        assert set(trained.ages) == {due}, (
            f"ages {trained.ages} in iteration {trained.data.iteration}"
        )
        top, means = trained.commonest_text_fraction, trained.metrics.means
        return Iteration(means["reward"], means["entropy"], means["importance_ess_fraction"], top)

    return iterate, lambda: run.mean_reward(heldout)


def _plain(config: RunConfig, heldout: Sequence[Prompt], target: Target) -> Parts:
    loop, feed = plain_loop(config, heldout, target)
    return lambda: Iteration(**loop.iterate(feed())), lambda: loop.mean_reward(
        [each.question for each in heldout], 0
    )


def plain_loop(
    config: RunConfig, heldout: Sequence[Prompt], target: Target
) -> tuple[PlainLoop, Callable[[], list[str]]]:
    """The plain loop with the sizes and rates of a config, and what gives the questions of its next iteration."""
    algorithm, learner = config.algorithm, config.learner
    train = [each.prompt() for each in load_problems(config.data.train, config.data)]
    by_question = {prompt.question: prompt for prompt in (*train, *heldout)}
    recipe = Recipe(
        groups=algorithm.groups_per_iteration,
        samples=algorithm.samples_per_prompt,
        prefix_tokens=config.rollout.prefix_tokens,
        lr=learner.actor_lr,
        betas=learner.adam_betas,
        weight_decay=learner.weight_decay,
        grad_clip=learner.grad_clip,
        delay=algorithm.max_staleness,
    )

    def rewards(questions: Sequence[str], prefixes: Sequence[list[int]]) -> list[float]:
        packed = [pack_tokens(np.asarray(prefix, dtype=np.int32)) for prefix in prefixes]
        asked = [by_question[question] for question in questions]
        return [given.reward for given in target.verdicts(list(zip(asked, packed, strict=True)))]

    loop = PlainLoop(config.adapter.model, rewards, recipe, config.seed)
    order, waiting = random.Random(config.seed), list[str]()

    def feed() -> list[str]:
        while len(waiting) < recipe.groups:
            waiting.extend(order.sample([prompt.question for prompt in train], len(train)))
        return [waiting.pop(0) for _ in range(recipe.groups)]

    return loop, feed
