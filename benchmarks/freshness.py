"""The age of samples, and its price, when groups are begun just in time instead of as early as the window allows.

A real broker, weight server and publisher, a rollout and scorers as processes with the simulated engine (declared
latencies, no model), and a learner that sleeps for a second an iteration: scorers that could do 0.6, 1 and 2 times
what the learner trains, times of scoring that are constant, lognormal 0.5 and lognormal 1. The two rules of a cell run
at the same time and on the same service times. Then the arithmetic example, trained for real, again with both rules at
the same time, so that they share whatever else the machine does. S = 4. The first quarter of every run is left out.

    mean age    versions between the one that wrote a group and the one that trains it
    throughput  iterations per second, as a ratio of the same run with `admission = "as_early_as_allowed"`
    idle        share of the learner's time in which it waited for a batch

At S = 0 both rules must train the same: the example's advantages, figures and weights are compared bit by bit.

    python -m benchmarks.freshness [--quick] --json FILE
"""

import hashlib
import json
import math
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import click
import msgspec
import torch

from benchmarks.results import ROOT, Figure, Report, commit, options
from benchmarks.simulated import PROBE_LOGPROBS, daemons, learner, simulated_run, take_batch
from prefixrl.common.config.algorithm import AdmissionRule
from prefixrl.common.run import json_lines
from prefixrl.common.run.documents import ADVANTAGES_FILE, METRICS_FILE, MetricsLine
from prefixrl.learner.broker.client import BrokerClient
from prefixrl.learner.processes.servers import Servers
from prefixrl.learner.weights.publish import Publisher

RULES: tuple[AdmissionRule, AdmissionRule] = ("just_in_time", "as_early_as_allowed")
S, GROUPS, ITEM, SLOTS = 4, 16, 2, 4
TRAINING_S, PREFIX_S = 1.0, 0.1
LOADS = {"scorers slowest": (1, 0.6), "balanced": (1, 1.0), "learner slowest": (2, 2.0)}
"""Scorers, and what they could score as a multiple of what the learner trains."""
SIGMAS = (0.0, 0.5, 1.0)
EXAMPLE = ROOT / "deploy/examples/arithmetic/run.toml"
EXAMPLE_NAME = "arithmetic example"
AT_ONCE = 6
"""Simulated runs at a time: three cells, each with both rules. They sleep most of the time."""
SPAWN = multiprocessing.get_context("spawn")
KINDS = ("median", "smallest and largest")


class Ran(msgspec.Struct, frozen=True, kw_only=True):
    """One run, without its first quarter."""

    cell: str
    rule: AdmissionRule
    mean_age: float
    iterations_per_s: float
    idle: float
    lead_groups: float
    """At the end."""


def ran(
    cell: str,
    rule: AdmissionRule,
    ages: list[float],
    ends_s: list[float],
    waits_s: list[float],
    lead: float,
) -> Ran:
    """Figures of a run from those of its iterations."""
    first = len(ages) // 4
    span_s = ends_s[-1] - ends_s[first - 1]
    return Ran(
        cell=cell,
        rule=rule,
        mean_age=statistics.fmean(ages[first:]),
        iterations_per_s=(len(ages) - first) / span_s,
        idle=sum(waits_s[first:]) / span_s,
        lead_groups=lead,
    )


# --- simulated engines ----------------------------------------------------------------------------------------------


def simulate(load: str, sigma: float, rule: AdmissionRule, seed: int, iterations: int) -> Ran:
    """One run with simulated engines."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    scorers, capacity = LOADS[load]
    # So many items per iteration, in so many slots at once; the engine's lognormal times have their median declared.
    scoring_s = (
        scorers * SLOTS * TRAINING_S / (GROUPS / ITEM * capacity) * math.exp(-sigma * sigma / 2)
    )
    directory = Path(tempfile.mkdtemp(prefix="freshness-"))
    algorithm = {
        "groups_per_iteration": GROUPS,
        "samples_per_prompt": 2,
        "minibatches": 1,
        "iterations": iterations,
        "max_staleness": S,
        "admission": rule,
    }
    config = simulated_run(
        directory,
        iterations,
        PREFIX_S,
        scoring_s,
        seed=seed,
        algorithm=algorithm,
        rollout={"engine": "simulated", "groups_per_task": ITEM, "prefix_tokens": 4},
        simulated={
            "prefix_s": PREFIX_S,
            "completion_s": scoring_s,
            "completion_sigma": sigma,
            "accuracy": 1.0,
        },
    )
    servers = Servers(config, directory / "run", 0)
    try:
        with (
            daemons("rollout", 1, Path(config.directory)),
            daemons("scorer", scorers, Path(config.directory)),
            learner(servers, config) as (client, publisher),
        ):
            return learn(client, publisher, cell_name(load, sigma), rule, iterations)
    finally:
        servers.close()
        shutil.rmtree(directory, ignore_errors=True)


def learn(
    client: BrokerClient, publisher: Publisher, cell: str, rule: AdmissionRule, iterations: int
) -> Ran:
    """Sleep through every iteration, publish after each."""
    ages: list[float] = []
    ends_s: list[float] = []
    waits_s: list[float] = []
    for iteration in range(iterations):
        asked_s = time.monotonic()
        batch, _ = take_batch(client, iteration)
        waits_s.append(time.monotonic() - asked_s)
        ages.append(statistics.fmean(iteration - group.version for group in batch.groups))
        time.sleep(TRAINING_S)
        client.iteration_done(iteration, iteration + 1)
        ends_s.append(time.monotonic())
        publisher.publish(
            iteration + 1, {"weight": torch.full((4,), float(iteration))}.items(), PROBE_LOGPROBS
        )
    lead = client.status().admission.lead_groups
    publisher.flush(iterations)
    return ran(cell, rule, ages, ends_s, waits_s, lead)


def cell_name(load: str, sigma: float) -> str:
    return f"{load}, {f'lognormal {sigma:g}' if sigma else 'constant'}"


# --- the example ----------------------------------------------------------------------------------------------------


def launch(
    directory: Path, rule: AdmissionRule, staleness: int, seed: int, iterations: int
) -> None:
    """Train the example; nothing is judged but little."""
    settings = {
        "directory": directory,
        "seed": seed,
        "algorithm.iterations": iterations,
        "algorithm.max_staleness": staleness,
        "algorithm.admission": rule,
        "bitwise": str(staleness == 0).lower(),  # there both rules are compared bit by bit
        "evaluation.problems": 8,
        "evaluation.selection_problems": 8,
    }
    flags = [flag for key, value in settings.items() for flag in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "prefixrl.deploy", "launch", str(EXAMPLE), "--fresh", *flags]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def train(rule: AdmissionRule, seed: int, iterations: int) -> Ran:
    """The example's figures at S."""
    directory = Path(tempfile.mkdtemp(prefix="freshness-")) / "run"
    try:
        launch(directory, rule, S, seed, iterations)
        lines = json_lines.read(directory / METRICS_FILE, MetricsLine)
    finally:
        shutil.rmtree(directory.parent, ignore_errors=True)
    ages, ends_s = [line.mean_age for line in lines], [line.since_start_s for line in lines]
    waits_s = [line.waited_s for line in lines]
    return ran(EXAMPLE_NAME, rule, ages, ends_s, waits_s, lines[-1].admission.lead_groups)


