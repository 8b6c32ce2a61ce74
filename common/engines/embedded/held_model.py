"""A model of transformers in this process: its weights, and the logprobs of given texts."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from prefixrl.common.engines.interface.base import (
    Job,
    JobQueue,
    TokenIds,
    check_fit,
    digest_of,
    own_checksum,
    positions_of,
    score_rows,
)
from prefixrl.common.errors import DataError, UserError
from prefixrl.common.weights.low_rank import LayerProducts, LowRank, are_low_rank, pairs
from prefixrl.common.weights.snapshot import Snapshot
from prefixrl.common.wire.messages.weights import EngineChecksum
from prefixrl.common.wire.packing import ProbeRow

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "auto": "auto"}


class EmbeddedEngine(JobQueue):
    """A loaded model, its weights, and the logprobs of given texts: all but the decoding."""

    name = "transformers"

    def __init__(
        self,
        model: str,
        device: str,
        dtype: str,
        threads: int,
        head_dtype: str = "model",
        low_rank: LowRank | None = None,
    ) -> None:
        super().__init__()
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
        self._version, self._digest = 0, ""
        text_config = self._model.config.get_text_config()
        is_rotary = getattr(text_config, "rope_parameters", None) is not None
        self._limit = None if is_rotary else positions_of(text_config)
        """Most tokens of a row, at which it ends as if cut: a model with learned positions has no more of them."""

    def _check_room(self, job: Job) -> None:
        """Raise UserError where a row leaves no room for an answer."""
        longest = max((row.size for row in job.rows), default=0)
        if self._limit is not None and longest >= self._limit:
            raise UserError(
                f"a row of {longest} tokens leaves no room in the {self._limit} positions of the model "
                f"(max_position_embeddings): lower max_prompt_tokens, or take a model with more"
            )

    @property
    def most_positions(self) -> int | None:
        """The longest text that the model has positions for; None where it names no limit."""
        limit: int | None = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        return limit

    def _most_tokens(self, job: Job, row: TokenIds) -> int:
        """Return how many tokens a row of a job gets at most."""
        most = job.sampling.max_new_tokens
        return most if self._limit is None else min(most, self._limit - row.size)

    def install(self, snapshot: Snapshot) -> None:
        """Copy every tensor in place; ValueError unless names, shapes and dtypes fit the model."""
        own, tensors = self._parameters(), snapshot.tensors
        if self._products and are_low_rank(tensors):
            self._products.set(pairs(tensors, own), self._device)
        else:
            check_fit(own, tensors)
            with torch.no_grad():
                for name, tensor in tensors.items():
                    own[name].copy_(tensor)
        self._version, self._digest = snapshot.version, snapshot.manifest.digest
        self._forget_cached()

    def _forget_cached(self) -> None:
        """Drop what was computed with the weights of before."""

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

    def digest(self) -> str:
        """Return the digest of the installed weights, as the learner would publish them."""
        return digest_of(self.weights())

    def checksum(self) -> EngineChecksum:
        """Return the digest of the weights, which stand in memory as they are published."""
        return own_checksum(self.digest(), self._digest)


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
