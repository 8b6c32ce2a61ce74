"""The broker's CPU per group, its rate and its answers, with 3, 200 and 1,000 workers.

A real broker process, encrypted sockets, its journal on. Workers are those of `fake_fleet.py`, a few processes of them;
two learner ranks ask for batches, report iterations and publish versions without training. A group has 8 rows of 64
tokens and passes through the whole cycle: sampled, scored, written down, batched, handed to a rank.

    paced       scorers that can do 200 groups/s together, whatever their number
    saturated   workers that answer at once: the rate is the broker's, as far as the machine feeds it
    CPU         time of the broker process, all its threads (encryption too), over the groups acknowledged meanwhile

The window is full at all times (`admission = "as_early_as_allowed"`), so that as many groups are live with few workers
as with many. Latencies are seen from the workers' side, so they hold the workers' own queue. With `--before CHECKOUT`,
a folder with another state of the program, every cell is measured with both, in turn.

    python -m benchmarks.broker_load [--quick] [--before CHECKOUT] [--py-spy FOLDER] --json FILE
"""

import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path

import click
import msgspec

from benchmarks.fake_fleet import FleetPlan, Timings, digest_of
from benchmarks.results import ROOT, Figure, Report, commit, options
from benchmarks.simulated import PROBE, PROBE_LOGPROBS, simulated_run
from prefixrl.common.config.run import RunConfig
from prefixrl.common.host.serving import command as command_of
from prefixrl.common.run.digests import model_digests, scorer_digests
from prefixrl.common.wire.address import address_in
from prefixrl.common.wire.keys import make_keys
from prefixrl.common.wire.messages.learner import Batch, GetBatch
from prefixrl.common.wire.messages.weights import WeightsNote
from prefixrl.common.wire.packing import pack_logprobs, pack_tokens
from prefixrl.learner.broker.client import BrokerClient
from prefixrl.learner.broker.workers.identity import Start
from prefixrl.learner.run.stop import StopSignal

ROWS, TOKENS = 8, 64
BATCH_GROUPS, STALENESS, RANKS = 512, 6, 2
RATE = 200.0
"""Groups per second of a paced cell."""
FLEETS = {3: ((1, 2), (16, 8)), 200: ((10, 190), (8, 1)), 1000: ((50, 950), (4, 1))}
"""By number of workers: rollouts and scorers, and the groups that each works on at once."""
PROCESSES = 2
READY_S = 120.0
KINDS = ("median", "smallest and largest")


class Cell(msgspec.Struct, frozen=True):
    """One measured stretch."""

    arm: str
    workers: int
    is_paced: bool
    span_s: float
    groups: int
    cpu_ms_per_group: float
    """CPU time of the broker, all threads."""
    others_ms_per_group: float
    """CPU time of the workers and of the ranks."""
    groups_per_s: float
    busy: float
    """CPU seconds of the broker per second."""
    ack_ms: tuple[float, float]
    """Median and 99th percentile: Scores sent until acknowledged."""
    lease_ms: tuple[float, float]
    """The same: a scorer has room until its next task comes."""


QUANTITIES: dict[str, tuple[str, Callable[[Cell], float]]] = {
    "CPU per group": ("ms", lambda each: each.cpu_ms_per_group),
    "groups per second": ("1/s", lambda each: each.groups_per_s),
    "result to acknowledgement, median": ("ms", lambda each: each.ack_ms[0]),
    "result to acknowledgement, 99th percentile": ("ms", lambda each: each.ack_ms[1]),
    "room to next task, median": ("ms", lambda each: each.lease_ms[0]),
    "room to next task, 99th percentile": ("ms", lambda each: each.lease_ms[1]),
}


