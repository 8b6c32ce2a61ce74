"""The embedded engine: transformers, rows batched continuously.

    submit ──▶ rows wait ──▶ prefill: their texts ──▶ seated ──▶ one token per step ──▶ ended ──▶ result of their job
                                 ▲ what the rows of a job share, once │
                                 └──── weights installed in between ◀─┘

A row that has ended leaves the forward, and one that waits takes its seat. Rows that have the same text are one row of
the forward until their tokens differ. Tokens are drawn at the row's own uniforms, so what runs beside a row changes its
draws only by the rounding of its logits; where texts must be equal bit by bit, `bitwise` takes `fixed_rows.py`.
"""

import time
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from prefixrl.common.engines.embedded import cached_attention
from prefixrl.common.engines.embedded.held_model import DRAW_CELLS, EmbeddedEngine, OpenRow
from prefixrl.common.engines.embedded.prefill import prefill
from prefixrl.common.engines.embedded.row_cache import RowCache
from prefixrl.common.engines.interface.base import JobResult, Logprobs, room_of
from prefixrl.common.wire.packing import ProbeRow

JOIN_SHARE = 1 / 4
JOIN_STEPS = 4
"""Rows join when they are at least this share of the seated rows, or after this many steps of
waiting: a join is a forward of its own, with the fixed costs of a step."""
PREFILL_TOKENS = 8192
"""Most tokens, padding included, of rows that join in one step: a forward's memory grows with them."""
LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Kinds of rotary positions whose frequencies follow from the longest row of a forward."""
PLAIN = {"llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3"}
"""Types of models whose layers know of positions only by `position_ids`, and only hand a mask on."""


class TransformersEngine(EmbeddedEngine):
    """Embedded engine whose rows take a seat as soon as one is free."""

    takes_runs = False
    seats = 128

    def _prepare(self) -> None:
        self.room = room_of(self.seats)
        self.about = f"rows batched continuously, {self.seats} at once"
        self._uncached = deque[OpenRow]()
        """Rows in a seat whose keys and values must be computed again."""
        self._texts: list[list[OpenRow]] = []
        """Seated rows by text. Each text is one row of the cache, in the same order."""
        self._steps_waited = 0
        """Steps for which rows have waited to join, though there were seats."""
        self._cache = RowCache(self.seats)
        config = self._model.config
        self._is_plain = config.model_type in PLAIN and set(_layers(config)) == {DynamicLayer}
        self._takes_masks = self._is_plain and config._attn_implementation == "sdpa"
        if self._takes_masks and self._device.type == "cpu":
            cached_attention.use_in(self._model)

    def score(self, rows: Sequence[ProbeRow]) -> Logprobs:
        """Return the logprobs of the scored tokens of a probe, at temperature 1, end to end."""
        if not self._is_plain:
            return super().score(rows)  # padding behind a row may change it
        texts = [np.concatenate(row) for row in rows]
        scored = list[Logprobs]()
        width = max((text.size for text in texts), default=1)
        size = max(1, DRAW_CELLS // (width * self._model.config.vocab_size))
        for first in range(0, len(rows), size):
            part = texts[first : first + size]
            padded = np.stack([np.pad(text, (0, width - text.size)) for text in part])
            logprobs = self._logprobs(padded)
            for row, text, text_logprobs in zip(
                rows[first : first + size], part, logprobs, strict=True
            ):
                scored.append(text_logprobs[max(0, row[0].size - 1) : text.size - 1])
        return np.concatenate(scored) if scored else np.zeros(0, dtype=np.float32)

    @property
    def _seated(self) -> list[OpenRow]:
        return [row for rows in self._texts for row in rows]

    @torch.inference_mode()
    def step(self, timeout_s: float) -> list[JobResult]:
        """Give every seated row its next token and new rows their first; wait for nothing."""
        results = self._decode() if self._texts else []
        if joining := self._joining():
            results += self._join(joining)
        return results

    def _decode(self) -> list[JobResult]:
        started_s = time.monotonic()
        texts = self._texts
        rows = self._seated
        mask = self._cache.begin_step()
        output = self._model(
            input_ids=torch.tensor(
                [[first.tokens[-1]] for first, *_ in texts], device=self._device
            ),
            attention_mask=mask[:, None, None] if self._takes_masks else mask,
            position_ids=torch.tensor(
                [[first.size - 1] for first, *_ in texts], device=self._device
            ),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self._cache.end_step()
        self._write(
            rows, output.logits[:, -1], [place for place, text in enumerate(texts) for _ in text]
        )
        self.busy_row_s += len(rows) * (time.monotonic() - started_s)
        # Rows of one text part where they drew other tokens: the first keeps its place.
        parted = [_parts(text) for text in texts]
        texts[:] = [parts[0] if parts else [] for parts in parted]
        self._cache.fork([place for place, parts in enumerate(parted) for _ in parts[1:]])
        texts += [part for parts in parted for part in parts[1:]]
        empty = [place for place, text in enumerate(texts) if not text]
        # The cache moves its last rows into the places that are free; the texts follow.
        for into, place in self._cache.leave(empty):
            texts[into] = texts[place]
        del texts[len(texts) - len(empty) :]
        return self._results(rows)

    def _joining(self) -> list[OpenRow]:
        seated = sum(map(len, self._texts))
        ready = len(self._uncached) + min(
            self.seats - seated - len(self._uncached), len(self._queue)
        )
        self._steps_waited += 1 if ready else 0
        # A prefill holds up all seated rows: it waits for enough rows, but only for some steps.
        is_worth_it = ready >= JOIN_SHARE * seated or self._steps_waited > JOIN_STEPS
        if not ready or not (is_worth_it or self._uncached):
            return []
        self._steps_waited = 0
        joining: list[OpenRow] = []
        texts = set[bytes]()
        longest = 0
        while len(joining) < ready:
            # Rows that lost their keys and values by an installation come first: they have begun.
            queue = self._uncached or self._queue
            text = queue[0].text
            # Equal texts are one row of the forward, so only different ones count.
            texts.add(text.tobytes())
            longest = max(longest, text.size)
            if joining and longest * len(texts) > PREFILL_TOKENS:
                break
            joining.append(queue.popleft())
        return joining

    def _join(self, rows: list[OpenRow]) -> list[JobResult]:
        """Compute the texts of rows, draw their next tokens, and seat the rows that have not ended."""
        started_s = time.monotonic()
        for row in rows:
            row.entry.started_s = row.entry.started_s or started_s
        prefilled = prefill(
            self._model,
            [row.text for row in rows],
            [row.entry.job.key for row in rows],
            self._is_plain,
        )
        self._write(rows, prefilled.logits, prefilled.source)
        texts: list[list[OpenRow]] = [[] for _ in range(len(prefilled.logits))]
        for row, source in zip(rows, prefilled.source, strict=True):
            texts[source].append(row)
        parted = [(source, part) for source, text in enumerate(texts) for part in _parts(text)]
        if parted:
            self._cache.join(prefilled.layers, prefilled.mask, [source for source, _ in parted])
        self.busy_row_s += (len(self._seated) + len(rows)) * (time.monotonic() - started_s)
        self._texts += [part for _, part in parted]
        return self._results(rows)

    def _forget_cached(self) -> None:
        self._uncached.extendleft(reversed(self._seated))
        self._texts = []
        self._cache.clear()


def _parts(rows: Sequence[OpenRow]) -> list[list[OpenRow]]:
    """Return the open rows of one text, grouped by their newest tokens."""
    by_token: dict[int, list[OpenRow]] = {}
    for row in rows:
        if not row.has_ended:
            by_token.setdefault(row.tokens[-1], []).append(row)
    return list(by_token.values())


def objection(model: str) -> str:
    """Return why the rows of a model cannot be batched continuously, "" if they can."""
    try:
        config = AutoConfig.from_pretrained(model)
    except (OSError, ValueError):
        return ""  # the engine that loads it says what is wrong
    text = config.get_text_config(decoder=True)
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if getattr(model_class, "_is_stateful", False) or not set(_layers(config)) <= {
        DynamicLayer,
        DynamicSlidingWindowLayer,
    }:
        return f"{config.model_type}: it keeps more of a text than keys and values"
    # Of a model with several kinds the parameters are by kind of layer.
    kind = (getattr(text, "rope_parameters", None) or {}).get("rope_type")
    if kind in LENGTH_DEPENDENT:
        return f"{config.model_type}: with {kind} positions a row would depend on the longest one beside it"
    if getattr(text, "attention_chunk_size", None) or getattr(text, "num_kv_shared_layers", None):
        return f"{config.model_type}: its layers have chunks or keys in common"
    return ""


def _layers(config: PreTrainedConfig) -> list[type]:
    return [type(layer) for layer in DynamicCache(config=config).layers]
