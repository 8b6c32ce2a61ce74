"""A run of very many iterations in fast motion: does the memory of any process grow, or any file without bound?

The real broker, weight server, rollout and scorers with the simulated engine, which takes no time, and a learner that
takes batches, publishes a version after each and trains nothing. Memory (resident, and anonymous alone) is read every
few seconds; its slope is that of a straight line through the second half, when pools and caches are full.

    python -m benchmarks.fast_motion --json benchmarks/results/fast_motion.json
"""

import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import torch

from benchmarks.results import Figure, Report, commit, options
from benchmarks.simulated import PROBE_LOGPROBS, daemons, learner, simulated_run, take_batch
from prefixrl.learner.processes.servers import Servers

ITERATIONS, GROUPS, ROWS, SCORERS = 50_000, 2, 2, 2
READ_EVERY_S = 5.0
MIB = 2**20


@dataclass(frozen=True)
class Reading:
    """Anonymous memory of every process at an iteration."""

    iteration: int
    memory_mib: dict[str, float]


def read(iteration: int) -> Reading:
    """Read the memory of this process and of its children."""
    found = {"learner": _anonymous_mib(os.getpid())}
    for pid in map(
        int, Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii").split()
    ):
        title = Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0].decode()
        if title.startswith("prefixrl-"):
            name = title.removeprefix("prefixrl-")
            found[name if name not in found else f"{name} {pid}"] = _anonymous_mib(pid)
    return Reading(iteration, found)


def _anonymous_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("RssAnon"))) / 1024


def slope(readings: Sequence[Reading], name: str) -> float:
    """Return the growth of a process in MiB per 1,000 iterations, over the second half."""
    half = [
        each
        for each in readings
        if each.iteration >= readings[-1].iteration / 2 and name in each.memory_mib
    ]
    line = statistics.linear_regression(
        [each.iteration for each in half], [each.memory_mib[name] for each in half]
    )
    return 1000 * line.slope


def files(directory: Path) -> dict[str, float]:
    """Return the size in MiB of everything in a run directory, by its first name."""
    sizes: dict[str, float] = {}
    for path in directory.rglob("*"):
        if path.is_file():
            name = path.relative_to(directory).parts[0]
            sizes[name] = sizes.get(name, 0.0) + path.stat().st_size / MIB
    return {name: round(size, 3) for name, size in sorted(sizes.items())}


def run(folder: Path, iterations: int) -> tuple[list[Reading], dict[str, float], float]:
    """Take a run through all its iterations; return the readings, the files and the seconds."""
    sections = {
        "groups_per_iteration": GROUPS,
        "samples_per_prompt": ROWS,
        "minibatches": 1,
        "max_staleness": 2,
    }
    config = simulated_run(
        folder, iterations, 0.0, 0.0, algorithm={**sections, "iterations": iterations}
    )
    directory = Path(config.directory)
    servers = Servers(config, directory, 0)
    readings: list[Reading] = []
    with learner(servers, config) as (client, publisher):
        began_s = read_s = time.monotonic()
        with daemons("rollout", 1, directory), daemons("scorer", SCORERS, directory):
            for iteration in range(iterations):
                take_batch(client, iteration)
                servers.completed = iteration + 1
                client.iteration_done(iteration, iteration + 1)
                publisher.publish(
                    iteration + 1,
                    {"weight": torch.full((4,), float(iteration))}.items(),
                    PROBE_LOGPROBS,
                )
                if time.monotonic() - read_s > READ_EVERY_S:
                    read_s = time.monotonic()
                    readings.append(read(iteration))
                    if len(readings) % 12 == 0:
                        print(f"{iteration} iterations: {readings[-1].memory_mib}", flush=True)
            readings.append(read(iterations))
            seconds = time.monotonic() - began_s
    servers.close()
    return readings, files(directory), seconds


@click.command()
@options
def main(path: Path, quick: bool) -> None:
    """Measure slopes and files."""
    started_s, measured, iterations = (
        time.monotonic(),
        commit(),
        ITERATIONS // 25 if quick else ITERATIONS,
    )
    with tempfile.TemporaryDirectory() as folder:
        readings, sizes, seconds = run(Path(folder), iterations)
    names = sorted(readings[-1].memory_mib)
    figures = [
        Figure("speed", "iterations/s", iterations / seconds, 1, (iterations / seconds,) * 2)
    ]
    for name in names:
        last, growth = readings[-1].memory_mib[name], slope(readings, name)
        figures.append(Figure(f"memory of {name} at the end", "MiB", last, 1, (last, last)))
        figures.append(
            Figure(
                f"slope of {name}",
                "MiB per 1,000 iterations",
                growth,
                1,
                (growth, growth),
                statistic="slope",
            )
        )
    details = {
        "files_mib": sizes,
        "readings": [
            {"iteration": each.iteration, **each.memory_mib}
            for each in readings[:: max(1, len(readings) // 50)]
        ],
    }
    settings = {"iterations": iterations, "groups": GROUPS, "rows": ROWS, "scorers": SCORERS}
    Report("fast_motion", quick, settings, figures, details, measured).finish(path, started_s)


if __name__ == "__main__":
    main()
