"""Groups per second beside a loop that asks a blocking reward server, at three sizes of a request.

    python -m benchmarks.blocking_server [--quick] --json FILE

Both have the same seats for scoring (16 rows at once), the same times: 0.1 s for a prefix, lognormal completions
(sigma 1, mean 0.4 s), a learner of 40 % of what a batch takes all seats, 64 groups of 2 rows per iteration. Nothing but
these times is simulated: here a real broker, weight server, rollout and two scorers as processes with the simulated
engine, S = 2; there a real HTTP server on loopback in a process of its own, and a loop that samples, asks and trains
one after the other, as trainers with a reward URL do. The loop is treated well: it samples a whole batch in the time of
one prefix, and its server starts a waiting row the moment that a seat is free. A request holds one group, as many as
fill the seats, or the whole batch; the next one is sent when the answer is there.

Rows are drawn, so a batch may be heavier in one arm than in the other. What is compared is the *used share*: drawn time
of the rows trained in a stretch, over the time that all seats have in it. The ceiling beside each ratio follows from
the drawn times alone: what the loop takes per batch over what all seats busy take. The first quarter of every run is
left out: the broker begins with the shortest lead and finds within a few iterations how much it has to begin ahead, so
scorers wait there. Seconds are slept, so other work on the machine changes little."""

import heapq
import json
import math
import multiprocessing
import shutil
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import NormalDist

import click
import numpy as np
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
from prefixrl.common.run.status import StatusDocument
from prefixrl.common.seeds import derive, row_uniforms
from prefixrl.learner.processes.servers import Servers

GROUPS, ROWS, SCORERS, SEATS = 64, 2, 2, 16
MEAN_S, SIGMA, PREFIX_S, LEARNER = 0.4, 1.0, 0.1, 0.4
COMPLETION_TOKENS = 8
"""Most tokens of a completion in `benchmarks.simulated`, each with a draw."""
SCORING_S = GROUPS * ROWS * MEAN_S / SEATS
"""Time of a batch with all seats busy."""
TRAINING_S = LEARNER * SCORING_S
SIZES = {
    "one group": 1,
    "as many groups as fill the seats": SEATS // ROWS,
    "the whole batch": GROUPS,
}
ITERATIONS, QUICK_ITERATIONS, SEEDS, QUICK_SEEDS = 40, 8, (1, 2, 3), (1,)
PEER_ITERATIONS = {"one group": 4, "as many groups as fill the seats": 6, "the whole batch": 12}
SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Ours:
    """A run of the daemons, without its first quarter."""

    seed: int
    groups_per_s: float
    busy: float
    """Share of the scorers' seats."""
    used: float
    """Drawn time of the rows that were trained, over that of all seats: the rate over the bound of the scorers."""
    busy_with_start: float
    """Share of the scorers' seats since their first lease, as the run reports it."""
    mean_age: float


@dataclass(frozen=True)
class Peer:
    """A run of the loop with one size of a request."""

    seed: int
    size: str
    groups_per_s: float
    used: float
    """Drawn time of its rows, over that of all seats."""
    ceiling: float
    """The loop's time by the drawn times alone, over that of all seats busy."""


def times_s(draws: np.random.Generator, rows: int) -> list[float]:
    """Return the times of completions."""
    found: list[float] = (
        MEAN_S * np.exp(SIGMA * draws.standard_normal(rows) - SIGMA**2 / 2)
    ).tolist()
    return found


def makespan_s(rows_s: Sequence[float], seats: int) -> float:
    """Return the time of rows of which each begins when a seat is free."""
    free = [0.0] * seats
    for row_s in rows_s:
        heapq.heapreplace(free, free[0] + row_s)
    return max(free)


def drawn_s(seed: int, group: int) -> float:
    """Return the time that the simulated target takes for all rows of a group."""
    draws = row_uniforms(derive(seed, "group", group), "completion", ROWS, COMPLETION_TOKENS)[:, 0]
    return sum(
        MEAN_S * math.exp(SIGMA * NormalDist().inv_cdf(float(each)) - SIGMA**2 / 2)
        for each in draws
    )