def synchronous(rule: AdmissionRule, iterations: int) -> str:
    """Digest of what the example trained at S = 0: figures, advantages, weights."""
    directory = Path(tempfile.mkdtemp(prefix="freshness-")) / "run"
    digest = hashlib.sha256()
    try:
        launch(directory, rule, 0, 1, iterations)
        for line in json_lines.read(directory / METRICS_FILE, MetricsLine):
            digest.update(json.dumps(line.figures, sort_keys=True).encode())
        digest.update((directory / ADVANTAGES_FILE).read_bytes())
        weights = [
            path
            for name in ("actor", "critic", "model")
            for path in directory.rglob(f"{name}.safetensors")
        ]
        assert len(weights) >= 3, "a finished run has a checkpoint"
        for path in sorted(
            path for path in weights if path.is_relative_to(directory / "checkpoints")
        ):
            digest.update(path.read_bytes())
    finally:
        shutil.rmtree(directory.parent, ignore_errors=True)
    return digest.hexdigest()


# --- figures --------------------------------------------------------------------------------------------------------


def figures_of(runs: Sequence[Ran]) -> list[Figure]:
    """Medians by cell, each beside the other rule."""
    found = []
    for cell in dict.fromkeys(each.cell for each in runs):
        new, old = (
            [each for each in runs if each.cell == cell and each.rule == rule] for rule in RULES
        )
        found += [
            beside(f"{cell}: mean age", "versions", new, old, lambda each: each.mean_age),
            beside(
                f"{cell}: throughput", "iterations/s", new, old, lambda each: each.iterations_per_s
            ),
            beside(f"{cell}: learner idle", "share", new, old, lambda each: each.idle),
        ]
    return found


def beside(
    name: str, unit: str, new: Sequence[Ran], old: Sequence[Ran], value: Callable[[Ran], float]
) -> Figure:
    """The median of one rule; the ratio is the median over pairs of runs."""
    values, others = [value(each) for each in new], [value(each) for each in old]
    ratios = [mine / other for mine, other in zip(values, others, strict=True) if other]
    middle = statistics.median
    against, ratio = middle(others), middle(ratios) if ratios else None
    spread = min(values), max(values)
    return Figure(name, unit, middle(values), len(values), spread, against, RULES[1], ratio, *KINDS)


@click.command()
@options
@click.option("--repeats", default=2, help="Runs per cell and rule, each with a seed of its own.")
def main(path: Path, quick: bool, repeats: int) -> None:
    """Measure and write the figures."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    at, started_s = commit(), time.monotonic()
    iterations, trained, same = (12, 12, 3) if quick else (100, 100, 12)
    cells = [("balanced", 0.5)] if quick else [(load, sigma) for load in LOADS for sigma in SIGMAS]
    seeds = range(1, 2 if quick else repeats + 1)
    runs: list[Ran] = []
    with ProcessPoolExecutor(AT_ONCE, SPAWN) as pool:
        todo = [
            (load, sigma, rule, seed) for seed in seeds for load, sigma in cells for rule in RULES
        ]
        for one in pool.map(simulate, *zip(*todo, strict=True), [iterations] * len(todo)):
            print(one, flush=True)
            runs.append(one)
    with ProcessPoolExecutor(len(RULES), SPAWN) as pool:
        for seed in seeds:
            runs += pool.map(train, RULES, [seed] * len(RULES), [trained] * len(RULES))
            print(*runs[-2:], sep="\n", flush=True)
    digests = [synchronous(rule, same) for rule in RULES]
    figures = figures_of(runs)
    is_same = float(digests[0] == digests[1])
    figures.append(
        Figure(
            f"S = 0, {same} iterations: both rules train the same",
            "yes",
            is_same,
            2,
            (is_same, is_same),
        )
    )
    settings = {
        "max_staleness": S,
        "groups": GROUPS,
        "item": ITEM,
        "training_s": TRAINING_S,
        "iterations": iterations,
    }
    Report("freshness", quick, settings, figures, {"runs": runs, "digests": digests}, at).finish(
        path, started_s
    )


if __name__ == "__main__":
    main()
