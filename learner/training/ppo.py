"""The losses: pure functions, tensors in, `(loss, sums)` out.

Three policies meet here: behaviour mu (the engine that sampled), proximal p (the learner at the start of the batch) and
current theta. All tensors are (rows, tokens); `mask` is True where a sampled token counts. Every loss is a sum over a
global denominator, so micro-batches and ranks add up to the same loss however they are cut; the second result holds
plain sums for the same reason.

Ratios have a granularity: each token its own, or one for the whole prefix, the product of its tokens' ratios or their
geometric mean. One ratio for a prefix stands at every token of its row, so that the rest is written once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Sums = dict[str, Tensor]
Granularity = Literal["token", "product", "geometric_mean"]
Band = tuple[float, float]

LOG_RATIO_EDGES = tuple(edge / 10 for edge in range(-15, 16))


@dataclass(frozen=True)
class PolicyTerms:
    """Inputs of the policy loss of one micro-batch; all (rows, tokens)."""

    logprobs: Tensor
    """Logprobs of the current policy; carries the gradient."""
    entropy: Tensor
    """Entropy of the current policy's next-token distribution, in nats; carries the gradient."""
    proximal: Tensor
    behaviour: Tensor
    reference: Tensor | None
    advantages: Tensor
    mask: Tensor


@dataclass(frozen=True)
class ValueTerms:
    """Inputs of the value loss of one micro-batch; all (rows, tokens)."""

    values: Tensor
    """Values of the current critic; carries the gradient."""
    old_values: Tensor
    """The values the advantages were computed from."""
    returns: Tensor
    mask: Tensor


@dataclass(frozen=True)
class PolicySettings:
    """The choices of the policy loss."""

    correction: Literal["decoupled", "behaviour", "none"]
    clip: float
    importance_cap: float
    aggregation: Literal["token", "sequence"]
    entropy: float
    """Coefficient of the entropy bonus: positive keeps the policy random."""
    kl_in_loss: float
    """Coefficient of the KL term in the loss; 0 when the KL is in the reward or off."""
    kl_estimator: Literal["k1", "k2", "k3"]
    clip_high: float | None = None
    """The ratio is clipped to [1 - clip, 1 + clip_high]; None for `clip`."""
    dual_clip: float | None = None
    """Bound on the objective as a multiple of a negative advantage; None for no bound."""
    granularity: Granularity = "token"


