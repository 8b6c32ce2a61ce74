"""The embedded engine with `bitwise`: one job at a time, whose rows are one padded forward per `step`.

A row's text depends on its job alone: bitwise repeatable in fp32 with one thread on one CPU type, unless weights are
installed in the middle of a job.
"""

import time
from dataclasses import dataclass

import torch
from transformers import DynamicCache

from prefixrl.common.engines.embedded.held_model import EmbeddedEngine, OpenRow
from prefixrl.common.engines.embedded.prefill import padded
from prefixrl.common.engines.interface.base import JobResult

FIXED = "a task's rows are one forward: {}"


@dataclass
class _Running:
    rows: list[OpenRow]
    cache: DynamicCache
    fed: torch.Tensor
    """Token ids (rows, tokens so far)."""
    attention: torch.Tensor
    """Mask (rows, tokens so far), True for a real token."""
    cached: int = 0
    """Number of these columns that the cache holds."""


class FixedRowsEngine(EmbeddedEngine):
    """Embedded engine. Its seats are the rows of a usual job; a second one waits behind it."""

    def _prepare(self) -> None:
        self.room = self.seats
        self.about = FIXED.format("bitwise")
        self._running: _Running | None = None

    @torch.inference_mode()
    def step(self, timeout_s: float) -> list[JobResult]:
        """Do one decoding step of the oldest job; there is nothing to wait `timeout_s` for."""
        if self._running is None and not self._queue:
            return []
        started_s = time.monotonic()
        running = self._running = self._running or self._start()
        alive = [row for row in running.rows if not row.has_ended]
        self._decode(running, alive)
        self.busy_row_s += len(alive) * (time.monotonic() - started_s)
        results = self._results(alive)
        if results:
            self._running = None
        return results

    def _start(self) -> _Running:
        entry = self._queue[0].entry
        rows = [self._queue.popleft() for _ in entry.job.rows]
        entry.started_s = time.monotonic()
        cache = DynamicCache(config=self._model.config)
        return _Running(rows, cache, *padded(entry.job.rows, self._device))

    def _decode(self, running: _Running, alive: list[OpenRow]) -> None:
        # Rows that have ended are fed on: a model with learned positions has none for them beyond its limit.
        positions = (running.attention.cumsum(-1) - 1).clamp(min=0, max=self.most_positions - 1)
        output = self._model(
            input_ids=running.fed[:, running.cached :],
            attention_mask=running.attention.long(),
            position_ids=positions[:, running.cached :],
            past_key_values=running.cache,
            use_cache=True,
            logits_to_keep=torch.tensor(
                [-1], device=self._device
            ),  # an index: see prefill._forward
        )
        running.cached = running.fed.shape[1]
        self._write(alive, output.logits[:, -1], [row.index for row in alive])
        newest = torch.tensor([[row.tokens[-1]] for row in running.rows], device=self._device)
        running.fed = torch.cat([running.fed, newest], dim=1)
        running.attention = torch.cat(
            [running.attention, torch.ones_like(newest, dtype=torch.bool)], dim=1
        )

    def _forget_cached(self) -> None:
        if self._running is not None:  # its next step is one forward over all its tokens so far
            self._running.cache = DynamicCache(config=self._model.config)
            self._running.cached = 0
