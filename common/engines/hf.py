"""The embedded engine: transformers, one job at a time, one decoding step per `step`.

Rows of a job are one padded forward (padding on the left), so a row's text depends on its job alone. Tokens are drawn
by inverting the cumulative distribution at the job's own uniforms: no generator state, nothing a model's
generation_config could change. Bitwise repeatable in fp32 with one thread on one CPU type, unless weights are installed
in the middle of a job.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, DynamicCache

from prefixrl.common.engines.base import (
    Continuation,
    Job,
    JobQueue,
    JobResult,
    TokenIds,
    check_fit,
    own_checksum,
    score_rows,
    spans_of,
)
from prefixrl.common.errors import DataError
from prefixrl.common.weights.low_rank import LayerProducts, LowRank, is_low_rank, pairs
from prefixrl.common.weights.snapshot import Snapshot
from prefixrl.common.wire.messages import EngineChecksum, Finish, Sampling
from prefixrl.common.wire.packing import ProbeRow

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "auto": "auto"}


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
    started_s: float


class TransformersEngine(JobQueue):
    """Embedded engine. Its seats are the rows of a usual job; a second one waits behind it."""

    name = "transformers"

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
        super().__init__()
        self.room = self.seats = seats
        self.busy_row_s = 0.0
        torch.set_num_threads(threads)
        self._device = torch.device(device)
        try:
            self._model = AutoModelForCausalLM.from_pretrained(model, dtype=_DTYPES[dtype], use_safetensors=True)
        except (OSError, ValueError) as error:
            raise DataError(f"{model} is no model transformers can load from safetensors: {error}") from error
        torch.nn.Module.to(self._model, self._device)
        self._model.eval().requires_grad_(False)
        if head_dtype == "float32" and self._model.dtype != torch.float32:
            _make_float32_logits(self._model.get_output_embeddings())
        layers = dict(self._model.named_modules()) if low_rank else {}
        self._products = LayerProducts(layers, low_rank.scale) if low_rank else None
        self._running: _Running | None = None
        self._version, self._digest = 0, ""

    @property
    def most_positions(self) -> int | None:
        """The longest text that the model has positions for; None where it names no limit."""
        limit: int | None = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        return limit

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
        if running.alive.any() and len(running.tokens) < running.job.sampling.max_new_tokens:
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
            started_s=time.monotonic(),
        )

    def _decode(self, running: _Running) -> None:
        positions = (running.attention.cumsum(-1) - 1).clamp(min=0)
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
        fed = torch.from_numpy(chosen.astype(np.int64)).to(self._device).unsqueeze(1)
        running.fed = torch.cat([running.fed, fed], dim=1)
        running.attention = torch.cat([running.attention, running.attention.new_ones(len(chosen), 1)], dim=1)

    def install(self, snapshot: Snapshot) -> None:
        """Copy every tensor in place; ValueError unless names, shapes and dtypes fit the model."""
        own, tensors = self._parameters(), snapshot.tensors
        if self._products and is_low_rank(tensors):
            self._products.set(pairs(tensors, own), self._device)
        else:
            check_fit(own, tensors)
            with torch.no_grad():
                for name, tensor in tensors.items():
                    own[name].copy_(tensor)
        self._version, self._digest = snapshot.version, snapshot.manifest.digest
        if self._running is not None:  # its next step is one forward over all its tokens so far
            self._running.cache, self._running.cached = DynamicCache(config=self._model.config), 0

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the matrices installed last, else the model's own parameters, tied ones once."""
        return (self._products and self._products.tensors()) or self._parameters()

    def _parameters(self) -> dict[str, torch.Tensor]:
        return {name: parameter.data for name, parameter in self._model.named_parameters()}

    @torch.inference_mode()
    def logprobs(self, tokens: TokenIds, temperature: float) -> NDArray[np.float32]:
        """Return the logprob of every token but the first, shape (tokens - 1,), at a temperature."""
        ids = torch.from_numpy(tokens.astype(np.int64)).to(self._device).unsqueeze(0)
        logits = self._model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        table = torch.log_softmax(logits / temperature, dim=-1)
        picked: NDArray[np.float32] = table.gather(1, ids[0, 1:, None])[:, 0].cpu().numpy()
        return picked

    def score(self, rows: Sequence[ProbeRow]) -> NDArray[np.float32]:
        """Return the logprobs of the scored tokens of a probe, at temperature 1, end to end."""
        return score_rows(self.logprobs, rows)

    def checksum(self) -> EngineChecksum:
        """Return the digest of the weights, which stand in memory as they are published."""
        return own_checksum(self.weights(), self._digest)


def _make_float32_logits(layer: torch.nn.Linear) -> None:
    """Let an output layer multiply in float32; its parameters keep name and type."""

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        if hidden.device.type == "cuda":
            flat = torch.mm(hidden.flatten(0, -2), layer.weight.T, out_dtype=torch.float32)
            logits = flat.view(*hidden.shape[:-1], -1)
        else:
            logits = hidden.float() @ layer.weight.float().T
        return logits if layer.bias is None else logits + layer.bias

    layer.forward = forward  # type: ignore[method-assign, assignment]


def masked(logits: torch.Tensor, tokens: frozenset[int]) -> torch.Tensor:
    """Return logits (rows, vocabulary), -inf at the given tokens."""
    if not tokens:
        return logits
    return logits.index_fill(-1, torch.tensor(sorted(tokens), device=logits.device), -math.inf)


def truncated(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Return logits (rows, vocabulary) of the tokens that may be drawn, -inf elsewhere."""
    # The order is vLLM's: at the temperature, first min_p, then top_k, then top_p.
    is_whole = sampling.top_k == 0 and sampling.top_p == 1.0 and sampling.min_p == 0.0
    if is_whole or sampling.temperature == 0.0:
        return logits
    kept = logits.float() / sampling.temperature
    least = kept.max(dim=-1, keepdim=True).values + math.log(max(sampling.min_p, 1e-300))
    kept = kept.masked_fill(kept < least, -math.inf)
    if 0 < sampling.top_k < kept.shape[-1]:
        smallest = kept.topk(sampling.top_k, dim=-1).values[:, -1:]
        kept = kept.masked_fill(kept < smallest, -math.inf)
    if sampling.top_p < 1.0:
        ordered, order = kept.sort(dim=-1, descending=True)
        before = ordered.softmax(dim=-1).cumsum(dim=-1) - ordered.softmax(dim=-1)
        ordered = ordered.masked_fill(before >= sampling.top_p, -math.inf)
        kept = torch.empty_like(kept).scatter_(-1, order, ordered)
    return kept * sampling.temperature


def draw(
    logits: torch.Tensor, temperature: float, uniforms: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Draw a token per row by inverting the cumulative distribution; greedy at temperature 0.

    `logits` are (rows, vocabulary), `uniforms` (rows,) draws in [0, 1). Returned are the tokens (rows,) and their
    logprobs (rows,) under the distribution drawn from (at temperature 1 when greedy).
    """
    table = torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)
    if temperature == 0.0:
        chosen = table.argmax(dim=-1)
    else:
        cumulative = table.double().exp().cumsum(dim=-1)
        points = torch.from_numpy(uniforms).to(cumulative.device).unsqueeze(1) * cumulative[:, -1:]
        chosen = torch.searchsorted(cumulative, points, right=True)[:, 0].clamp(max=table.shape[1] - 1)
    picked = table.gather(1, chosen.unsqueeze(1))[:, 0]
    return chosen.cpu().numpy(), picked.clamp(max=0.0).cpu().numpy()


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
