"""The cost of an evaluation in training: no more of the run's time than its own work.

A real broker, weight server and publisher, a rollout and two scorers as processes with the simulated engine (declared
latencies, no model), and a learner that trains nothing. Runs without and with evaluations alternate; both wait for
scorers.

    own work    seconds that the scorers' seats, all of them busy, need for the problems of the evaluations
    delay       how much longer as many iterations took than without, counted from the third batch until the last one
                is there and every evaluation is finished
    mixed       share of the answers of an evaluation that are not of its version

    python -m benchmarks.evaluation_cost [--quick] --json FILE
"""

import os
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import click
import torch

from benchmarks.results import Figure, Report, commit, options
from benchmarks.simulated import (
    PATIENCE_S,
    PROBE_LOGPROBS,
    daemons,
    learner,
    simulated_run,
    take_batch,
)
from prefixrl.common.config.run import RunConfig
from prefixrl.common.wire.messages.groups import Prompt
from prefixrl.common.wire.messages.learner import Evaluate
from prefixrl.learner.broker.client import BrokerClient
from prefixrl.learner.broker.groups.evaluations import ROWS_PER_ITEM
from prefixrl.learner.processes.servers import Servers

SCORERS, ITEMS, EVERY = 2, 4, 10
PROBLEMS = ITEMS * ROWS_PER_ITEM
PREFIX_S, SCORING_S = 0.1, 1.0
WARM = 2
"""Batches before the clock starts."""
POLL_S = 0.1


@dataclass(frozen=True)
class Ran:
    """One run."""

    elapsed_s: float
    evaluated: int
    """Answers of evaluations."""
    mixed: int
    """Those of another version than asked for."""
    seats: int
    """Rows that the scorers score at once."""


def run(iterations: int, every: int) -> Ran:
    """So many iterations, with an evaluation every so many versions (0: none)."""
    directory = Path(tempfile.mkdtemp(prefix="evaluation-"))
    config = simulated_run(directory, iterations, PREFIX_S, SCORING_S)
    servers = Servers(config, directory / "run", 0)
    try:
        with (
            daemons("rollout", 1, directory / "run"),
            daemons("scorer", SCORERS, directory / "run"),
        ):
            return learn(servers, config, iterations, every)
    finally:
        servers.close()
        shutil.rmtree(directory, ignore_errors=True)


def learn(servers: Servers, config: RunConfig, iterations: int, every: int) -> Ran:
    """Take every batch, publish after each, ask for evaluations as the learner does.

    Before their version is published.
    """
    asked: list[int] = []
    started_s = 0.0
    with learner(servers, config) as (client, publisher):
        for iteration in range(iterations):
            take_batch(client, iteration)
            if iteration == WARM:
                started_s = time.monotonic()
            client.iteration_done(iteration, iteration + 1)
            version = iteration + 1
            if every and version % every == 0 and version < iterations:
                asked.append(version)
                client.evaluate(question(config, version))
            # Rollouts may need the weights of an evaluation for longer than the newest two.
            publisher.pinned = frozenset(asked)
            weights = {"weight": torch.full((4,), float(version))}
            publisher.publish(version, weights.items(), PROBE_LOGPROBS)
        found = [version for each in asked for version in versions_of(client, each)]
        elapsed_s = time.monotonic() - started_s
        seats = sum(worker.seats for worker in client.status().workers if worker.role == "scorer")
    wanted = [each for each in asked for _ in range(PROBLEMS)]
    mixed = sum(got != version for got, version in zip(found, wanted, strict=True))
    return Ran(elapsed_s, len(found), mixed, seats)


def question(config: RunConfig, version: int) -> Evaluate:
    """The evaluation of a version."""
    prompts = tuple(Prompt(f"held-out-{i}", f"{i} + 1 =", str(i + 1)) for i in range(PROBLEMS))
    return Evaluate(
        name=f"adapter@{version}",
        version=version,
        prefix_tokens=b"",
        prompts=prompts,
        prefix_sampling=config.rollout_sampling(0.0),
        completion_sampling=config.scorer_sampling(0.0),
    )


def versions_of(client: BrokerClient, version: int) -> list[int]:
    """Versions of every answer of an evaluation, once it is finished."""
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        progress, groups = client.evaluation(f"adapter@{version}")
        if progress.judged == progress.total:
            return [group.version for group in groups]
        time.sleep(POLL_S)
    raise SystemExit(f"the evaluation of version {version} stands at {progress}")


def figures_of(without: list[Ran], having: list[Ran]) -> list[Figure]:
    """The delay of each pair of runs against the evaluations' own work."""
    own_s = having[0].evaluated * SCORING_S / having[0].seats
    delays = [b.elapsed_s - a.elapsed_s for a, b in zip(without, having, strict=True)]
    middle, spread = statistics.median(delays), (min(delays), max(delays))
    mixed = sum(each.mixed for each in having) / sum(each.evaluated for each in having)
    kinds = ("median", "smallest and largest")
    return [
        Figure(
            "delay by evaluations",
            "s",
            middle,
            len(delays),
            spread,
            own_s,
            "their own work",
            middle / own_s,
            *kinds,
        ),
        Figure("mixed versions", "share", mixed, len(having), (mixed, mixed)),
    ]


@click.command()
@options
def main(path: Path, quick: bool) -> None:
    """Measure and write the figures."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    at, started_s = commit(), time.monotonic()
    iterations, pairs = (20, 1) if quick else (50, 2)
    without: list[Ran] = []
    having: list[Ran] = []
    for pair in range(pairs):
        # Whichever comes second in one pair comes first in the next.
        for every in (0, EVERY) if pair % 2 == 0 else (EVERY, 0):
            (having if every else without).append(run(iterations, every))
        print(f"without {without[-1]}, with {having[-1]}", flush=True)
    figures = figures_of(without, having)
    settings = {
        "iterations": iterations,
        "every": EVERY,
        "problems": PROBLEMS,
        "scorers": SCORERS,
        "scoring_s": SCORING_S,
    }
    raw = {"without": without, "with": having}
    report = Report("evaluation_cost", quick, settings, figures, raw, at)
    report.finish(path, started_s)


if __name__ == "__main__":
    main()
