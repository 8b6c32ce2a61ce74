"""The age of samples in real runs of a language model, beside the least that the simulation reaches with their times.

The example `smollm2` in float32 on two cores, S = 2, 8 groups of 4 prefixes, 24 iterations, the second half counted:

    prefixrl launch deploy/examples/smollm2/run.toml --set directory=DIR --set algorithm.samples_per_prompt=4
        --set algorithm.iterations=24 --set evaluation.problems=1 --set 'evaluation.fixed_prefixes=[]'

A run is given as NAME:DIR:SHORTEST:LONGEST, with the seconds from the end of an iteration to a rollout's holding its
version (`status` says what a rollout holds). `least` is the youngest of constant leads at 0.98 of the throughput of
"as early as allowed", in simulated time: there an item takes the time that was measured, whatever else is under way.
On cores that learner and workers share, it takes less when less is under way, so a run may be younger.

    python -m benchmarks.real_freshness --run before:DIR:18:28 --run after:DIR:15:22 --json FILE
"""

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from benchmarks.admission import BATCH, CELLS, cell_figures
from benchmarks.results import Figure, Report, commit, options
from benchmarks.timed_run import Timing
from prefixrl.common.run.documents import METRICS_FILE

S, SIGMA, SEEDS = 2, 0.5, 2


def figures_of(name: str, directory: Path, install_s: tuple[float, float]) -> list[Figure]:
    """Return the figures of a run's second half, and the least age with its mean times."""
    lines: list[dict[str, Any]] = [
        json.loads(line) for line in (directory / METRICS_FILE).read_text().splitlines()
    ]
    first = len(lines) // 2
    iteration_s = (lines[-1]["since_start_s"] - lines[first - 1]["since_start_s"]) / (
        len(lines) - first
    )

    def mean(value: Callable[[dict[str, Any]], float]) -> float:
        return statistics.fmean(value(line) for line in lines[first:])

    waited_s = mean(lambda line: line["waited_s"])
    sampling_s, scoring_s = (
        mean(lambda line: line["stages"]["sampling_s"]),
        mean(lambda line: line["stages"]["scoring_s"]),
    )
    CELLS[name] = Timing(
        scorers=1,
        slots=4 * BATCH,
        sampling_slots=4 * BATCH,
        sampling_s=sampling_s,
        scoring_s=scoring_s,
        training_s=iteration_s - waited_s,
        install_s=install_s,
    )
    simulated = {
        each.name.rpartition(": ")[2]: each.value for each in cell_figures(name, S, SIGMA, SEEDS)
    }
    values = {
        "mean age": mean(lambda line: line["mean_age"]),
        "least in simulated time": simulated["least"],
        "iteration, s": iteration_s,
        "the learner waited, s": waited_s,
        "sampling of a group, s": sampling_s,
        "scoring of a group, s": scoring_s,
        "publication, main thread, s": mean(lambda line: line["publish_s"]),
        "lead at the end, groups": lines[-1]["admission"]["lead_groups"],
    }
    found = len(lines) - first
    return [
        Figure(f"{name}: {key}", "", value, found, (value, value)) for key, value in values.items()
    ]


@click.command()
@options
@click.option("--run", "runs", multiple=True, required=True, metavar="NAME:DIR:SHORTEST:LONGEST")
def main(path: Path, quick: bool, runs: tuple[str, ...]) -> None:
    """Read runs, simulate, and write the figures."""
    at, started_s, figures = commit(), time.monotonic(), list[Figure]()
    for each in runs:
        name, directory, shortest, longest = each.split(":")
        figures += figures_of(name, Path(directory), (float(shortest), float(longest)))
    for figure in figures:
        print(f"{figure.name} {figure.value:.2f}")
    settings = {"groups": BATCH, "samples": 4, "max_staleness": S, "sigma": SIGMA}
    Report("real_freshness", quick, settings, figures, {}, at).finish(path, started_s)


if __name__ == "__main__":
    main()