def token_logprobs(logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return each token's logprob and entropy at the sampling temperature, in float32.

    Args:
        logits: (..., vocabulary), any float type.
        tokens: (...), one token per distribution.
    """
    scaled = logits.float() / temperature
    logs = torch.log_softmax(scaled, dim=-1)
    entropy = -(logs.exp() * logs).sum(dim=-1)
    return logs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), entropy


def kl_estimate(logprobs: Tensor, reference: Tensor, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """Estimate KL(policy || reference) per token from the policy's samples (Schulman 2020)."""
    log_ratio = logprobs - reference
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    return torch.exp(-log_ratio) - 1.0 + log_ratio


def units(mask: Tensor, granularity: Granularity) -> Tensor:
    """Mark a position per ratio: every counted token, or each row's first; (rows, tokens)."""
    return mask if granularity == "token" else mask & (mask.cumsum(dim=1) == 1)


def log_ratios(above: Tensor, below: Tensor, mask: Tensor, granularity: Granularity) -> Tensor:
    """Return log(above/below) at the granularity, (rows, tokens); 0 outside the mask.

    "product": the probability ratio of the whole prefix. "geometric_mean": the same per token, exp(mean of logs), as in
    GSPO (Zheng et al. 2025, eq. 7).
    """
    difference = torch.where(mask, above - below, 0.0)
    if granularity == "token":
        return difference
    per_row = difference.sum(dim=1, keepdim=True)
    if granularity == "geometric_mean":
        per_row = per_row / mask.sum(dim=1, keepdim=True).clamp(min=1)
    return torch.where(mask, per_row, 0.0)


def kept_tokens(
    proximal: Tensor, behaviour: Tensor, mask: Tensor, token_band: Band | None, sequence_band: Band | None
) -> Tensor:
    """Drop tokens whose p/mu, or rows whose geometric mean of p/mu, is out of band.

    A value that is not a number stays in: it must reach the loss, which drops the step, and not count as staleness.
    """
    kept = mask
    per_token = log_ratios(proximal, behaviour, mask, "token")
    per_row = log_ratios(proximal, behaviour, mask, "geometric_mean")
    for logs, band in ((per_token, token_band), (per_row, sequence_band)):
        if band is not None:
            kept = kept & ~((logs.exp() < band[0]) | (logs.exp() > band[1]))
    return kept


def aggregate(x: Tensor, mask: Tensor, aggregation: Literal["token", "sequence"], normaliser: float) -> Tensor:
    """Return sum over tokens / normaliser, or sum over rows of the row's mean / normaliser."""
    kept = torch.where(mask, x, 0.0)
    if aggregation == "token":
        return kept.sum() / normaliser
    return (kept.sum(dim=1) / mask.sum(dim=1).clamp(min=1)).sum() / normaliser


def policy_loss(terms: PolicyTerms, settings: PolicySettings, normaliser: float) -> tuple[Tensor, Sums]:
    """Return L = -sum w min(rho A, clip(rho) A) / N - entropy bonus + KL, and its sums.

    It is the decoupled PPO objective (Hilton et al. 2022).

    `correction` = "decoupled": rho = theta/p, w = min(p/mu, cap). "behaviour": rho = theta/mu, w = 1. "none": rho =
    theta/p, w = 1, that is, samples count as if the proximal policy had written them. Where A < 0, `dual_clip` = c
    bounds the objective from below by c A (Ye et al. 2020, eq. 5).

    Args:
        normaliser: unmasked tokens (or rows, with aggregation by sequence) of the whole optimiser step, all ranks.

    Returns:
        the loss, and sums over the unmasked tokens (`tokens` counts them) or ratios (`units` counts them) of this call.
    """
    mask, advantages = terms.mask, torch.where(terms.mask, terms.advantages, 0.0)
    logprobs, proximal, behaviour = _masked(mask, terms.logprobs, terms.proximal, terms.behaviour)
    old = behaviour if settings.correction == "behaviour" else proximal
    log_ratio = log_ratios(logprobs, old, mask, settings.granularity)
    ratio = log_ratio.exp()
    importance = log_ratios(proximal, behaviour, mask, settings.granularity).exp().detach()
    objective, is_clipped = _clipped(ratio, advantages, settings)
    if settings.correction == "decoupled":
        objective = objective * importance.clamp(max=settings.importance_cap)
    per_token = -objective
    if settings.entropy != 0.0:
        per_token = per_token - settings.entropy * terms.entropy
    if settings.kl_in_loss != 0.0 and terms.reference is not None:
        (reference,) = _masked(mask, terms.reference)
        per_token = per_token + settings.kl_in_loss * kl_estimate(logprobs, reference, settings.kl_estimator)
    loss = aggregate(per_token, mask, settings.aggregation, normaliser)
    unit = units(mask, settings.granularity)
    with torch.no_grad():
        return loss, _token_sums(terms) | {
            "units": unit.sum().double(),
            "clipped": _total(is_clipped, unit),
            "ratio": _total(ratio, unit),
            "log_ratio_bins": bin_counts(log_ratio[unit], LOG_RATIO_EDGES),
            "importance": _total(importance, unit),
            "importance_squared": _total(importance.double().square(), unit),
            "importance_capped": _total(importance > settings.importance_cap, unit),
        }


def _clipped(ratio: Tensor, advantages: Tensor, settings: PolicySettings) -> tuple[Tensor, Tensor]:
    """Return min(rho A, clip(rho) A) with the dual clip, and the positions of active bounds."""
    high = settings.clip if settings.clip_high is None else settings.clip_high
    free = ratio * advantages
    objective = torch.minimum(free, ratio.clamp(1.0 - settings.clip, 1.0 + high) * advantages)
    if settings.dual_clip is not None:
        bounded = torch.maximum(objective, settings.dual_clip * advantages)
        objective = torch.where(advantages < 0, bounded, objective)
    return objective, objective != free


def value_loss(
    terms: ValueTerms, clip: float, aggregation: Literal["token", "sequence"], normaliser: float
) -> tuple[Tensor, Sums]:
    """Return 0.5 max((V - R)^2, (clip(V) - R)^2), V clipped to within `clip` of the old value.

    Args:
        normaliser: as for `policy_loss`.

    Returns:
        the loss, and sums over the unmasked tokens of this call.
    """
    values, old_values, returns = _masked(terms.mask, terms.values, terms.old_values, terms.returns)
    near = old_values + (values - old_values).clamp(-clip, clip)
    free, clipped = (values - returns).square(), (near - returns).square()
    loss = aggregate(0.5 * torch.maximum(free, clipped), terms.mask, aggregation, normaliser)
    error = returns - old_values
    with torch.no_grad():
        return loss, {
            "value_tokens": terms.mask.sum().double(),
            "value_clipped": _total(clipped > free, terms.mask),
            "value": _total(old_values, terms.mask),
            "return": _total(returns, terms.mask),
            "return_squared": _total(returns.double().square(), terms.mask),
            "value_error": _total(error, terms.mask),
            "value_error_squared": _total(error.double().square(), terms.mask),
        }


def _token_sums(terms: PolicyTerms) -> Sums:
    logprobs, proximal, behaviour = _masked(terms.mask, terms.logprobs, terms.proximal, terms.behaviour)
    sums = {
        "tokens": terms.mask.sum().double(),
        "approx_kl": _total(kl_estimate(proximal, logprobs, "k3"), terms.mask),
        "entropy": _total(terms.entropy, terms.mask),
        "behaviour_gap": _total((proximal - behaviour).abs(), terms.mask),
    }
    if terms.reference is not None:
        (reference,) = _masked(terms.mask, terms.reference)
        sums["reference_kl"] = _total(logprobs - reference, terms.mask)
    return sums


def bin_counts(values: Tensor, edges: Sequence[float]) -> Tensor:
    """Count `values` in (edges[i-1], edges[i]], outer bins open: float64, (edges + 1,)."""
    bins = torch.bucketize(values.float(), torch.tensor(edges, device=values.device, dtype=torch.float32))
    return torch.bincount(bins.flatten(), minlength=len(edges) + 1).double()


def _masked(mask: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Set values outside the mask to 0 before any exp: padding may be inf, inf x 0 is NaN."""
    return tuple(torch.where(mask, tensor, 0.0) for tensor in tensors)


def _total(x: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, x, 0).sum(dtype=torch.float64)
