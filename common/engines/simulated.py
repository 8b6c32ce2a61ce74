"""An engine without a model: declared latencies, made-up tokens; never evidence of training."""

import heapq
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from prefixrl.common.config.run import RunConfig
from prefixrl.common.config.workers.simulated import SimulatedConfig
from prefixrl.common.engines.interface.base import (
    AdapterEngine,
    Continuation,
    Job,
    JobResult,
    OpenJob,
    room_of,
    spans_of,
)
from prefixrl.common.weights.snapshot import Snapshot, manifest_of
from prefixrl.common.wire.packing import ProbeRow

if TYPE_CHECKING:
    import torch

FIRST_WEIGHTS = 4
"""Number of the zeros that stand for the weights of its start."""
MOST_REMOTE = 5e-7
TASKS = 4
"""Usual tasks whose rows have a seat together, unless `simulated.seats` says otherwise."""


@dataclass(order=True)
class _Row:
    """A row in a seat."""

    ends_s: float
    job: str
    index: int
    started_s: float = field(compare=False)
    versions: NDArray[np.int32] = field(compare=False)
    """Version of each token; unwritten tokens have the newest version."""


class _Waiting(NamedTuple):
    entry: OpenJob
    number: int
    submitted_s: float


class SimulatedEngine(AdapterEngine):
    """Engine whose rows take a declared time; a scorer's rows return their script."""

    name = "simulated"
    takes_runs = False

    def __init__(self, role: str, config: SimulatedConfig, rows_per_job: int = 1) -> None:
        super().__init__()
        self.seats = config.seats or TASKS * rows_per_job
        self.room = room_of(self.seats)
        self._role = role
        self._version = 0
        self._mean_s = config.prefix_s if role == "rollout" else config.completion_s
        self._sigma = config.completion_sigma if role == "scorer" else 0.0
        self._most_s = config.completion_limit_s or math.inf if role == "scorer" else math.inf
        self._seated: list[_Row] = []
        self._ended_row_s = 0.0
        self._snapshot: Snapshot | None = None
        """The weights installed last; torch is imported only if its tensors are asked for."""

    @property
    def busy_row_s(self) -> float:
        """Row-seconds in a seat so far."""
        now_s = time.monotonic()
        return self._ended_row_s + sum(
            max(0.0, min(now_s, row.ends_s) - row.started_s) for row in self._seated
        )

    def submit(self, job: Job) -> None:
        """Queue the rows of a job; each starts when a seat is free."""
        now_s = time.monotonic()
        entry = self._open[job.key] = OpenJob(job, len(job.rows))
        self._queue.extend(_Waiting(entry, index, now_s) for index in range(len(job.rows)))
        while self._queue and len(self._seated) < self.seats:
            self._seat(now_s)

    def _seat(self, free_s: float) -> None:
        """Give the first row that waits a seat that became free at a time."""
        entry, index, submitted_s = self._queue.popleft()
        started_s = max(free_s, submitted_s)
        if entry.started_s is None:
            entry.started_s = started_s
        # The row's own first draw decides its time, so a redelivered row takes as long again.
        draw = float(entry.job.uniforms[index].flat[0]) if self._sigma else 0.5
        normal = NormalDist().inv_cdf(
            min(max(draw, MOST_REMOTE), 1 - MOST_REMOTE)
        )  # within five deviations
        lasts_s = min(self._most_s, self._mean_s * math.exp(self._sigma * normal))
        versions = np.full(entry.job.sampling.max_new_tokens, self._version, dtype=np.int32)
        heapq.heappush(
            self._seated, _Row(started_s + lasts_s, entry.job.key, index, started_s, versions)
        )

    def step(self, timeout_s: float) -> list[JobResult]:
        """Wait for the next row to end, at most `timeout_s`; return the jobs that finished."""
        if not self._seated:
            return []
        wait_s = min(timeout_s, self._seated[0].ends_s - time.monotonic())
        if wait_s > 0:
            time.sleep(wait_s)
        self.progress += 1
        results = list[JobResult]()
        now_s = time.monotonic()
        while self._seated and self._seated[0].ends_s <= now_s:
            ended = heapq.heappop(self._seated)
            self._ended_row_s += ended.ends_s - ended.started_s
            if self._queue:
                self._seat(ended.ends_s)  # as an engine does by itself, whenever its worker looks
            entry = self._open[ended.job]
            results += self._end_row(
                entry, ended.index, self._written(entry.job, ended), ended.ends_s
            )
        return results

    def _written(self, job: Job, row: _Row) -> Continuation:
        text = row.versions
        spans = spans_of(row.versions.tolist())
        if self._role == "scorer":
            assert job.script is not None, "a simulated target returns the script of its job"
            text = job.script[row.index]
            spans = ()
        self.tokens += text.size
        return Continuation(text, np.full(text.size, -1.0, dtype=np.float32), "eos", spans)

    def install(self, snapshot: Snapshot) -> None:
        """Keep the weights; running rows write the rest of their tokens with the new version."""
        self._snapshot = snapshot
        self._version = snapshot.version
        self._digest = snapshot.manifest.digest
        now_s = time.monotonic()
        for row in self._seated:
            unwritten = max(0.0, row.ends_s - now_s) / max(row.ends_s - row.started_s, 1e-9)
            total = row.versions.size
            row.versions[total - round(unwritten * total) :] = self._version

    def weights(self) -> "dict[str, torch.Tensor]":
        """Return the tensors installed last."""
        if self._snapshot is not None:
            return self._snapshot.tensors
        import torch

        return {"weight": torch.zeros(FIRST_WEIGHTS)}

    def digest(self) -> str:
        """Return the digest of the weights as they stand in memory."""
        if self._snapshot is None:
            zeros = memoryview(bytes(4 * FIRST_WEIGHTS))
            return manifest_of(0, [("weight", "float32", (FIRST_WEIGHTS,), zeros)]).digest
        view = self._snapshot.memory.view
        entries = self._snapshot.manifest.tensors
        ends = [each.offset_bytes + each.size_bytes for each in entries]
        pieces = (
            (each.name, each.dtype, each.shape, view[each.offset_bytes : end])
            for each, end in zip(entries, ends, strict=True)
        )
        return manifest_of(self._version, pieces).digest

    def score(self, rows: Sequence[ProbeRow]) -> NDArray[np.float32]:
        """Return zeros: a run with simulated rollouts publishes zero probes."""
        return np.zeros(sum(scored.size for _, scored in rows), dtype=np.float32)


def load_simulated(model: str, role: str, config: RunConfig) -> SimulatedEngine:
    """Make the engine of a role; there is no `model` to load."""
    return SimulatedEngine(role, config.simulated, config.rows_per_job(role))
