"""The pause of a rollout for an update of its weights, and its effect on scorers.

A real broker, weight server and publisher, real workers with the simulated engine (declared latencies, no model), and a
learner that trains nothing but publishes as many bytes as asked for after each batch. Runs with weights of 500 MiB
(--quick: 100) and with weights of 64 bytes, the baseline for the scorers' busy share, alternate: 64, 500, 500, 64
(--quick: one each).

    pause       from the end of the rollout's last task after it asked to swap (or the asking, when it had none) until
                it reports the new version installed and probed
    transfer    the pull of that version: asked for until staged and verified

The simulated engine answers every probe with zeros, which tell no versions apart. So each update is proved by a digest
of all weights instead, and nearly all of the pause is that digest. An engine whose probe changes enough with its
weights is not asked for one.

    python -m benchmarks.update_pause [--quick] --json FILE
"""

import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from functools import partial
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import click
import msgspec
import torch

from benchmarks.results import Figure, Report, commit, options
from benchmarks.simulated import PROBE_LOGPROBS, daemons, learner, simulated_run, take_batch
from prefixrl.common.config.run import RunConfig
from prefixrl.common.engines.interface.base import JobResult
from prefixrl.common.engines.simulated import SimulatedEngine
from prefixrl.common.prompts.rendering import ByteRenderer
from prefixrl.common.weights.snapshot import Snapshot
from prefixrl.common.wire.address import address_in
from prefixrl.common.worker.link import Link
from prefixrl.learner.processes.servers import Servers
from prefixrl.rollout.loop import Rollout
from prefixrl.rollout.weights import Fetcher, WeightsSource

MIB = 2**20
SPAWN = multiprocessing.get_context("spawn")
SCORERS = 2
FRESH = 2
"""Transfers of a run that bring fresh memory: they are not counted."""


class Update(msgspec.Struct, frozen=True):
    """One installed version."""

    version: int
    pause_s: float
    transfer_s: float


class TimedRollout(Rollout):
    """A rollout that notes when it could work and did not."""

    updates: "SimpleQueue[Update]"
    _idle_from_s = 0.0
    _pulled_s = 0.0
    _was_staged = False

    def _deliver(self, result: JobResult) -> None:
        super()._deliver(result)
        self._idle_from_s = time.monotonic()

    def _swap_weights(self) -> None:
        super()._swap_weights()
        if self.swap.staged and not self._was_staged:
            self._was_staged = True
            if not self._open:
                self._idle_from_s = time.monotonic()

    def _install(self, snapshot: Snapshot) -> None:
        super()._install(snapshot)
        self._was_staged = False
        transfer_s = self._fetcher.counts.pull_s - self._pulled_s
        self._pulled_s = self._fetcher.counts.pull_s
        pause_s = time.monotonic() - self._idle_from_s
        self.updates.put(Update(self.swap.version, pause_s, transfer_s))


def run_rollout(config: RunConfig, updates: "SimpleQueue[Update]") -> None:
    """A rollout process."""
    torch.set_num_threads(1)
    link = Link(partial(address_in, Path(config.directory), "worker"), "rollout")
    welcome = link.welcome()
    link.name = welcome.worker
    fetcher = Fetcher(WeightsSource.from_welcome(welcome, link.address))
    engine = SimulatedEngine("rollout", config.simulated, config.rows_per_job("rollout"))
    rollout = TimedRollout(config, link, engine, ByteRenderer(), fetcher, config.adapter.model)
    rollout.updates = updates
    rollout.say_ready()
    rollout.run(lambda: False)
    link.close("done")


def run(size_bytes: int, iterations: int, scoring_s: float) -> tuple[list[Update], float]:
    """One run; its updates and the scorers' busy share."""
    directory = Path(tempfile.mkdtemp(prefix="pause-"))
    config = simulated_run(directory, iterations, 0.2, scoring_s)
    servers = Servers(config, directory / "run", 0)
    updates: SimpleQueue[Update] = SPAWN.SimpleQueue()
    rollout = SPAWN.Process(target=run_rollout, args=(config, updates), daemon=True)
    rollout.start()
    try:
        with daemons("scorer", SCORERS, directory / "run"):
            busy = learn(servers, config, size_bytes, iterations)
    finally:
        rollout.kill()
        rollout.join()
        servers.close()
        shutil.rmtree(directory, ignore_errors=True)
    found = []
    while not updates.empty():
        found.append(updates.get())
    return found, busy


def learn(servers: Servers, config: RunConfig, size_bytes: int, iterations: int) -> float:
    """Take every batch, publish after each; the scorers' busy share at the end."""
    with learner(servers, config) as (client, publisher):
        tensors = {"weight": torch.randn(size_bytes // 4)}
        for iteration in range(iterations):
            take_batch(client, iteration)
            client.iteration_done(iteration, iteration + 1)
            tensors = {"weight": tensors["weight"] + 1.0}
            publisher.publish(iteration + 1, tensors.items(), PROBE_LOGPROBS)
        busy = client.status().busy_fraction["scorer"]
        publisher.flush(iterations)
    return busy


def figures_of(updates: list[Update], busy: list[float], busy_without: list[float]) -> list[Figure]:
    """Medians and ranges."""
    pauses = [each.pause_s * 1e3 for each in updates]
    transfers = [each.transfer_s * 1e3 for each in updates]
    shares = [each.pause_s / each.transfer_s for each in updates]
    middle, kinds = statistics.median, ("median", "smallest and largest")
    count, with_updates, without = len(updates), middle(busy), middle(busy_without)
    return [
        Figure(
            "pause of an update",
            "ms",
            middle(pauses),
            count,
            (min(pauses), max(pauses)),
            middle(transfers),
            "transfer",
            middle(pauses) / middle(transfers),
            *kinds,
        ),
        Figure(
            "pause over transfer, update by update",
            "share",
            middle(shares),
            count,
            (min(shares), max(shares)),
            None,
            "",
            None,
            *kinds,
        ),
        Figure(
            "scorers busy",
            "share",
            with_updates,
            len(busy),
            (min(busy), max(busy)),
            without,
            "weights of 64 bytes",
            with_updates / without,
            *kinds,
        ),
    ]


@click.command()
@options
def main(path: Path, quick: bool) -> None:
    """Measure and write the figures."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    at, started_s = commit(), time.monotonic()
    size, iterations, scoring_s = (100 * MIB, 4, 2.0) if quick else (500 * MIB, 20, 4.0)
    counted: list[Update] = []
    busy: dict[int, list[float]] = {64: [], size: []}
    for size_bytes in (64, size) if quick else (64, size, size, 64):
        updates, share = run(size_bytes, iterations, scoring_s)
        busy[size_bytes].append(share)
        print(f"{size_bytes} bytes: scorers busy {share:.3f}", *updates, sep="\n", flush=True)
        if size_bytes == size:
            counted += updates[FRESH:]
    figures = figures_of(counted, busy[size], busy[64])
    settings = {
        "size_mib": size // MIB,
        "iterations": iterations,
        "scoring_s": scoring_s,
        "scorers": SCORERS,
    }
    report = Report(
        "update_pause", quick, settings, figures, {"updates": counted, "busy": busy}, at
    )
    report.finish(path, started_s)


if __name__ == "__main__":
    main()
