"""Ratios of the three policies: granularity, clamp, masks and bounds. Pure.

Behaviour mu is the engine that sampled, proximal p the learner at the start of the batch, theta the current policy. All
tensors are (rows, tokens); `mask` is True where a sampled token counts.

A ratio stands at every token of its row: each token's own, or one for the whole prefix. So the losses are written once.
"""

import math
from typing import Literal

import torch
from torch import Tensor

Ratio = Literal["token", "prefix", "prefix_mean"]
Band = tuple[float, float]

LOG_RATIO_LIMIT = 20.0
"""Log ratios are clamped to +- this, in nats, before any exp: e^89 is infinite in float32."""


def masked(mask: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Set values outside the mask to 0 before any exp: padding may be inf, inf x 0 is NaN."""
    return tuple(torch.where(mask, tensor, 0.0) for tensor in tensors)


def units(mask: Tensor, ratio: Ratio) -> Tensor:
    """Mark a position per ratio: every counted token, or each row's first; (rows, tokens)."""
    return mask if ratio == "token" else mask & (mask.cumsum(dim=1) == 1)


def log_ratios(above: Tensor, below: Tensor, mask: Tensor, ratio: Ratio) -> Tensor:
    """Return log(above/below) of each token's ratio, clamped; 0 outside the mask.

    "prefix": the ratio of the prefix's probabilities. "prefix_mean": its geometric mean per token, exp(mean of logs),
    as in GSPO (Zheng et al. 2025, eq. 7). Beyond the clamp there is no gradient.
    """
    logs = torch.where(mask, above - below, 0.0)
    if ratio != "token":
        per_row = logs.sum(dim=1, keepdim=True)
        if ratio == "prefix_mean":
            per_row = per_row / mask.sum(dim=1, keepdim=True).clamp(min=1)
        logs = torch.where(mask, per_row, 0.0)
    return logs.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def interpolated(logprobs: Tensor, behaviour: Tensor, ages: Tensor) -> Tensor:
    """Approximate the proximal logprobs without a forward.

    A-3PO (Li et al. 2025, arXiv 2512.06547): log p = log mu + (log theta - log mu) a / (a + 1) at age a, since p is one
    version behind theta, and mu is a + 1 behind.

    Args:
        ages: versions between p and mu, per token.
    """
    share = ages.to(behaviour.dtype) / (ages + 1)
    return behaviour + share * (logprobs.detach() - behaviour)


def kept_tokens(
    proximal: Tensor, behaviour: Tensor, mask: Tensor, token_band: Band | None, sequence_band: Band | None
) -> Tensor:
    """Drop tokens whose p/mu, or rows whose geometric mean of p/mu, is out of band.

    A value that is not a number stays in: it must not count as staleness.
    """
    kept = mask
    per_token = log_ratios(proximal, behaviour, mask, "token")
    per_row = log_ratios(proximal, behaviour, mask, "prefix_mean")
    for logs, band in ((per_token, token_band), (per_row, sequence_band)):
        if band is not None:
            kept = kept & ~((logs.exp() < band[0]) | (logs.exp() > band[1]))
    return kept


def is_past_ratio(logprobs: Tensor, behaviour: Tensor, mask: Tensor, advantages: Tensor, bound: float) -> Tensor:
    """Return True where the prefix's theta/mu is past `bound`, or 1/bound, as it is pushed.

    The whole prefix is bounded, since the reward is the prefix's: tokens that moved little each may have moved far
    together.
    """
    moved, limit = log_ratios(logprobs, behaviour, mask, "prefix"), math.log(bound)
    return ((advantages > 0) & (moved > limit)) | ((advantages < 0) & (moved < -limit))


def is_past_probability(logprobs: Tensor, behaviour: Tensor, advantages: Tensor, bound: float) -> Tensor:
    """Return True where a probability moved more than `bound`, the way it is pushed.

    DPPO's mask with binary total variation (Qi et al. 2026, arXiv 2602.04879).
    """
    moved = logprobs.exp() - behaviour.exp()
    return ((advantages > 0) & (moved > bound)) | ((advantages < 0) & (moved < -bound))


def is_stale_negative(logprobs: Tensor, behaviour: Tensor, mask: Tensor, advantages: Tensor, bound: float) -> Tensor:
    """Return True where A < 0 and the row's mean log(mu/theta) is above `bound` nat.

    Off-policy sequence masking (DeepSeek-AI 2025, DeepSeek-V3.2).
    """
    return (advantages < 0) & (-log_ratios(logprobs, behaviour, mask, "prefix_mean") > bound)


def second_moments(log_ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """Return (log theta/mu)^2 and where a clip could act on it: moved the way that it is pushed."""
    return log_ratio.square(), (advantages * log_ratio) > 0


def second_moment_limit(moments: Tensor, bound: float) -> float:
    """Return the limit below which the largest set of values lies whose mean is at most `bound`.

    M2PO (Zheng et al. 2025, arXiv 2510.01161): the tokens with the largest (log theta/mu)^2 are left out until the mean
    of the others is within the bound. Infinite where nothing need be left out.

    Args:
        moments: 1-d, of all ranks, of the tokens on which a clip could act.
    """
    ordered = moments.sort().values
    means = ordered.cumsum(dim=0) / torch.arange(1, len(ordered) + 1, device=moments.device)
    inside = int((means <= bound).sum())
    return float("inf") if inside == len(ordered) else float(ordered[inside])
