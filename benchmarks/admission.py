"""The age of samples under just-in-time admission, in simulated time, beside the least that any order of work reaches.

The real ledger and rule of admission, with workers and a learner that take drawn times (tests/support/runs):
cells in which the learner, the scorers or the rollouts are slowest, all are equally fast, one scorer is slow, or the
learner becomes twice as fast in the middle of the run. Every run begins with a warm-up in which workers are five times
as slow; the mean age is taken from ten iterations after the end of the warm-up, or after the jump, to the end.

On two cores that three processes share, times are not the items' own: what is under way makes all of it slower. There a
time is the work of a process of one thread, which shares the cores with the others and among its items.

    before      the lead grew by parts of a batch where the learner waited, and gave up 1/64 of its excess else
    least       the youngest of constant leads that keep 0.98 of the throughput of `as_early_as_allowed`
    bound       no order of work, even one that knows all times, is younger than this; it is not always reached, and not
                known where cores are shared

    python -m benchmarks.admission [--quick] --json FILE
"""

import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import click
import msgspec

from benchmarks.results import ROOT, Figure, Report, commit, options

sys.path.insert(0, str(ROOT / "tests"))

from benchmarks.timed_run import TimedRun, Timing, Worker
from prefixrl.learner.broker.groups.admission import Admission, Change
from prefixrl.learner.broker.groups.states import SampleItem, ScoreItem
from support.broker.ledger_world import Shape, World

BATCH, ITERATIONS, WARM_UP, SETTLED = 8, 70, 10, 10
"""Groups of an iteration; iterations; those that are slow at first; those after a change that are left out."""
STALENESS = (1, 2, 4, 8)
SIGMAS = (0.5, 1.0)
KEPT = 0.98
CELLS = {
    "learner slowest": Timing(
        scorers=2, slots=4, sampling_slots=8, sampling_s=1, scoring_s=2, training_s=15
    ),
    "learner slowest, no time left": Timing(
        scorers=1,
        slots=8,
        sampling_slots=8,
        sampling_s=6,
        scoring_s=9,
        training_s=15,
        install_s=(2, 3),
    ),
    "scorers slowest": Timing(
        scorers=2, slots=2, sampling_slots=4, sampling_s=1, scoring_s=10, training_s=4
    ),
    "rollouts slowest": Timing(
        rollouts=2, scorers=2, slots=8, sampling_slots=2, sampling_s=10, scoring_s=2, training_s=4
    ),
    "balanced": Timing(
        scorers=2, slots=2, sampling_slots=4, sampling_s=1, scoring_s=5, training_s=10
    ),
    "a slow scorer": Timing(
        scorers=4,
        slots=2,
        sampling_slots=8,
        sampling_s=1,
        scoring_s=3,
        training_s=10,
        first_scorer_slowdown=3,
    ),
    "learner twice as fast": Timing(
        scorers=2, slots=4, sampling_slots=8, sampling_s=1, scoring_s=4, training_s=20
    ),
    "two cores shared": Timing(
        scorers=1,
        slots=32,
        sampling_slots=8,
        sampling_s=0.5,
        scoring_s=1.125,
        training_s=10,
        install_s=(1, 1.5),
    ),
    "two cores shared, learner not slowest": Timing(
        scorers=1,
        slots=32,
        sampling_slots=8,
        sampling_s=0.5,
        scoring_s=0.75,
        training_s=6,
        install_s=(1, 1.5),
    ),
}
SHARED, CORES = "two cores shared", 2.0
JUMP = "learner twice as fast"
LEADS = tuple(BATCH + extra for extra in (0, 1, 2, 4, 6, 8, 12, 16, 24))


class Before(Admission):
    """The rule that is compared."""

    def finish_iteration(
        self, iteration_s: float, waited_s: float, states: Mapping[str, int], old_ess: float | None
    ) -> Change | None:
        lead, batch = self.lead, float(BATCH)
        if iteration_s > 0:
            waited = waited_s / iteration_s
            lead += batch / 8 * (1 + (waited > 0.1)) if waited > 0.01 else -(lead - batch) / 64
        self.lead = min(max(lead, batch), batch + self.cap)
        return None


class Constant(Admission):
    """A lead that was chosen beforehand."""

    fixed = float(BATCH)

    def finish_iteration(
        self, iteration_s: float, waited_s: float, states: Mapping[str, int], old_ess: float | None
    ) -> Change | None:
        self.lead = min(self.fixed, BATCH + self.cap)
        return None


