"""`prefixrl advise`: the part that holds a run up, and the workers that would balance it.

All figures come from the run itself: the busy shares and the times of its metrics, and simple proportions of them.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import click
import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from prefixrl.common.config.foreign.files import read_toml
from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import ConfigError, PeerLost, UserError
from prefixrl.common.run import json_lines
from prefixrl.common.run.documents import METRICS_FILE, MetricsLine
from prefixrl.common.run.status import StatusDocument
from prefixrl.deploy.runs.checkpoints import config_of
from prefixrl.deploy.view.run_state import fetch, is_over

ADVICE: dict[str, str] = read_toml(
    Path(__file__).parent / "tables" / "advice.toml", "the table of advice"
)
LEARNER, WORKERS = "learner", ("rollout", "scorer")
LEAST_ITERATIONS = 5
FULL = 0.9
"""Share of its time that a worker works where it keeps the learner busy: the rest evens out stragglers."""
IDLE = 0.75
"""A run in which every part is busy for less of the time has no bottleneck."""


@click.command("advise")
@click.argument("run_directory", type=click.Path(path_type=Path))
def advise_command(run_directory: Path) -> None:
    """Say which part holds up the run in RUN_DIRECTORY, and how many workers would balance it.

    From its measured rates, while it goes on and afterwards.
    """
    table, sentences = advice_for(run_directory)
    Console().print(table)
    for each in sentences:
        click.echo(each)


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
    most: Mapping[str, int]
    """Workers by role that hold all rows of a full window: more of them find no rows."""
    waited: Mapping[str, float]
    """Share of the time that the learner waits, by cause."""
    is_synchronous: bool
    """True with max_staleness = 0: each part waits for the others."""

    @property
    def share(self) -> dict[str, float]:
        """Share of its time that each role works; of the learner, its part of an iteration."""
        return {LEARNER: min(1.0, self.learner_s / self.iteration_s), **self.busy}

    def work_s(self, role: str, count: int) -> float:
        """Return the time that this many processes of a role need for an iteration's work."""
        there_s = self.learner_s if role == LEARNER else self.busy[role] * self.iteration_s
        return there_s * self.counts[role] / count


@dataclass(frozen=True, kw_only=True)
class Advice:
    """The role that holds a run up, and the counts that would balance it."""

    bottleneck: str
    """A role, or "" where no role is busy for most of the time."""
    wanted: Mapping[str, int]
    """By role: workers that keep the present learner busy; ranks that keep pace with the present workers."""
    balanced_s: float
    """Time of an iteration with the wanted workers and the present ranks."""


def advise(rates: Rates) -> Advice:
    """Return which role holds a run up and the counts that balance it. Pure."""
    shares = rates.share
    busiest = max(shares, key=lambda role: shares[role])
    wanted = {
        role: min(
            rates.most[role], max(1, math.ceil(rates.work_s(role, 1) / (FULL * rates.learner_s)))
        )
        for role in rates.busy
    }
    balanced_s = max(
        [rates.learner_s, *(rates.work_s(role, count) for role, count in wanted.items())]
    )
    slowest_s = max((rates.work_s(role, rates.counts[role]) for role in rates.busy), default=0.0)
    ranks = rates.counts[LEARNER]
    wanted[LEARNER] = (
        max(1, math.ceil(rates.work_s(LEARNER, 1) / slowest_s)) if slowest_s else ranks
    )
    is_held_up = rates.is_synchronous or shares[busiest] >= IDLE
    return Advice(bottleneck=busiest if is_held_up else "", wanted=wanted, balanced_s=balanced_s)


def sentences(rates: Rates, advice: Advice, cores: int) -> list[str]:
    """Return the advice in words; `cores` are those of this host."""
    busy = sum(share * rates.counts[role] for role, share in rates.share.items())
    waited = ", ".join(
        f"{share:.0%} for {cause}" for cause, share in rates.waited.items() if share >= 0.01
    )
    return [
        f"an iteration takes {rates.iteration_s:.2f} s; the learner waits {waited or 'for nothing'}",
        _about_the_bottleneck(rates, advice),
        ADVICE["cores"].format(busy=busy, cores=cores),
    ]


