"""`prefixrl advise`: who holds a run up, and how many of whom would balance it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import msgspec
from rich import box
from rich.table import Table

from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import ConfigError, PeerLost, UserError
from prefixrl.common.run import json_lines
from prefixrl.common.run.documents import METRICS_FILE, MetricsLine
from prefixrl.common.run.status import StatusDocument
from prefixrl.deploy.capacity.outlook import foresee
from prefixrl.deploy.capacity.system import BrokerCosts, RowTimes, System, Workers
from prefixrl.deploy.commands.status_command import is_over
from prefixrl.deploy.runs.checkpoints import config_of
from prefixrl.deploy.view.live_view import fetch

LEARNER, WORKERS = "learner", ("rollout", "scorer")
LEAST_ITERATIONS = 5
FULL = 0.9
"""Share of its time that a worker works where it keeps the learner busy: the rest evens out stragglers."""
IDLE = 0.75
"""Where nobody works for more of the time, no number of workers is the bottleneck."""
SIMULATED_ROWS, LEAST_FILLS = 128, 64
"""Rows of a simulated iteration, where batch and seats can be made so small; else it fills each seat so many times."""
MOST_ROWS, LEAST_ITERATIONS_SIMULATED, MOST_ITERATIONS_SIMULATED = 8_000, 8, 30
"""Length of a simulated run: a fraction of a second, or a second where many workers score a large batch."""
LATE = 1.1
"""An iteration of so many times the learner's own time does not keep the learner busy."""
NO_BETTER, SEARCHES = 1.05, 3
"""An iteration of so many times the least time is as good; counts tried until one is."""


@dataclass(frozen=True, kw_only=True)
class RunShape:
    """The settings that decide who waits for whom."""

    batch_groups: int
    rows_per_group: int
    max_staleness: int
    seats: Mapping[str, int]
    """Rows that a worker's engine decodes at once, by role."""
    is_just_in_time: bool = True
    drains: bool = True

    @property
    def broker_s(self) -> float:
        """Time of the broker, which is one process, for an iteration: none is shorter."""
        return self.batch_groups * BrokerCosts().group_s


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Measured means per iteration."""

    iteration_s: float
    learner_s: float
    """Time in which the ranks train and publish, side by side."""
    busy: Mapping[str, float]
    """Share of their time that the workers of a role work, by role."""
    counts: Mapping[str, int]
    """Workers by role, and ranks of the learner."""
    waited: Mapping[str, float]
    """Share of the time that the learner waits, by cause."""
    shape: RunShape

    @property
    def is_synchronous(self) -> bool:
        """True with max_staleness = 0: each waits for the others by definition."""
        return self.shape.max_staleness == 0

    @property
    def share(self) -> dict[str, float]:
        """Share of its time that each role works; of the learner what it needs of an iteration."""
        return {LEARNER: min(1.0, self.learner_s / self.iteration_s), **self.busy}


@dataclass(frozen=True, kw_only=True)
class Advice:
    """The role that holds a run up, and the counts that would balance it."""

    bottleneck: str
    """A role, or "" where nobody is busy for most of the time."""
    wanted: Mapping[str, int]
    """By role: workers that keep the present learner busy; ranks that keep pace with the present workers.

    Where no number of workers keeps the learner busy: those beyond which the model gets no better.
    """
    is_bounded: bool
    """True where no number of workers keeps the learner busy."""
    balanced_s: float
    """Time of an iteration with the wanted workers and the present ranks: measured, times the model's change."""
    simulated_s: float
    """Time of an iteration of the run as it is, by the model."""


