"""The embedded engine with `bitwise`: one job at a time, one decoding step per `step`.

Rows of a job are one padded forward (padding on the left), so a row's text depends on its job alone. Tokens are drawn
by inverting the cumulative distribution at the job's own uniforms. Bitwise repeatable in fp32 with one thread on one
CPU type, unless weights are installed in the middle of a job.
"""

import time
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from prefixrl.common.engines.embedded.drawing import draw, masked, truncated
from prefixrl.common.engines.embedded.held_model import EmbeddedEngine
from prefixrl.common.engines.interface.base import Continuation, Job, JobResult, spans_of
from prefixrl.common.weights.low_rank import LowRank
from prefixrl.common.wire.messages.groups import Finish

FIXED = "a task's rows are one forward: {}"


@dataclass
class _Running:
    job: Job
    cache: DynamicCache
    attention: torch.Tensor
    """Mask (rows, tokens so far), 1 for a real token."""
    fed: torch.Tensor
    """Token ids (rows, tokens so far)."""
    cached: int
    """Number of these columns that the cache holds."""
    tokens: list[NDArray[np.int32]]
    logprobs: list[NDArray[np.float32]]
    versions: list[int]
    """Version of each decoding step."""
    alive: NDArray[np.bool_]
    most_tokens: NDArray[np.int64]
    """Most tokens of each row besides its prompt."""
    started_s: float


class FixedRowsEngine(EmbeddedEngine):
    """Embedded engine. Its seats are the rows of a usual job; a second one waits behind it."""

    def __init__(
        self,
        model: str,
        device: str,
        dtype: str,
        threads: int,
        head_dtype: str = "model",
        low_rank: LowRank | None = None,
        seats: int = 1,
    ) -> None:
        super().__init__(model, device, dtype, threads, head_dtype, low_rank)
        self.room = self.seats = seats
        self.about = FIXED.format("bitwise")
        self._running: _Running | None = None

    def submit(self, job: Job) -> None:
        """Queue a job. UserError: a row is too long."""
        self._check_room(job)
        super().submit(job)

    @torch.inference_mode()
    def step(self, timeout_s: float) -> list[JobResult]:
        """Do one decoding step of the oldest job; there is nothing to wait `timeout_s` for."""
        if self._running is None and not self._waiting:
            return []
        started_s = time.monotonic()
        running = self._running = self._running or self._start(self._waiting.popleft())
        rows = int(running.alive.sum())
        self._decode(running)
        self.busy_row_s += rows * (time.monotonic() - started_s)
        if running.alive.any():
            return []
        self._running = None
        return [_result(running)]

    def rows_left(self, key: str) -> int:
        """Return how many rows of a job have not ended; 0 for an unknown one."""
        running = self._running
        return int(running.alive.sum()) if running and running.job.key == key else super().rows_left(key)

    def _start(self, job: Job) -> _Running:
        longest = max(row.size for row in job.rows)
        ids = np.zeros((len(job.rows), longest), dtype=np.int64)
        attention = np.zeros_like(ids)
        for index, row in enumerate(job.rows):
            ids[index, longest - row.size :] = row
            attention[index, longest - row.size :] = 1
        return _Running(
            job=job,
            cache=DynamicCache(config=self._model.config),
            attention=torch.from_numpy(attention).to(self._device),
            fed=torch.from_numpy(ids).to(self._device),
            cached=0,
            tokens=[],
            logprobs=[],
            versions=[],
            alive=np.ones(len(job.rows), dtype=bool),
            most_tokens=np.array([self._most_tokens(job, row) for row in job.rows]),
            started_s=time.monotonic(),
        )

    def _decode(self, running: _Running) -> None:
        # Rows that have ended are fed on: a model with learned positions has none for them beyond its limit.
        positions = (running.attention.cumsum(-1) - 1).clamp(min=0, max=self._limit and self._limit - 1)
        output = self._model(
            input_ids=running.fed[:, running.cached :],
            attention_mask=running.attention,
            position_ids=positions[:, running.cached :],
            past_key_values=running.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        running.cached = running.fed.shape[1]
        job, step = running.job, len(running.tokens)
        logits = truncated(masked(output.logits[:, -1], job.masked_tokens), job.sampling)
        chosen, logprobs = draw(logits, job.sampling.temperature, job.uniforms[:, step])
        running.tokens.append(np.where(running.alive, chosen, -1).astype(np.int32))
        running.logprobs.append(logprobs)
        running.versions.append(self._version)
        self.progress += int(running.alive.sum())
        self.tokens += int(running.alive.sum())
        running.alive &= ~np.isin(chosen, list(running.job.stop_tokens))
        running.alive &= len(running.tokens) < running.most_tokens
        fed = torch.from_numpy(chosen.astype(np.int64)).to(self._device).unsqueeze(1)
        running.fed = torch.cat([running.fed, fed], dim=1)
        running.attention = torch.cat([running.attention, running.attention.new_ones(len(chosen), 1)], dim=1)

    def _forget_cached(self) -> None:
        if self._running is not None:  # its next step is one forward over all its tokens so far
            self._running.cache, self._running.cached = DynamicCache(config=self._model.config), 0


def _result(running: _Running) -> JobResult:
    tokens, logprobs = np.stack(running.tokens, axis=1), np.stack(running.logprobs, axis=1)
    rows: list[Continuation] = []
    for row_tokens, row_logprobs in zip(tokens, logprobs, strict=True):
        length = int((row_tokens >= 0).sum())
        kept = row_tokens[:length].astype(np.int32)
        finish: Finish = "eos" if len(kept) and int(kept[-1]) in running.job.stop_tokens else "length"
        spans = spans_of(running.versions[:length])
        rows.append(Continuation(kept, row_logprobs[:length].astype(np.float32), finish, spans))
    return JobResult(running.job.key, tuple(rows), time.monotonic() - running.started_s)