def busy_between(before: StatusDocument, after: StatusDocument) -> float:
    """Return the share of the scorers' seats between the reports in two documents."""
    row_s = seat_s = 0.0
    for old in (each for each in before.workers if each.role == "scorer"):
        new = next(each for each in after.workers if each.name == old.name)
        row_s += new.busy_row_s - old.busy_row_s
        seat_s += new.seats * (new.since_first_lease_s - old.since_first_lease_s)
    return row_s / seat_s


# --- the daemons ----------------------------------------------------------------------------------------------------


def run_ours(seed: int, iterations: int) -> Ours:
    directory = Path(tempfile.mkdtemp(prefix="blocking-"))
    median_s = MEAN_S * math.exp(-(SIGMA**2) / 2)
    config = simulated_run(
        directory,
        iterations,
        PREFIX_S,
        median_s,
        seed=seed,
        simulated={
            "prefix_s": PREFIX_S,
            "completion_s": median_s,
            "completion_sigma": SIGMA,
            "accuracy": 1.0,
            "seats": SEATS // SCORERS,
        },
        algorithm={
            "groups_per_iteration": GROUPS,
            "samples_per_prompt": ROWS,
            "minibatches": 1,
            "iterations": iterations,
            "max_staleness": 2,
        },
    )
    servers = Servers(config, directory / "run", 0)
    first, last = (
        iterations // 4,
        iterations - 3,
    )  # later the window closes: no work is left for all seats
    statuses = list[StatusDocument]()
    ages, ends_s, needed_s = list[float](), list[float](), list[float]()
    try:
        with (
            daemons("rollout", 1, Path(config.directory)),
            daemons("scorer", SCORERS, Path(config.directory)),
            learner(servers, config) as (client, publisher),
        ):
            for iteration in range(iterations):
                batch, _ = take_batch(client, iteration)
                ages.append(statistics.fmean(iteration - group.version for group in batch.groups))
                needed_s.append(sum(drawn_s(config.seed, group.seq) for group in batch.groups))
                time.sleep(TRAINING_S)
                client.iteration_done(iteration, iteration + 1)
                ends_s.append(time.monotonic())
                if iteration in (first, last):
                    statuses.append(client.status())
                publisher.publish(
                    iteration + 1,
                    {"weight": torch.full((4,), float(iteration))}.items(),
                    PROBE_LOGPROBS,
                )
            publisher.flush(iterations)
    finally:
        servers.close()
        shutil.rmtree(directory, ignore_errors=True)
    stretch_s = ends_s[last] - ends_s[first]
    return Ours(
        seed,
        groups_per_s=GROUPS * (last - first) / stretch_s,
        busy=busy_between(*statuses),
        used=sum(needed_s[first + 1 : last + 1]) / (SEATS * stretch_s),
        busy_with_start=statuses[-1].busy_fraction["scorer"],
        mean_age=statistics.fmean(ages[first:]),
    )


# --- the loop and its server ----------------------------------------------------------------------------------------


class RewardHandler(BaseHTTPRequestHandler):
    """Answers a request when its rows would have ended in the server's seats."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        rows_s = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        time.sleep(makespan_s(rows_s, SEATS))
        body = json.dumps([1.0] * len(rows_s)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def serve_rewards(port: Connection) -> None:
    """Serve until the process is ended; sends the port first."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), RewardHandler)
    port.send(server.server_port)
    server.serve_forever()


