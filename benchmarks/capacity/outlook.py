"""Figures of simulated runs, and the part that holds a system up."""

from dataclasses import replace
from statistics import fmean
from typing import Literal

from benchmarks.capacity.simulation import Simulation
from benchmarks.capacity.system import PARTS, Foreseen, Part, System

GAIN = 1.05
"""Least gain in throughput, of twice a part, that makes it the limit."""
LEAST_ITERATIONS, MOST_ITERATIONS = 9, 60
ROWS = 24_000
"""Rows of a simulated run of the usual length."""

Limit = Part | Literal["window"]
"""window: no part alone. Iterations wait for the longest answers, for versions or for room."""


def usual_iterations(system: System) -> int:
    """Return how many iterations show a system's rates: fewer where a batch has many rows."""
    per_iteration = system.batch_groups * system.rows_per_group
    return min(
        MOST_ITERATIONS,
        max(LEAST_ITERATIONS, 4 * (system.max_staleness + 1), ROWS // per_iteration),
    )


def foresee(system: System, seeds: int = 1, iterations: int = 0) -> Foreseen:
    """Return the means over runs with so many seeds."""
    runs = [
        Simulation(system, seed).run(iterations or usual_iterations(system))
        for seed in range(seeds)
    ]
    return replace(
        runs[0],
        groups_per_s=fmean(run.groups_per_s for run in runs),
        iteration_s=fmean(run.iteration_s for run in runs),
        mean_age=fmean(run.mean_age for run in runs),
        max_age=max(run.max_age for run in runs),
        busy={part: fmean(run.busy[part] for run in runs) for part in PARTS},
        waited=fmean(run.waited for run in runs),
    )


def limit_of(system: System, foreseen: Foreseen | None = None) -> Limit:
    """Return the part of which twice as much raises throughput most."""
    now = foreseen or foresee(system)
    gains: dict[Part, float] = {
        part: foresee(system.more(part)).groups_per_s / now.groups_per_s
        for part in PARTS
        if now.busy[part] > 0
    }
    best = max(gains, key=lambda part: gains[part])
    return best if gains[best] >= GAIN else "window"
