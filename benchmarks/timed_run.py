"""A run in simulated time: the real ledger under its rule of admission, with workers and a learner that take seconds.

Rollouts install a version some time after it is made, and finish what they hold first. Leases may die, and what they
held may still arrive. Nothing sleeps: events are taken in the order of their times, drawn from one seed."""

import heapq
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from prefixrl.learner.broker.groups.admission import Supply
from prefixrl.learner.broker.groups.states import SampleItem, ScoreItem
from prefixrl.learner.broker.groups.window import Choice, NotYetChosen
from support.broker.ledger_world import World, version_of

MOST_EVENTS = 200_000
GHOST_S = 20.0


@dataclass(frozen=True)
class Timing:
    """Workers, their mean times in seconds, and what goes wrong."""

    rollouts: int = 1
    scorers: int = 2
    slots: int = 1
    """Scoring slots of each scorer."""
    sampling_slots: int = 1
    """Sampling slots of each rollout."""
    sampling_s: float = 0.1
    """Mean time of an item, whatever its size."""
    scoring_s: float = 0.5
    training_s: float = 1.0
    first_scorer_slowdown: float = 1.0
    sigma: float = 0.0
    """Spread of the lognormal times of sampling and scoring, whose means are the above."""
    install_s: tuple[float, float] = (0.0, 0.0)
    """Shortest and longest time from a version to a rollout's holding it."""
    dying: float = 0.0
    """Fraction of leases that die."""
    old_ess: Callable[[random.Random, Counter[int]], float | None] = lambda draws, ages: None
    """The relative ESS that the learner reports for a batch, given its groups by age."""


@dataclass
class Worker:
    """A rollout or scorer: free slots, and for a rollout the version it has and the one it could have."""

    free: int
    version: int = 0
    staged: int = 0


@dataclass
class TimedRun:
    """See the module's text."""

    world: World
    timing: Timing
    seed: int = 0
    now_s: float = 0.0
    trained_s: list[float] = field(default_factory=list)
    """Time at which each iteration was finished."""
    ages: list[Counter[int]] = field(default_factory=list)
    """Groups of each iteration by age, from the samples."""
    idle_s: list[float] = field(default_factory=list)
    """Time that the learner waited before each iteration."""

    def __post_init__(self) -> None:
        self._draws, self._own = random.Random(self.seed), random.Random(self.seed)
        self._normals: list[float] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        timing = self.timing
        self.rollouts = [Worker(timing.sampling_slots) for _ in range(timing.rollouts)]
        self.scorers = [Worker(timing.slots) for _ in range(timing.scorers)]
        self._asked_s: float | None = 0.0
        self._looked_s = self._short_s = 0.0
        self._is_short = False

    def run(self) -> "TimedRun":
        """Run to the end; AssertionError at a standstill or a broken invariant."""
        for _ in range(MOST_EVENTS):
            self._ask()
            self.world.check()
            if self.world.over:
                return self
            self._dispatch()
            assert self._events, f"standstill after {self.world.completed} iterations"
            self.now_s, _, event = heapq.heappop(self._events)
            event()
        raise AssertionError("no end")

    def _later(self, delay_s: float, event: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (self.now_s + delay_s, self._number, event))

    def _time(self, mean_s: float, item: SampleItem | ScoreItem) -> float:
        """Return the time of an item: its own, whatever else happens, so that rules of admission can be compared."""
        sigma = self.timing.sigma
        while sigma and len(self._normals) <= 2 * item.seqs[0] + 1:
            self._normals.append(self._own.gauss(0.0, 1.0))
        normal = self._normals[2 * item.seqs[0] + isinstance(item, ScoreItem)] if sigma else 0.0
        return mean_s * math.exp(sigma * normal - sigma * sigma / 2)

    # --- workers -----------------------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        timing, world = self.timing, self.world
        world.ledger.admission.supply = Supply(timing.rollouts, timing.scorers * timing.slots)
        for rollout in sorted(self.rollouts, key=lambda rollout: -rollout.free):
            if rollout.staged > rollout.version and rollout.free == timing.sampling_slots:
                rollout.version = rollout.staged
            while (
                rollout.free
                and rollout.staged == rollout.version
                and world.start_sampling(rollout.version)
            ):
                rollout.free -= 1
                self._lease(
                    rollout, world.sampling[-1], self._time(timing.sampling_s, world.sampling[-1])
                )
        for number, scorer in enumerate(self.scorers):
            mean_s = timing.scoring_s * (1.0 if number else timing.first_scorer_slowdown)
            while scorer.free and world.start_scoring():
                scorer.free -= 1
                self._lease(scorer, world.scoring[-1], self._time(mean_s, world.scoring[-1]))

    def _lease(self, worker: Worker, item: SampleItem | ScoreItem, lasts_s: float) -> None:
        dies = self._draws.random() < self.timing.dying
        self._later(
            lasts_s * (self._draws.random() if dies else 1.0),
            lambda: self._end(worker, item, lasts_s, dies),
        )

    def _end(
        self, worker: Worker, item: SampleItem | ScoreItem, lasts_s: float, dies: bool
    ) -> None:
        world = self.world
        worker.free += 1
        if isinstance(item, SampleItem):
            world.sampling.remove(item)
        else:
            world.scoring.remove(item)
        if dies:
            world.lose(item, died=self._draws.random() < 0.5)
            if (ghost := world.ghosts.pop()) and self._draws.random() < 0.5:
                late_s, is_scored = self._draws.uniform(0.0, GHOST_S), self._draws.random() < 0.5
                deliver = world.deliver_scores if is_scored else world.deliver_prefixes
                self._later(late_s, lambda: deliver(ghost))
        elif isinstance(item, SampleItem):
            world.deliver_prefixes(world.sample(item), lasts_s)
        else:
            world.deliver_scores(item.groups, scoring_s=lasts_s)

    # --- learner -----------------------------------------------------------------------------------------------------

    def _ask(self) -> None:
        """Look for a batch as the broker does after every message, and train it."""
        self._short_s += (self.now_s - self._looked_s) * self._is_short
        self._looked_s, self._is_short = self.now_s, False
        if self._asked_s is None:
            return
        choice = self.world.ask()
        if isinstance(choice, NotYetChosen):
            self._is_short = (
                self.world.ledger.states().get("scored", 0) < self.world.shape.batch_groups
            )
        elif isinstance(choice, Choice):
            self.idle_s.append(self.now_s - self._asked_s)
            self._asked_s = None
            versions = [
                version_of(group.prefixes) for group in self.world.ledger.results(choice.seqs)
            ]
            self._train(Counter(self.world.completed - version for version in versions))

    def _train(self, ages: Counter[int]) -> None:
        self._later(self.timing.training_s, lambda: self._finish(ages))

    def _finish(self, ages: Counter[int]) -> None:
        assert self.world.train()
        self.ages.append(ages)
        admission = self.world.ledger.admission
        iteration_s = self.now_s - self.trained_s[-1] if self.trained_s else 0.0
        old_ess = self.timing.old_ess(self._draws, ages)
        admission.finish_iteration(iteration_s, self._short_s, self.world.ledger.states(), old_ess)
        self.trained_s.append(self.now_s)
        self._short_s, self._asked_s, version = 0.0, self.now_s, self.world.completed
        for rollout in self.rollouts:
            installed_s = self._draws.uniform(*self.timing.install_s)
            self._later(installed_s, partial(self._stage, rollout, version))

    def _stage(self, rollout: Worker, version: int) -> None:
        rollout.staged = max(rollout.staged, version)
