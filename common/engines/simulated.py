"""An engine without a model: declared latencies, made-up tokens; never evidence of training."""

import heapq
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from prefixrl.common.config.worker_sections import SimulatedConfig
from prefixrl.common.engines.base import (
    Continuation,
    Job,
    JobQueue,
    JobResult,
    TokenIds,
    own_checksum,
    score_rows,
    spans_of,
)
from prefixrl.common.weights.snapshot import Snapshot
from prefixrl.common.wire.messages import EngineChecksum
from prefixrl.common.wire.packing import ProbeRow

SLOTS = 4


@dataclass(order=True)
class _Running:
    ends_s: float
    key: str
    lasts_s: float = field(compare=False)
    job: Job = field(compare=False)
    versions: NDArray[np.int32] = field(compare=False)
    """Version of each token; those not written yet are of the newest."""


class SimulatedEngine(JobQueue):
    """Engine whose jobs finish after the declared time, in parallel up to `slots`.

    A scorer's jobs return their script. A rollout's are written token by token, evenly over that time, and every
    token is the version of the weights that wrote it.
    """

    name = "simulated"
    slots = SLOTS

    def __init__(self, role: str, config: SimulatedConfig) -> None:
        super().__init__()
        self._role, self._version, self._digest = role, 0, ""
        self._mean_s = config.prefix_s if role == "rollout" else config.completion_s
        self._sigma = config.completion_sigma if role == "scorer" else 0.0
        self._running: list[_Running] = []
        self._weights = {"weight": torch.zeros(4)}

    def submit(self, job: Job) -> None:
        """Queue a job; it starts when a slot is free."""
        super().submit(job)
        self._start()

    def _start(self) -> None:
        while self._waiting and len(self._running) < self.slots:
            job = self._waiting.popleft()
            # The job's own first draw decides its time, so a redelivered job takes as long again.
            normal = float(np.sqrt(2) * _erfinv(2 * float(job.uniforms.flat[0]) - 1)) if self._sigma else 0.0
            lasts_s = self._mean_s * float(np.exp(self._sigma * normal))
            versions = np.full(job.sampling.max_new_tokens, self._version, dtype=np.int32)
            ends_s = time.monotonic() + lasts_s
            heapq.heappush(self._running, _Running(ends_s, job.key, lasts_s, job, versions))

    def step(self, timeout_s: float) -> list[JobResult]:
        """Wait for the next job to finish, at most `timeout_s`."""
        if not self._running:
            return []
        wait_s = min(timeout_s, self._running[0].ends_s - time.monotonic())
        if wait_s > 0:
            time.sleep(wait_s)
        self.progress += 1
        results = []
        while self._running and self._running[0].ends_s <= time.monotonic():
            done = heapq.heappop(self._running)
            self.busy_slot_s += done.lasts_s
            results.append(JobResult(done.job.key, self._rows(done), done.lasts_s))
        self._start()
        return results

    def _rows(self, done: _Running) -> tuple[Continuation, ...]:
        if self._role == "rollout":
            texts, spans = [done.versions] * len(done.job.rows), spans_of(done.versions.tolist())
        else:
            assert done.job.script is not None, "a simulated target returns the script of its job"
            texts, spans = list(done.job.script), ()
        return tuple(Continuation(text, np.full(text.size, -1.0, dtype=np.float32), "eos", spans) for text in texts)

    def install(self, snapshot: Snapshot) -> None:
        """Keep the tensors; running jobs write the rest of their tokens with the new version."""
        self._weights, self._version, self._digest = snapshot.tensors, snapshot.version, snapshot.manifest.digest
        now_s = time.monotonic()
        for running in self._running:
            left = max(0.0, running.ends_s - now_s) / max(running.lasts_s, 1e-9)
            total = running.versions.size
            running.versions[total - round(left * total) :] = self._version

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the tensors installed last."""
        return self._weights

    def logprobs(self, tokens: TokenIds, temperature: float) -> NDArray[np.float32]:
        """Return zeros: a run with simulated rollouts publishes zero probes."""
        return np.zeros(len(tokens) - 1, dtype=np.float32)

    def score(self, rows: Sequence[ProbeRow]) -> NDArray[np.float32]:
        """Return the logprobs of the scored tokens of a probe, at temperature 1, end to end."""
        return score_rows(self.logprobs, rows)

    def checksum(self) -> EngineChecksum:
        """Return the digest of the weights, which stand in memory as they are published."""
        return own_checksum(self.weights(), self._digest)


def _erfinv(value: float) -> float:
    return float(torch.erfinv(torch.tensor(min(max(value, -0.999999), 0.999999), dtype=torch.float64)))