def _about_the_bottleneck(rates: Rates, advice: Advice) -> str:
    role, shares, counts, wanted = advice.bottleneck, rates.share, rates.counts, advice.wanted
    if rates.is_synchronous:
        slowest_s = max(rates.work_s(each, counts[each]) for each in shares)
        return ADVICE["synchronous"].format(role=role, share=shares[role], slowest_s=slowest_s)
    if not role:
        busiest = max(shares, key=lambda each: shares[each])
        return ADVICE["idle"].format(role=busiest, share=shares[busiest])
    if role == LEARNER:
        less = (each for each in rates.busy if wanted[each] < counts[each])
        spare = " and ".join(f"{wanted[each]} of {counts[each]} {each}s would do" for each in less)
        pace = (
            ADVICE["pace"].format(ranks=wanted[role], there=counts[role])
            if wanted[role] > counts[role]
            else ""
        )
        return ADVICE["learner"].format(share=shares[role], pace=pace) + (
            spare and ADVICE["spare"].format(spare=spare)
        )
    more = [role, *(each for each in rates.busy if each != role and wanted[each] > counts[each])]
    changes = " and ".join(f"{wanted[each]} {each}s instead of {counts[each]}" for each in more)
    told = ADVICE["workers"].format(
        role=role, share=shares[role], changes=changes, balanced_s=advice.balanced_s
    )
    return told + (ADVICE["full"] if wanted[role] == rates.most[role] else "")


def rates_of(
    lines: Sequence[MetricsLine], config: RunConfig, document: StatusDocument | None
) -> Rates:
    """Return the measured rates of a run; raises ConfigError for one that is too short."""
    if len(lines) < LEAST_ITERATIONS:
        raise ConfigError(
            f"{config.directory} has trained {len(lines)} iterations; rates are measured from {LEAST_ITERATIONS} on"
        )
    first, *rest = lines  # the first one waits for models to load
    iteration_s = (rest[-1].since_start_s - first.since_start_s) / len(rest)
    counts = {
        LEARNER: config.launch.learner_ranks,
        "rollout": config.launch.rollouts,
        "scorer": config.launch.scorers,
    }
    busy = {role: share for role, share in rest[-1].busy_fraction.items() if role in WORKERS}
    seats = {role: config.embedded_seats(role) for role in WORKERS}
    if document:
        for role in WORKERS:
            here = [each.seats for each in document.workers if each.role == role]
            counts[role] = len(here) or counts[role]
            seats[role] = max(here, default=0) or seats[role]
        busy |= {role: share for role, share in document.busy_fraction.items() if role in WORKERS}
    causes = dict.fromkeys(cause for line in rest for cause in line.waited_for_s)
    algorithm = config.algorithm
    window_groups = algorithm.groups_per_iteration * (algorithm.max_staleness + 1)
    return Rates(
        iteration_s=iteration_s,
        learner_s=fmean(line.trained_s + line.publish_s for line in rest),
        busy=busy,
        counts=counts,
        most={
            role: math.ceil(window_groups / max(1, seats[role] // algorithm.samples_per_prompt))
            for role in WORKERS
        },
        waited={
            cause: fmean(line.waited_for_s.get(cause, 0.0) for line in rest) / iteration_s
            for cause in causes
        },
        is_synchronous=algorithm.max_staleness == 0,
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
        table.add_row(
            role, str(rates.counts[role]), f"{share:.0%}", spent_s, str(advice.wanted[role])
        )
    source = "workers as connected now" if document else "numbers of workers as in [launch]"
    return table, [
        *sentences(rates, advice, os.cpu_count() or 1),
        f"({len(lines)} iterations; {source})",
    ]