class Watched(TimedRun):
    """A run whose times change, and that notes when each version could be held and what each group took."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.timings: list[tuple[int, Timing]] = []
        """Later times, each with the iteration from which it holds, in order."""
        self._held_s: dict[int, float] = {}
        self._took_s: dict[int, tuple[float, float]] = {}

    def _end(
        self, worker: Worker, item: SampleItem | ScoreItem, lasts_s: float, dies: bool
    ) -> None:
        if isinstance(item, ScoreItem):
            self._took_s |= dict.fromkeys(item.seqs, (item.sampled_s, lasts_s))
        super()._end(worker, item, lasts_s, dies)

    def _finish(self, ages: Counter[int]) -> None:
        super()._finish(ages)
        if self.timings and self.world.completed >= self.timings[0][0]:
            self.timing = self.timings.pop(0)[1]

    def _stage(self, rollout: Worker, version: int) -> None:
        self._held_s.setdefault(version, self.now_s)
        super()._stage(rollout, version)

    def least_age(self, iteration: int) -> float:
        """Return a mean age below which no order of work could bring this batch, chosen when it was.

        Its groups have all workers for themselves: those that begin only once a version is held are at most so many
        that each still has the time that it takes, and that the workers have the time that all of them take.
        """
        timing, old = self.timing, 0
        chosen_s = (self.trained_s[iteration - 1] if iteration else 0.0) + self.idle_s[iteration]
        items = [self._took_s[seq] for seq in self.world.trained[iteration]]
        groups = len(items)
        for version in range(iteration, 0, -1):
            left_s = chosen_s - self._held_s.get(version, math.inf)
            in_time = sorted((both for both in items if sum(both) <= left_s), key=sum)
            begun = len(in_time)
            for stage, slots in (
                (0, timing.rollouts * timing.sampling_slots),
                (1, timing.scorers * timing.slots),
            ):
                times_s = sorted(both[stage] for both in in_time)
                other_s = min((both[1 - stage] for both in in_time), default=0.0)
                fit = sum(
                    work_s <= slots * (left_s - other_s) + 1e-9 for work_s in accumulate(times_s)
                )
                begun = min(begun, fit)
            if begun == groups:
                break
            old += groups - begun
        return old / groups


@dataclass
class Job:
    """Work of a process, and what follows it."""

    process: str
    left_s: float
    then: Callable[[], None]


class Shared(Watched):
    """A run on cores that learner and workers share: each is a process of one thread, which its items share."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._jobs: list[Job] = []
        self._worked_s, self._turn = 0.0, 0

    def _begin(self, process: str, work_s: float, then: Callable[[], None]) -> None:
        self._work()
        self._jobs.append(Job(process, work_s, then))
        self._expect()

    def _speeds(self) -> dict[str, float]:
        """Return the seconds of work per second that an item of each process gets."""
        items = Counter(job.process for job in self._jobs)
        return {process: min(1.0, CORES / len(items)) / number for process, number in items.items()}

    def _work(self) -> None:
        speeds = self._speeds()
        for job in self._jobs:
            job.left_s -= (self.now_s - self._worked_s) * speeds[job.process]
        self._worked_s = self.now_s

    def _expect(self) -> None:
        """Wait for the next end at the present speeds; a change of them makes an earlier wait void."""
        self._turn += 1
        if not self._jobs:
            return
        turn, speeds = self._turn, self._speeds()
        first = min(self._jobs, key=lambda job: job.left_s / speeds[job.process])
        self._later(
            max(0.0, first.left_s / speeds[first.process]), lambda: self._ended(first, turn)
        )

    def _ended(self, job: Job, turn: int) -> None:
        if turn == self._turn:
            self._work()
            self._jobs.remove(job)
            job.then()
            self._expect()

    def _lease(self, worker: Worker, item: SampleItem | ScoreItem, lasts_s: float) -> None:
        begun_s, process = self.now_s, f"{type(item).__name__} {id(worker)}"
        self._begin(process, lasts_s, lambda: self._end(worker, item, self.now_s - begun_s, False))

    def _train(self, ages: Counter[int]) -> None:
        self._begin("learner", self.timing.training_s, lambda: self._finish(ages))


class Ran(msgspec.Struct, frozen=True):
    """One run after its last change."""

    mean_age: float
    iterations_per_s: float
    bound: float