def run_peer(seed: int, size: str, iterations: int) -> Peer:
    here, there = SPAWN.Pipe()
    process = SPAWN.Process(target=serve_rewards, args=(there,), daemon=True)
    process.start()
    try:
        assert here.poll(60.0), "the reward server did not start within 60 s"
        url = f"http://127.0.0.1:{here.recv()}/"
        draws = np.random.default_rng(seed)
        taken_s, needed_s, drawn = list[float](), list[float](), list[float]()
        for _ in range(iterations):
            rows_s, begun_s = times_s(draws, GROUPS * ROWS), time.monotonic()
            requests = [
                rows_s[at : at + SIZES[size] * ROWS]
                for at in range(0, len(rows_s), SIZES[size] * ROWS)
            ]
            time.sleep(PREFIX_S)
            for request in requests:
                asked = urllib.request.Request(url, json.dumps(request).encode())
                with urllib.request.urlopen(asked, timeout=PATIENCE_S) as answer:
                    assert len(json.load(answer)) == len(request)
            time.sleep(TRAINING_S)
            taken_s.append(time.monotonic() - begun_s)
            needed_s.append(
                PREFIX_S + sum(makespan_s(request, SEATS) for request in requests) + TRAINING_S
            )
            drawn.append(sum(rows_s))
    finally:
        process.kill()
        process.join()
    first = iterations // 4
    busy_s = sum(drawn[first:]) / SEATS
    return Peer(
        seed,
        size,
        groups_per_s=GROUPS / statistics.fmean(taken_s[first:]),
        used=busy_s / sum(taken_s[first:]),
        ceiling=sum(needed_s[first:]) / busy_s,
    )


# --- figures --------------------------------------------------------------------------------------------------------


def figures_of(ours: Sequence[Ours], peers: Sequence[Peer]) -> list[Figure]:
    def figure(
        name: str, unit: str, values: list[float], against: list[float] | None = None, of: str = ""
    ) -> Figure:
        value, baseline = statistics.median(values), statistics.median(against) if against else None
        ratio = value / baseline if baseline else None
        spread = min(values), max(values)
        return Figure(
            name,
            unit,
            value,
            len(values),
            spread,
            baseline,
            of,
            ratio,
            "median",
            "least and largest value",
        )

    rates = [run.groups_per_s for run in ours]
    bound = [GROUPS / SCORING_S]
    found = [
        figure("throughput", "groups/s", rates, bound, "all seats busy, by the mean time"),
        figure("scorers busy", "share of seats", [run.busy for run in ours]),
        figure(
            "used share: throughput over the bound of the drawn times",
            "share",
            [run.used for run in ours],
        ),
        figure(
            "scorers busy, start included", "share of seats", [run.busy_with_start for run in ours]
        ),
        figure("mean age", "versions", [run.mean_age for run in ours]),
    ]
    for size in SIZES:
        runs = [run for run in peers if run.size == size]
        name = f"a blocking server, {size} per request"
        found.append(
            figure(
                f"used share, beside {size} per request",
                "share",
                [run.used for run in ours],
                [r.used for r in runs],
                name,
            )
        )
        found.append(
            figure(
                f"ceiling of that ratio, {size} per request", "ratio", [run.ceiling for run in runs]
            )
        )
    return found


@click.command()
@options
def main(path: Path, quick: bool) -> None:
    """Measure and write the figures."""
    started_s, measured = time.monotonic(), commit()
    seeds, iterations = (QUICK_SEEDS, QUICK_ITERATIONS) if quick else (SEEDS, ITERATIONS)
    ours, peers = list[Ours](), list[Peer]()
    for seed in seeds:
        ours.append(run_ours(seed, iterations))
        print(ours[-1], flush=True)
        for size in SIZES:
            peers.append(run_peer(seed, size, min(iterations, PEER_ITERATIONS[size])))
            print(peers[-1], flush=True)
    settings = {
        "groups": GROUPS,
        "rows": ROWS,
        "seats": SEATS,
        "training_s": TRAINING_S,
        "iterations": iterations,
    }
    Report(
        "blocking_server", quick, settings, figures_of(ours, peers), [ours, peers], measured
    ).finish(path, started_s)


if __name__ == "__main__":
    main()