def most_workers(shape: RunShape, role: str, max_staleness: int) -> int:
    """Return how many workers give all groups of a full window a seat; more change nothing."""
    groups_per_worker = max(1, shape.seats[role] // shape.rows_per_group)
    return math.ceil(shape.batch_groups * (max_staleness + 1) / groups_per_worker)


def system_of(rates: Rates, counts: Mapping[str, int], max_staleness: int) -> System:
    """Return the system that works at measured rates, with other counts and another window."""
    shape, rows = rates.shape, rates.shape.batch_groups * rates.shape.rows_per_group

    def workers(role: str) -> Workers:
        seats = shape.seats[role]
        row_s = rates.busy.get(role, 0.0) * rates.counts[role] * seats * rates.iteration_s / rows
        count = min(counts[role], most_workers(shape, role, max_staleness))
        return Workers(count=count, seats=seats, row=RowTimes(mean_s=row_s))

    system = System(
        batch_groups=shape.batch_groups,
        rows_per_group=shape.rows_per_group,
        max_staleness=max_staleness,
        rollouts=workers("rollout"),
        scorers=workers("scorer"),
        learner_s=rates.learner_s * rates.counts[LEARNER] / counts[LEARNER],
        is_just_in_time=shape.is_just_in_time,
        drains=shape.drains,
    )
    return system.coarser(SIMULATED_ROWS)


def simulated_s(rates: Rates, counts: Mapping[str, int] | None = None, max_staleness: int | None = None) -> float:
    """Return the time of an iteration by the model, with other workers or another window."""
    window = rates.shape.max_staleness if max_staleness is None else max_staleness
    system = system_of(rates, {**rates.counts, **(counts or {})}, window)
    short = system.shorter(LEAST_FILLS)
    iterations = MOST_ROWS // (short.batch_groups * short.rows_per_group)
    within = min(MOST_ITERATIONS_SIMULATED, max(LEAST_ITERATIONS_SIMULATED, iterations))
    return foresee(short, iterations=within).iteration_s * system.batch_groups / short.batch_groups


def workers_for(rates: Rates, iteration_s: float) -> dict[str, int]:
    """Return the workers that do an iteration's work in so long, and no more than count."""
    wanted, pace_s = dict[str, int](), FULL * max(iteration_s, rates.shape.broker_s)
    for role, share in rates.busy.items():
        alone_s = share * rates.counts[role] * rates.iteration_s  # one worker for its role's part of an iteration
        most = most_workers(rates.shape, role, rates.shape.max_staleness)
        wanted[role] = min(most, max(1, math.ceil(alone_s / pace_s)))
    return wanted


def least_as_good(rates: Rates, most: Mapping[str, int], least_s: float, scale: float) -> tuple[dict[str, int], float]:
    """Return about the fewest workers as good as the most, and the time of an iteration."""
    workers = workers_for(rates, least_s)
    for _ in range(SEARCHES):
        found_s = scale * simulated_s(rates, workers)
        if found_s <= NO_BETTER * least_s:
            return workers, found_s
        workers = {role: min(most[role], math.ceil(1.25 * count)) for role, count in workers.items()}
    return dict(most), least_s


def advise(rates: Rates) -> Advice:
    """Return who holds a run up and what balances it. Pure."""
    shares, ranks, now_s = rates.share, rates.counts[LEARNER], simulated_s(rates)
    busiest = max(shares, key=lambda role: shares[role])
    is_held_up = rates.is_synchronous or shares[busiest] >= IDLE
    scale = rates.iteration_s / now_s
    workers = workers_for(rates, rates.learner_s)
    balanced_s = scale * simulated_s(rates, workers)
    are_workers_short = shares[busiest] >= IDLE and busiest != LEARNER and not rates.is_synchronous
    is_bounded = are_workers_short and balanced_s > LATE * rates.learner_s
    if is_bounded:
        workers, balanced_s = least_as_good(rates, workers, balanced_s, scale)
    slowest_s = max((share * rates.iteration_s for share in rates.busy.values()), default=0.0)
    wanted_ranks = max(1, math.ceil(ranks * rates.learner_s / slowest_s)) if slowest_s else ranks
    return Advice(
        bottleneck=busiest if is_held_up else "",
        wanted={**workers, LEARNER: wanted_ranks},
        is_bounded=is_bounded,
        balanced_s=balanced_s,
        simulated_s=now_s,
    )


def enough_workers(rates: Rates, advice: Advice) -> str:
    """Return in words what more workers of the role that holds the run up would do."""
    role, counts, wanted = advice.bottleneck, rates.counts, advice.wanted
    others = [
        f" and {wanted[each]} {each}s instead of {counts[each]}"
        for each in WORKERS
        if each != role and wanted.get(each, 0) > counts[each]
    ]
    those = f"{wanted[role]} instead of {counts[role]}{''.join(others)}"
    would = f"an iteration would take about {advice.balanced_s:.2f} s (launch.{role}s, or more by hand)"
    if not advice.is_bounded:
        return f"{those} would keep the learner busy, and {would}"
    longest = "the longest answers (scorer.max_new_tokens)" if role == "scorer" else "the prefixes"
    cause = (
        "the window lets in no more rows, and each takes its time. Raise algorithm.max_staleness or "
        f"algorithm.groups_per_iteration, or shorten {longest}"
    )
    if rates.shape.broker_s >= IDLE * advice.balanced_s:
        cause = f"the broker, one process, needs {rates.shape.broker_s:.2g} s"
    do_more_help = wanted[role] > counts[role] and NO_BETTER * advice.balanced_s < rates.iteration_s
    return (
        f"with {those} {would}. More" if do_more_help else "more of them"
    ) + f" do not help, though the learner needs only {rates.learner_s:.2g} s: {cause}"


def sentences(rates: Rates, advice: Advice) -> list[str]:
    """Return the advice in words."""
    shares, counts, took = rates.share, rates.counts, f"{rates.iteration_s:.2f} s"
    waited = ", ".join(f"{share:.0%} for {cause}" for cause, share in rates.waited.items() if share >= 0.01)
    lines = [f"an iteration takes {took}; the learner waits {waited or 'for nobody'}"]
    role = advice.bottleneck
    if rates.is_synchronous:
        overlapped_s = rates.iteration_s * simulated_s(rates, max_staleness=1) / advice.simulated_s
        lines.append(
            f"the run is synchronous (algorithm.max_staleness = 0), so each waits for the others; most of the time "
            f"goes to the {role} ({shares[role]:.0%}). With max_staleness = 1 an iteration could take "
            f"about {overlapped_s:.2f} s"
        )
    elif not role:
        most = max(shares, key=lambda each: shares[each])
        window = rates.shape.max_staleness + 1
        wider_s = rates.iteration_s * simulated_s(rates, max_staleness=window) / advice.simulated_s
        wider = f"a wider window (algorithm.max_staleness = {window})"
        gain = f"could bring an iteration to about {wider_s:.2f} s"
        if NO_BETTER * wider_s > rates.iteration_s:
            gain = "gains nothing in the simulation"
        lines.append(
            f"nobody is busy for most of the time (the most: {most}, {shares[most]:.0%}), so more workers change "
            f"little: they wait for stragglers, for updates, for room, or for a core where there are fewer cores than "
            f"processes; {wider} {gain}. Shorten the longest answers (scorer.max_new_tokens), or see who waits in "
            f"`prefixrl status`"
        )
    elif role == LEARNER:
        spare = [
            f"{advice.wanted[each]} of {counts[each]} {each}s would do"
            for each in WORKERS
            if each in shares and advice.wanted[each] < counts[each]
        ]
        ranks = advice.wanted[LEARNER]
        pace = f"{ranks} ranks instead of {counts[LEARNER]} would keep pace with the workers (launch.learner_ranks)"
        lines.append(
            f"the learner is the bottleneck (busy for {shares[role]:.0%} of the time): more workers change nothing"
            + (f"; {pace}" if ranks > counts[LEARNER] else "")
            + (f"; with the ranks there are, {' and '.join(spare)}" if spare else "")
        )
    else:
        lines.append(
            f"{role}s are the bottleneck (busy for {shares[role]:.0%} of the time): {enough_workers(rates, advice)}"
        )
    assumed = "that every process has a device, or a core, of its own"
    model = f"times to come are simulated from these rates, which gives {advice.simulated_s:.2f} s for the run as it is"
    return [*lines, f"counts assume {assumed}; {model} (docs/scale.md)"]


# --- measured rates of a run ----------------------------------------------------------------------------------------


def rates_of(lines: Sequence[MetricsLine], config: RunConfig, document: StatusDocument | None) -> Rates:
    """Return the measured rates of a run; raises ConfigError for one that is too short."""
    if len(lines) < LEAST_ITERATIONS:
        raise ConfigError(
            f"{config.directory} has trained {len(lines)} iterations; rates are measured from {LEAST_ITERATIONS} on"
        )
    first, *rest = lines  # the first one waits for models to load
    iteration_s = (rest[-1].since_start_s - first.since_start_s) / len(rest)
    counts = {LEARNER: config.launch.learner_ranks, "rollout": config.launch.rollouts, "scorer": config.launch.scorers}
    busy = {role: share for role, share in rest[-1].busy_fraction.items() if role in WORKERS}
    seats = {role: config.embedded_seats(role) for role in WORKERS}
    if document:
        for role in WORKERS:
            here = [each.seats for each in document.workers if each.role == role]
            counts[role] = len(here) or counts[role]
            seats[role] = max(here, default=0) or seats[role]
        busy |= {role: share for role, share in document.busy_fraction.items() if role in WORKERS}
    causes = dict.fromkeys(cause for line in rest for cause in line.waited_for_s)
    return Rates(
        iteration_s=iteration_s,
        learner_s=fmean(line.trained_s + line.publish_s for line in rest),
        busy=busy,
        counts=counts,
        waited={cause: fmean(line.waited_for_s.get(cause, 0.0) for line in rest) / iteration_s for cause in causes},
        shape=RunShape(
            batch_groups=config.algorithm.groups_per_iteration,
            rows_per_group=config.algorithm.samples_per_prompt,
            max_staleness=config.algorithm.max_staleness,
            seats=seats,
            is_just_in_time=config.algorithm.admission == "just_in_time",
            drains=config.rollout.swap == "drain",
        ),
    )


def advice_for(directory: Path) -> tuple[Table, list[str]]:
    """Return the rates of a run and the advice, while it goes on or afterwards; ConfigError."""
    config = config_of(directory, ())
    document = None
    if not is_over(directory):
        try:
            document = msgspec.json.decode(fetch(directory), type=StatusDocument)
        except (PeerLost, UserError):
            document = None
    lines = json_lines.read(directory / METRICS_FILE, MetricsLine)
    rates = rates_of(lines, config, document)
    advice = advise(rates)
    table = Table("", "there", "busy", "s per iteration", "for balance", box=box.SIMPLE_HEAD)
    for role, share in rates.share.items():
        spent_s = f"{share * rates.iteration_s:.2f}"
        table.add_row(role, str(rates.counts[role]), f"{share:.0%}", spent_s, str(advice.wanted[role]))
    source = "workers as connected now" if document else "numbers of workers as in [launch]"
    return table, [*sentences(rates, advice), f"({len(lines)} iterations; {source})"]