def ran(cell: str, staleness: int, sigma: float, seed: int, rule: str, lead: int = 0) -> Ran:
    """Run a cell under a rule."""
    usual = replace(
        CELLS[cell],
        sigma=sigma,
        install_s=CELLS[cell].install_s if CELLS[cell].install_s[1] else (0.5, 1.0),
    )
    slow = replace(usual, sampling_s=5 * usual.sampling_s, scoring_s=5 * usual.scoring_s)
    shape = Shape(BATCH, staleness, 1, ITERATIONS, None, min_ess=0.0)
    shape.admission = "as_early_as_allowed" if rule == "early" else "just_in_time"
    run = (Shared if cell.startswith(SHARED) else Watched)(World(shape), slow, seed)
    run.timings = [(WARM_UP, usual)]
    if cell == JUMP:
        run.timings.append((ITERATIONS // 2, replace(usual, training_s=usual.training_s / 2)))
    admission = run.world.ledger.admission
    if rule in ("before", "constant"):
        admission.__class__ = Before if rule == "before" else Constant
    if isinstance(admission, Constant):
        admission.fixed = admission.lead = min(float(lead), BATCH + admission.cap)
    run.run()
    first = (ITERATIONS // 2 if cell == JUMP else WARM_UP) + SETTLED
    ages = [
        sum(age * groups for age, groups in each.items()) / each.total()
        for each in run.ages[first:]
    ]
    span_s = run.trained_s[-1] - run.trained_s[first - 1]
    bound = math.nan
    if not isinstance(run, Shared):
        bound = statistics.fmean(run.least_age(iteration) for iteration in range(first, ITERATIONS))
    return Ran(statistics.fmean(ages), len(ages) / span_s, bound)


def cell_figures(cell: str, staleness: int, sigma: float, seeds: int) -> list[Figure]:
    """Figures of a cell: means over the seeds."""

    def over_seeds(rule: str, lead: int = 0) -> tuple[float, float, float]:
        runs = [ran(cell, staleness, sigma, seed, rule, lead) for seed in range(1, seeds + 1)]
        kept = (
            each.iterations_per_s / early.iterations_per_s
            for each, early in zip(runs, earliest, strict=True)
        )
        mean = statistics.fmean
        return mean(each.mean_age for each in runs), mean(each.bound for each in runs), mean(kept)

    earliest = [ran(cell, staleness, sigma, seed, "early") for seed in range(1, seeds + 1)]
    age, bound, kept = over_seeds("now")
    age_before, _, kept_before = over_seeds("before")
    constants = [over_seeds("constant", lead) for lead in LEADS if lead <= BATCH * (1 + staleness)]
    least = min(
        each[0] for each in constants if each[2] >= min(KEPT, max(other[2] for other in constants))
    )
    name = f"{cell}, lognormal {sigma:g}, S = {staleness}"
    values = {"mean age": age, "mean age before": age_before, "least": least, "bound": bound}
    values |= {"throughput kept": kept, "throughput kept before": kept_before}
    known = {key: value for key, value in values.items() if not math.isnan(value)}
    return [
        Figure(f"{name}: {key}", "", value, seeds, (value, value)) for key, value in known.items()
    ]


def table(figures: list[Figure]) -> str:
    """The figures as a table in Markdown."""
    rows: dict[str, dict[str, float]] = {}
    for each in figures:
        name, _, key = each.name.partition(": ")
        rows.setdefault(name, {})[key] = each.value
    columns = list(next(iter(rows.values())))
    lines = [["cell", *columns], ["---"] * (1 + len(columns))]
    lines += [
        [name, *(f"{values[key]:.2f}" if key in values else "–" for key in columns)]
        for name, values in rows.items()
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


@click.command()
@options
def main(path: Path, quick: bool) -> None:
    """Simulate and write the figures."""
    at, started_s = commit(), time.monotonic()
    seeds, levels = (1, (0.5,)) if quick else (2, SIGMAS)
    todo = [
        (cell, S, sigma, seeds)
        for cell in CELLS
        for sigma in levels
        for S in (STALENESS[1:2] if quick else STALENESS)
    ]
    figures: list[Figure] = []
    with ProcessPoolExecutor(2) as pool:
        for found in pool.map(cell_figures, *zip(*todo, strict=True)):
            print(*(f"{each.name} {each.value:.2f}" for each in found), sep="; ", flush=True)
            figures += found
    path.with_suffix(".md").write_text(table(figures), encoding="utf-8")
    settings = {"groups": BATCH, "iterations": ITERATIONS, "kept": KEPT}
    Report("admission", quick, settings, figures, {}, at).finish(path, started_s)


if __name__ == "__main__":
    main()