@contextmanager
def broker(directory: Path, checkout: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A broker process of a checkout."""
    make_keys(directory)
    started = command_of(
        "prefixrl.learner.broker", directory, Start(0, "tcp://127.0.0.1:9", ranks=RANKS)
    )
    with (directory / "log").open("wb") as log:
        child = subprocess.Popen(started, stderr=log, env=program(checkout))
    try:
        while not (directory / "endpoint").exists():
            assert child.poll() is None, (directory / "log").read_text()
            time.sleep(0.01)
        yield child
        assert child.poll() is None, (directory / "log").read_text()
    finally:
        child.kill()
        child.wait()


def program(checkout: Path) -> dict[str, str]:
    """The environment in which `import prefixrl` is a checkout's."""
    return os.environ | {"PYTHONPATH": str(checkout / ".types"), "OMP_NUM_THREADS": "1"}


class Ranks:
    """Learner ranks that train nothing: threads, each with a connection of its own."""

    def __init__(self, directory: Path) -> None:
        self.iterations = 0
        self._address, self._ending = address_in(directory, "rank"), threading.Event()
        self._publisher, self._observer = BrokerClient(self._address), BrokerClient(self._address)
        self.publish(0)
        self._threads = [
            threading.Thread(target=self._train, args=(rank,), daemon=True) for rank in range(RANKS)
        ]
        for each in self._threads:
            each.start()

    def publish(self, version: int) -> None:
        note = WeightsNote(
            version,
            digest_of(version),
            pack_tokens(PROBE[0][1]),
            pack_logprobs(PROBE_LOGPROBS),
            tuple((len(given), len(scored)) for given, scored in PROBE),
        )
        self._publisher.published(note)

    def _train(self, rank: int) -> None:
        client = BrokerClient(self._address, StopSignal(self._ending.is_set))
        for iteration in count():
            batch = client.next_batch(GetBatch(iteration, rank, RANKS), READY_S)
            if not isinstance(batch, Batch):
                return
            client.groups(iteration, range(rank, len(batch.groups), RANKS))
            if rank == 0:
                client.iteration_done(iteration, iteration + 1)
                self.publish(iteration + 1)
                self.iterations = iteration + 1

    def working(self) -> dict[str, int]:
        """Workers that were given a task, by role."""
        found = {"rollout": 0, "scorer": 0}
        for worker in self._observer.status().workers:
            found[worker.role] += worker.leases > 0 or worker.tasks_done > 0
        return found

    def end(self) -> None:
        self._ending.set()


@contextmanager
def fleets(
    config: RunConfig, workers: int, is_paced: bool, checkout: Path
) -> Iterator[list["subprocess.Popen[bytes]"]]:
    """The workers' processes; closing their input ends them."""
    counts, slots = FLEETS[workers]
    digests = (
        model_digests(config.model_of("rollout")),
        scorer_digests(config, config.model_of("scorer")),
    )
    hold_s = (0.05, counts[1] * slots[1] / RATE) if is_paced else (0.0, 0.0)
    started: list[subprocess.Popen[bytes]] = []
    command = [sys.executable, "-m", "benchmarks.fake_fleet"]
    try:
        for process in range(PROCESSES):
            rollouts, scorers = (
                total // PROCESSES + (process < total % PROCESSES) for total in counts
            )
            plan = FleetPlan(
                directory=config.directory,
                first=process * 10_000,
                rollouts=rollouts,
                scorers=scorers,
                slots=slots,
                hold_s=hold_s,
                rows=ROWS,
                tokens=TOKENS,
                digests=digests,
                probe_tokens=PROBE_LOGPROBS.size,
            )
            child = subprocess.Popen(
                command,
                cwd=ROOT,
                env=program(checkout),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            started.append(child)
            assert child.stdin is not None
            child.stdin.write(msgspec.json.encode(plan) + b"\n")
            child.stdin.flush()
        yield started
    finally:
        for each in started:
            each.kill()
            each.wait()


def measure(
    arm: str, checkout: Path, workers: int, is_paced: bool, span_s: float, profile: Path | None
) -> Cell:
    """One cell: a run of its own, warmed up until every scorer has worked and two iterations are trained."""
    algorithm = {
        "groups_per_iteration": BATCH_GROUPS,
        "samples_per_prompt": ROWS,
        "minibatches": 1,
        "iterations": 10**6,
        "max_staleness": STALENESS,
        "admission": "as_early_as_allowed",
    }
    rollout = {"engine": "simulated", "groups_per_task": 1, "prefix_tokens": TOKENS}
    with tempfile.TemporaryDirectory(prefix="broker-load-") as folder, ExitStack() as stack:
        config = simulated_run(Path(folder), 1, 0.002, 0.01, algorithm=algorithm, rollout=rollout)
        directory = Path(config.directory)
        child = stack.enter_context(broker(directory, checkout))
        ranks = Ranks(directory)
        started = stack.enter_context(fleets(config, workers, is_paced, checkout))
        warm_up(ranks, workers, started)
        if profile is not None:
            name = f"{arm}-{workers}-{'paced' if is_paced else 'saturated'}.txt"
            spy = [
                "py-spy",
                "record",
                "--pid",
                str(child.pid),
                "--duration",
                str(int(span_s)),
                "--format",
                "raw",
            ]
            stack.enter_context(
                subprocess.Popen([*spy, "--output", str(profile / name)], stdout=subprocess.DEVNULL)
            )
        others = [
            os.getpid(),
            *(each.pid for each in started),
        ]  # the ranks are threads of this process
        from_s, cpu_from_s, others_from_s = (
            time.monotonic(),
            cpu_seconds(child.pid),
            sum(map(cpu_seconds, others)),
        )
        time.sleep(span_s)
        to_s, cpu_s = time.monotonic(), cpu_seconds(child.pid) - cpu_from_s
        others_s = sum(map(cpu_seconds, others)) - others_from_s
        assert child.poll() is None, (directory / "log").read_text()
        ranks.end()
        measurements = [
            msgspec.json.decode(each.communicate(b"end", timeout=30.0)[0], type=Timings)
            for each in started
        ]
    acks = [
        lag_s * 1e3
        for each in measurements
        for at_s, lag_s in each.score_to_ack
        if from_s <= at_s < to_s
    ]
    leases = [
        lag_s * 1e3
        for each in measurements
        for at_s, lag_s in each.freed_to_lease
        if from_s <= at_s < to_s
    ]
    return Cell(
        arm,
        workers,
        is_paced,
        to_s - from_s,
        len(acks),
        cpu_s * 1e3 / len(acks),
        others_s * 1e3 / len(acks),
        len(acks) / (to_s - from_s),
        cpu_s / (to_s - from_s),
        (quantile(acks, 0.5), quantile(acks, 0.99)),
        (quantile(leases, 0.5), quantile(leases, 0.99)),
    )


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process, all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def warm_up(ranks: Ranks, workers: int, started: Sequence["subprocess.Popen[bytes]"]) -> None:
    deadline_s = time.monotonic() + READY_S
    rollouts, scorers = FLEETS[workers][0]
    while ranks.iterations < 2 or ranks.working() != {"rollout": rollouts, "scorer": scorers}:
        assert all(each.poll() is None for each in started), "a process of workers ended"
        assert time.monotonic() < deadline_s, (
            f"not warm: {ranks.iterations} iterations, {ranks.working()}"
        )
        time.sleep(0.5)


def quantile(values: list[float], share: float) -> float:
    return (
        sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else float("nan")
    )


def figures_of(cells: list[Cell]) -> list[Figure]:
    """Medians over the rounds; the baseline is the other checkout's, where it was measured."""
    found = []
    for workers, is_paced in dict.fromkeys((each.workers, each.is_paced) for each in cells):
        here = [each for each in cells if (each.workers, each.is_paced) == (workers, is_paced)]
        label = f"{workers} workers, {f'{RATE:g} groups/s offered' if is_paced else 'saturated'}"
        for name, (unit, of) in QUANTITIES.items():
            after, before = (
                [of(each) for each in here if each.arm == arm] for arm in ("after", "before")
            )
            value, against = statistics.median(after), statistics.median(before) if before else None
            spread, ratio = (min(after), max(after)), value / against if against else None
            full = f"{label}: {name}"
            found.append(
                Figure(full, unit, value, len(after), spread, against, "before", ratio, *KINDS)
            )
    return found


@click.command()
@options
@click.option(
    "--before",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Another checkout.",
)
@click.option("--workers", type=int, multiple=True, help="Only these numbers of workers.")
@click.option("--rounds", type=int, default=3, show_default=True)
@click.option(
    "--span-s", type=float, default=20.0, show_default=True, help="Measured seconds of a cell."
)
@click.option(
    "--py-spy",
    "profile",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for profiles.",
)
def main(
    quick: bool,
    path: Path,
    before: Path | None,
    workers: tuple[int, ...],
    rounds: int,
    span_s: float,
    profile: Path | None,
) -> None:
    """Measure and write the figures."""
    at, started_s = commit(), time.monotonic()
    span_s, rounds = (5.0, 1) if quick else (span_s, rounds)
    arms = {"after": ROOT} | ({"before": before.resolve()} if before else {})
    numbers = workers or ((3, 200) if quick else tuple(FLEETS))
    cells = []
    for number in range(rounds):
        for size in numbers:
            for is_paced in (True, False):
                # The order of the arms alternates.
                for arm in list(arms)[:: 1 if number % 2 else -1]:
                    cells.append(measure(arm, arms[arm], size, is_paced, span_s, profile))
                    print(msgspec.json.encode(cells[-1]).decode(), flush=True)
    settings = {
        "rows": ROWS,
        "tokens": TOKENS,
        "batch_groups": BATCH_GROUPS,
        "staleness": STALENESS,
        "ranks": RANKS,
        "rate": RATE,
        "fleets": {str(size): FLEETS[size] for size in numbers},
        "span_s": span_s,
        "rounds": rounds,
    }
    Report("broker_load", quick, settings, figures_of(cells), cells, at).finish(path, started_s)


if __name__ == "__main__":
    main()
