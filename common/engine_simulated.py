"""An engine without a model: declared latencies, scripted tokens. For load, chaos and sizing; never evidence of training."""

import heapq
import time

import numpy as np
import torch
from numpy.typing import NDArray

from prefixrl.common.engine import Finished, Job, JobResult, TokenIds
from prefixrl.common.worker_sections import SimulatedConfig

SLOTS = 4


class SimulatedEngine:
    """Jobs finish after the declared time, in parallel up to `slots`, and say what their script says."""

    name = "simulated"
    slots = SLOTS

    def __init__(self, role: str, config: SimulatedConfig) -> None:
        self._mean_s = config.prefix_s if role == "rollout" else config.completion_s
        self._sigma = config.completion_sigma if role == "scorer" else 0.0
        self._queue: list[Job] = []
        self._running: list[tuple[float, str, float, Job]] = []
        self._weights = {"weight": torch.zeros(4)}
        self.progress = 0
        self.busy_slot_s = 0.0

    def submit(self, job: Job) -> None:
        """Queue a job; it starts when a slot is free."""
        self._queue.append(job)
        self._start()

    def _start(self) -> None:
        while self._queue and len(self._running) < self.slots:
            job = self._queue.pop(0)
            # The job's own first draw decides its time, so a redelivered job takes as long again.
            normal = (
                float(np.sqrt(2) * _erfinv(2 * float(job.uniforms.flat[0]) - 1))
                if self._sigma
                else 0.0
            )
            lasts_s = self._mean_s * float(np.exp(self._sigma * normal))
            heapq.heappush(self._running, (time.monotonic() + lasts_s, job.key, lasts_s, job))

    def cancel(self, key: str) -> bool:
        """Drop a queued job; False when it runs or is unknown."""
        before = len(self._queue)
        self._queue = [job for job in self._queue if job.key != key]
        return len(self._queue) < before

    def step(self, timeout_s: float) -> list[JobResult]:
        """Wait for the next job to finish, at most `timeout_s`."""
        if not self._running:
            return []
        wait_s = min(timeout_s, self._running[0][0] - time.monotonic())
        if wait_s > 0:
            time.sleep(wait_s)
        self.progress += 1
        results = []
        while self._running and self._running[0][0] <= time.monotonic():
            _, _, lasts_s, job = heapq.heappop(self._running)
            self.busy_slot_s += lasts_s
            assert job.script is not None, "simulated engines say what their job scripts"
            rows = tuple(
                Finished(row, np.full(row.size, -1.0, dtype=np.float32), "eos")
                for row in job.script
            )
            results.append(JobResult(job.key, rows, lasts_s))
        self._start()
        return results

    def install(self, tensors: dict[str, torch.Tensor]) -> None:
        """Keep the tensors: there is no model to put them in."""
        self._weights = tensors

    def weights(self) -> dict[str, torch.Tensor]:
        """What was installed last."""
        return self._weights

    def logprobs(self, tokens: TokenIds, temperature: float) -> NDArray[np.float32]:
        """Zeros: a run with simulated rollouts publishes zero probes."""
        return np.zeros(len(tokens) - 1, dtype=np.float32)


def _erfinv(value: float) -> float:
    return float(
        torch.erfinv(torch.tensor(min(max(value, -0.999999), 0.999999), dtype=torch.float64))
    )
