"""The draw of tokens: the cumulative distribution, inverted at given uniforms, without any state. Pure."""

import math
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefixrl.common.wire.messages.groups import Sampling


def masked(logits: Tensor, tokens: frozenset[int]) -> Tensor:
    """Return logits (rows, vocabulary), -inf at the given tokens."""
    return logits.index_fill(-1, _index(tokens, logits.device), -math.inf) if tokens else logits


@lru_cache(maxsize=8)
def _index(tokens: frozenset[int], device: torch.device) -> Tensor:
    return torch.tensor(sorted(tokens), device=device)


def truncated(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return logits (rows, vocabulary) of the tokens that may be drawn, -inf elsewhere."""
    # The order is vLLM's: at the temperature, first min_p, then top_k, then top_p.
    is_whole = sampling.top_k == 0 and sampling.top_p == 1.0 and sampling.min_p == 0.0
    if is_whole or sampling.temperature == 0.0:
        return logits
    scaled = logits.float() / sampling.temperature
    least = scaled.max(dim=-1, keepdim=True).values + math.log(max(sampling.min_p, 1e-300))
    scaled = scaled.masked_fill(scaled < least, -math.inf)
    if 0 < sampling.top_k < scaled.shape[-1]:
        smallest = scaled.topk(sampling.top_k, dim=-1).values[:, -1:]
        scaled = scaled.masked_fill(scaled < smallest, -math.inf)
    if sampling.top_p < 1.0:
        ordered, order = scaled.sort(dim=-1, descending=True)
        shares = ordered.softmax(dim=-1)
        before = shares.cumsum(dim=-1) - shares
        ordered = ordered.masked_fill(before >= sampling.top_p, -math.inf)
        scaled = torch.empty_like(scaled).scatter_(-1, order, ordered)
    return scaled * sampling.temperature


def draw(
    logits: Tensor, temperature: float, uniforms: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Draw a token per row of logits (rows, vocabulary) at `uniforms`; return both arrays."""
    table = torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)
    if temperature == 0.0:
        chosen = table.argmax(dim=-1)
    else:
        cumulative = table.exp().cumsum(dim=-1, dtype=torch.float64)
        points = torch.from_numpy(uniforms).to(cumulative.device).unsqueeze(1) * cumulative[:, -1:]
        chosen = torch.searchsorted(cumulative, points, right=True)[:, 0].clamp(
            max=table.shape[1] - 1
        )
    picked = table.gather(1, chosen.unsqueeze(1))[:, 0]
    return chosen.cpu().numpy(), picked.clamp(max=0.0).cpu().numpy()
