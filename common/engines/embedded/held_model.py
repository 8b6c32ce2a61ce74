"""A model of transformers in this process: weights, open jobs, and the draw of tokens."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefixrl.common.engines.embedded.drawing import draw, masked, truncated
from prefixrl.common.engines.interface.base import (
    AdapterEngine,
    Continuation,
    Job,
    JobResult,
    OpenJob,
    TokenIds,
    Watch,
    check_fit,
    score_rows,
    spans_of,
)
from prefixrl.common.errors import UserError
from prefixrl.common.models.config_file import positions_of
from prefixrl.common.models.loading import Dtype, load_model
from prefixrl.common.weights.low_rank import LayerProducts, LowRank, are_low_rank, pairs
from prefixrl.common.weights.snapshot import Snapshot
from prefixrl.common.wire.messages.groups import Finish, Sampling
from prefixrl.common.wire.packing import Logprobs, ProbeRow

DRAW_CELLS = 2**25
"""Most logits, over rows and vocabulary, of one draw."""


_Kind = tuple[Sampling, frozenset[int]]
"""Settings of a draw and masked tokens; rows of one kind are drawn together."""


@dataclass(eq=False, slots=True)
class OpenRow:
    """A row that has not ended."""

    entry: OpenJob
    kind: _Kind
    index: int
    draws: NDArray[np.float64]
    most_tokens: int
    """Number of tokens that it may have besides its prompt."""
    watch: Watch | None = None
    was_stopped: bool = False
    """True if its watch ends it with its newest token."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @property
    def text(self) -> TokenIds:
        """Its prompt and what is written so far."""
        prompt = self.entry.job.rows[self.index]
        return (
            np.concatenate([prompt, np.asarray(self.tokens, np.int32)]) if self.tokens else prompt
        )

    @property
    def size(self) -> int:
        """Number of tokens of its text."""
        return self.entry.job.rows[self.index].size + len(self.tokens)

    @property
    def has_stopped(self) -> bool:
        """True if its newest token ends a text."""
        return bool(self.tokens) and self.tokens[-1] in self.entry.job.stop_tokens

    @property
    def has_ended(self) -> bool:
        """True if no token follows."""
        return self.has_stopped or self.was_stopped or len(self.tokens) == self.most_tokens

    def add_token(self, token: int, logprob: float, version: int) -> None:
        """Append a token that was drawn."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if self.watch is not None and not self.has_stopped:
            self.was_stopped = self.watch(token)

    def continuation(self) -> Continuation:
        """Return what was written."""
        finish: Finish = "eos" if self.has_stopped or self.was_stopped else "length"
        tokens = np.asarray(self.tokens, np.int32)
        logprobs = np.asarray(self.logprobs, np.float32)
        spans = spans_of(self.versions)
        return Continuation(tokens, logprobs, finish, spans, was_stopped=self.was_stopped)


class EmbeddedEngine(AdapterEngine):
    """A loaded model with its open jobs: all but the order of the forwards."""

    name = "transformers"
    busy_row_s = 0.0

    def __init__(
        self,
        model: str,
        device: str,
        dtype: Dtype,
        threads: int,
        head_dtype: str = "model",
        low_rank: LowRank | None = None,
        seats: int | None = None,
    ) -> None:
        super().__init__()
        self.seats = seats or self.seats
        self._kinds: dict[_Kind, _Kind] = {}
        torch.set_num_threads(threads)
        self._device = torch.device(device)
        self._model = load_model(model, model, dtype)
        torch.nn.Module.to(self._model, self._device).requires_grad_(False)
        if head_dtype == "float32" and self._model.dtype != torch.float32:
            _make_float32_logits(self._model.get_output_embeddings())
        layers = dict(self._model.named_modules()) if low_rank else {}
        self._products = LayerProducts(layers, low_rank.scale) if low_rank else None
        self._version = 0
        limit = positions_of(self._model.config.get_text_config().to_dict())
        self.most_positions = limit or sys.maxsize
        """Most tokens of a row, at which it ends as if cut; none are too many where the model names no limit."""
        self._prepare()

    @property
    def attention(self) -> str:
        """The implementation of the model's attention."""
        return str(self._model.config._attn_implementation)

    def _prepare(self) -> None:
        """Set up what decoding needs beside the loaded model."""

    def submit(self, job: Job) -> None:
        """Queue the rows of a job; each takes a seat when one is free. UserError: one leaves no room for an answer."""
        longest = max((row.size for row in job.rows), default=0)
        if longest >= self.most_positions:
            raise UserError(
                f"a row of {longest} tokens leaves no room in the {self.most_positions} positions of the model "
                f"(max_position_embeddings): lower max_prompt_tokens, or take a model with more"
            )
        # What decides on a draw: everything but the length.
        drawn = (msgspec.structs.replace(job.sampling, max_new_tokens=1), job.masked_tokens)
        kind = self._kinds.setdefault(drawn, drawn)
        entry = self._open[job.key] = OpenJob(job, len(job.rows))
        for index, row in enumerate(job.rows):
            most = min(job.sampling.max_new_tokens, self.most_positions - row.size)
            draws, watch = job.uniforms[index], job.watch(index)
            self._queue.append(OpenRow(entry, kind, index, draws, most, watch=watch))

    def _write(self, rows: Sequence[OpenRow], logits: Tensor, source: Sequence[int]) -> None:
        """Draw the next token of rows, each from its row `source` of logits (texts, vocabulary)."""
        most = max(1, DRAW_CELLS // logits.shape[1])
        for kind in {id(row.kind): row.kind for row in rows}.values():
            places = [place for place, row in enumerate(rows) if row.kind is kind]
            for first in range(0, len(places), most):
                part = places[first : first + most]
                sources = [source[place] for place in part]
                # A copy would hold all logits once more, which are many with a large vocabulary.
                is_whole = sources == list(range(len(logits)))
                self._draw(
                    kind, [rows[place] for place in part], logits if is_whole else logits[sources]
                )
        self.progress += len(rows)
        self.tokens += len(rows)

    def _draw(self, kind: _Kind, rows: Sequence[OpenRow], logits: Tensor) -> None:
        uniforms = np.asarray([row.draws[len(row.tokens)] for row in rows])
        sampling, unwanted = kind
        tokens, logprobs = draw(
            truncated(masked(logits, unwanted), sampling), sampling.temperature, uniforms
        )
        for row, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
            row.add_token(token, logprob, self._version)

    def _results(self, rows: Sequence[OpenRow]) -> list[JobResult]:
        """Record the rows that have ended; return the jobs that ended with them."""
        results: list[JobResult] = []
        for row in rows:
            if row.has_ended:
                results += self._end_row(row.entry, row.index, row.continuation(), time.monotonic())
        if not self._open:
            self._kinds.clear()
        return results

    def install(self, snapshot: Snapshot) -> None:
        """Copy every tensor in place; ValueError unless names, shapes and dtypes fit the model."""
        parameters = self._parameters()
        tensors = snapshot.tensors
        if self._products and are_low_rank(tensors):
            self._products.set(pairs(tensors, parameters), self._device)
        else:
            check_fit(parameters, tensors)
            with torch.no_grad():
                for name, tensor in tensors.items():
                    parameters[name].copy_(tensor)
        self._version = snapshot.version
        self._digest = snapshot.manifest.digest
        self._forget_cached()

    def _forget_cached(self) -> None:
        """Drop what was computed with the earlier weights."""

    def weights(self) -> dict[str, Tensor]:
        """Return the matrices installed last, else the model's own parameters, tied ones once."""
        return (self._products and self._products.tensors()) or self._parameters()

    def _parameters(self) -> dict[str, Tensor]:
        return {name: parameter.data for name, parameter in self._model.named_parameters()}

    def logprobs(self, tokens: TokenIds, temperature: float) -> Logprobs:
        """Return the logprob of every token but the first, shape (tokens - 1,), at a temperature."""
        logprobs: Logprobs = self._logprobs(tokens[None], temperature)[0]
        return logprobs

    @torch.inference_mode()
    def _logprobs(self, texts: NDArray[np.int32], temperature: float = 1.0) -> Logprobs:
        """Return the same of several texts of one length, shape (texts, tokens - 1)."""
        ids = torch.from_numpy(texts.astype(np.int64)).to(self._device)
        logits = self._model(input_ids=ids, use_cache=False).logits[:, :-1].float()
        table = torch.log_softmax(logits.div_(temperature), dim=-1)
        picked: Logprobs = table.gather(2, ids[:, 1:, None])[..., 0].cpu().numpy()
        return picked

    def score(self, rows: Sequence[ProbeRow]) -> Logprobs:
        """Return the logprobs of the scored tokens of a probe, at temperature 1, end to end."""
        return score_rows(self.logprobs, rows)


def _make_float32_logits(layer: torch.nn.Linear) -> None:
    """Let an output layer multiply in float32; its parameters keep name and type."""

    def forward(hidden: Tensor) -> Tensor:
        if hidden.device.type == "cuda":
            flat = torch.mm(hidden.flatten(0, -2), layer.weight.T, out_dtype=torch.float32)
            logits = flat.view(*hidden.shape[:-1], -1)
        else:
            logits = hidden.float() @ layer.weight.float().T
        return logits if layer.bias is None else logits + layer.bias

    layer.forward = forward  # type: ignore[method-assign, assignment]
