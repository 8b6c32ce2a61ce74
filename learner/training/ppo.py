"""The losses: pure functions, tensors in, `(loss, sums)` out.

Three policies meet here: behaviour mu (the engine that sampled), proximal p (the learner at the start of the batch) and
current theta. All tensors are (rows, tokens); `mask` is True where a sampled token counts. Every loss is a sum over a
global denominator, so micro-batches and ranks add up to the same loss however they are cut; the second result holds
plain sums for the same reason. `ratios.py` has the ratios of the three policies, their granularity and their bounds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from prefixrl.learner.training.ratios import (
    LOG_RATIO_LIMIT,
    Ratio,
    interpolated,
    is_past_probability,
    is_past_ratio,
    is_stale_negative,
    log_ratios,
    masked,
    second_moments,
    units,
)

Sums = dict[str, Tensor]
Correction = Literal["decoupled", "behaviour", "none", "topr"]

K3_LIMIT = 10.0
"""The most that k3 of one token counts, in nats."""
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
    ages: Tensor
    """Versions between mu and p."""
    second_moment_limit: float = math.inf
    """Tokens with a (log theta/mu)^2 at or above it are pushed no further (`ratios.second_moment_limit`)."""


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
class Bounds:
    """Bounds on the distance of theta from mu; past them a token is pushed no further. inf: off."""

    ratio: float = math.inf
    """On theta/mu and mu/theta of the whole prefix, at any granularity of the loss."""
    probability: float = math.inf
    """On the difference of the token's probabilities."""
    negatives: float = math.inf
    """On the mean log(mu/theta) of a row of negative advantage, in nats."""


@dataclass(frozen=True)
class PolicySettings:
    """The choices of the policy loss."""

    correction: Correction
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
    dual_clip: float = math.inf
    """Bound on the objective as a multiple of a negative advantage."""
    ratio: Ratio = "token"
    is_one_action: bool = False
    """True if a prefix is one action: the surrogate of its ratio counts whole, not divided by its tokens."""
    above_cap: Literal["truncate", "mask"] = "truncate"
    """A weight above `importance_cap` counts as the cap, or as 0; the token stays in the denominator."""
    is_interpolated: bool = False
    """True if p is interpolated between mu and theta and not measured."""
    bounds: Bounds = Bounds()


def kl_estimate(logprobs: Tensor, reference: Tensor, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """Estimate KL(policy || reference) per token from the policy's samples (Schulman 2020).

    k3 is clamped: an unlikely token of a reference far away would otherwise outweigh all others.
    """
    log_ratio = logprobs - reference
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    near = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return (torch.exp(-near) - 1.0 + near).clamp(max=K3_LIMIT)


def aggregate(x: Tensor, mask: Tensor, aggregation: Literal["token", "sequence"], normaliser: float) -> Tensor:
    """Return sum over tokens / normaliser, or sum over rows of the row's mean / normaliser."""
    kept = torch.where(mask, x, 0.0)
    if aggregation == "token":
        return kept.sum() / normaliser
    return (kept.sum(dim=1) / mask.sum(dim=1).clamp(min=1)).sum() / normaliser


def policy_loss(terms: PolicyTerms, settings: PolicySettings, normaliser: float) -> tuple[Tensor, Sums]:
    """Return L = -sum w [surrogate + entropy bonus - KL] / N and its sums.

    `correction`, with surrogate min(rho A, clip(rho) A):
        "decoupled": rho = theta/p, w = p/mu up to the cap (Hilton et al. 2022).
        "behaviour": rho = theta/mu, w = 1.
        "none": rho = theta/p, w = 1, that is, samples count as if the proximal policy had written them.
        "topr": the surrogate is A log theta where A >= 0, and sg(min(theta/mu, 1)) A log theta where A < 0, w = 1
            (Le Roux et al. 2025, arXiv 2503.14286).
    Where A < 0, `dual_clip` = c bounds the clipped surrogate from below by c A (Ye et al. 2020, eq. 5). Past one of the
    bounds on theta/mu the surrogate has no gradient.

    Args:
        normaliser: unmasked tokens (or rows, with aggregation by sequence) of the whole optimiser step, all ranks.

    Returns:
        the loss, and sums over the unmasked tokens (`tokens` counts them) or ratios (`units` counts them) of this call.
    """
    mask, advantages = terms.mask, torch.where(terms.mask, terms.advantages, 0.0)
    logprobs, proximal, behaviour = masked(mask, terms.logprobs, terms.proximal, terms.behaviour)
    if settings.is_interpolated:
        proximal = interpolated(logprobs, behaviour, terms.ages)
    drift = log_ratios(logprobs, behaviour, mask, settings.ratio)
    log_ratio = drift
    if settings.correction in ("decoupled", "none"):
        log_ratio = log_ratios(logprobs, proximal, mask, settings.ratio)
    importance = log_ratios(proximal, behaviour, mask, settings.ratio).exp().detach()
    if settings.correction == "topr":
        surrogate, is_clipped = _tapered(logprobs, log_ratio, advantages)
    else:
        surrogate, is_clipped = _clipped(log_ratio.exp(), advantages, settings)
        if settings.ratio == "prefix" and not settings.is_one_action:
            # At ratio 1 the gradient is then that of the tokens' ratios, as is its share beside entropy and KL.
            surrogate = surrogate / mask.sum(dim=1, keepdim=True).clamp(min=1)
    is_bounded = _is_bounded(terms, logprobs.detach(), behaviour, drift.detach(), settings)
    per_token = -torch.where(is_bounded, surrogate.detach(), surrogate)
    if settings.entropy != 0.0:
        per_token = per_token - settings.entropy * terms.entropy
    if settings.kl_in_loss != 0.0 and terms.reference is not None:
        (reference,) = masked(mask, terms.reference)
        per_token = per_token + settings.kl_in_loss * kl_estimate(logprobs, reference, settings.kl_estimator)
    if settings.correction == "decoupled":
        per_token = per_token * _weights(importance, settings)
    loss = aggregate(per_token, mask, settings.aggregation, normaliser)
    unit = units(mask, settings.ratio)
    with torch.no_grad():
        return loss, _token_sums(terms, logprobs, proximal, behaviour) | {
            "units": unit.sum().double(),
            "clipped": _total(is_clipped, unit),
            "bounded": _total(is_bounded, mask),
            "ratio": _total(log_ratio.exp(), unit),
            "log_ratio_bins": bin_counts(log_ratio[unit], LOG_RATIO_EDGES),
            "importance": _total(importance, unit),
            "importance_squared": _total(importance.double().square(), unit),
            "importance_capped": _total(importance > settings.importance_cap, unit),
        }


def _weights(importance: Tensor, settings: PolicySettings) -> Tensor:
    if settings.above_cap == "mask":
        return torch.where(importance > settings.importance_cap, 0.0, importance)
    return importance.clamp(max=settings.importance_cap)


def _clipped(ratio: Tensor, advantages: Tensor, settings: PolicySettings) -> tuple[Tensor, Tensor]:
    """Return min(rho A, clip(rho) A) with the dual clip, and the positions of active bounds."""
    high = settings.clip if settings.clip_high is None else settings.clip_high
    free = ratio * advantages
    surrogate = torch.minimum(free, ratio.clamp(1.0 - settings.clip, 1.0 + high) * advantages)
    if math.isfinite(settings.dual_clip):
        bounded = torch.maximum(surrogate, settings.dual_clip * advantages)
        surrogate = torch.where(advantages < 0, bounded, surrogate)
    return surrogate, surrogate != free


def _tapered(logprobs: Tensor, log_ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """Return TOPR's surrogate, and where theta/mu below 1 tapers a negative advantage."""
    is_tapered = (advantages < 0) & (log_ratio < 0)
    taper = torch.where(is_tapered, log_ratio.detach().exp(), 1.0)
    return taper * advantages * logprobs, is_tapered


def _is_bounded(
    terms: PolicyTerms, logprobs: Tensor, behaviour: Tensor, drift: Tensor, settings: PolicySettings
) -> Tensor:
    """Return True where a bound on the distance from mu takes the gradient away."""
    bounds, found, advantages = settings.bounds, torch.zeros_like(terms.mask), terms.advantages
    if math.isfinite(bounds.ratio):
        found = found | is_past_ratio(logprobs, behaviour, terms.mask, advantages, bounds.ratio)
    if math.isfinite(bounds.probability):
        found = found | is_past_probability(logprobs, behaviour, advantages, bounds.probability)
    if math.isfinite(bounds.negatives):
        found = found | is_stale_negative(logprobs, behaviour, terms.mask, advantages, bounds.negatives)
    if math.isfinite(terms.second_moment_limit):
        moments, may_clip = second_moments(drift, advantages)
        found = found | (may_clip & (moments >= terms.second_moment_limit))
    return found & terms.mask


def value_loss(
    terms: ValueTerms, clip: float, aggregation: Literal["token", "sequence"], normaliser: float
) -> tuple[Tensor, Sums]:
    """Return 0.5 max((V - R)^2, (clip(V) - R)^2), V clipped to within `clip` of the old value.

    Args:
        normaliser: as for `policy_loss`.

    Returns:
        the loss, and sums over the unmasked tokens of this call.
    """
    values, old_values, returns = masked(terms.mask, terms.values, terms.old_values, terms.returns)
    near = old_values + (values - old_values).clamp(-clip, clip)
    free, clipped = (values - returns).square(), (near - returns).square()
    loss = aggregate(0.5 * torch.maximum(free, clipped), terms.mask, aggregation, normaliser)
    error = returns - old_values
    with torch.no_grad():
        return loss, {
            "value_tokens": terms.mask.sum().double(),
            # Within the range both are equal but for rounding.
            "value_clipped": _total((clipped > free) & ((values - old_values).abs() > clip), terms.mask),
            "value": _total(old_values, terms.mask),
            "return": _total(returns, terms.mask),
            "return_squared": _total(returns.double().square(), terms.mask),
            "value_error": _total(error, terms.mask),
            "value_error_squared": _total(error.double().square(), terms.mask),
        }


def _token_sums(terms: PolicyTerms, logprobs: Tensor, proximal: Tensor, behaviour: Tensor) -> Sums:
    sums = {
        "tokens": terms.mask.sum().double(),
        "approx_kl": _total(kl_estimate(proximal, logprobs, "k3"), terms.mask),
        "entropy": _total(terms.entropy, terms.mask),
        "behaviour_gap": _total((proximal - behaviour).abs(), terms.mask),
    }
    if terms.reference is not None:
        # Samples are mu's, the KL asked for is theta's: without weights the figure goes negative as samples age.
        (reference,) = masked(terms.mask, terms.reference)
        weights = log_ratios(logprobs, behaviour, terms.mask, "token").exp()
        sums["reference_kl"] = _total(weights * kl_estimate(logprobs, reference, "k3"), terms.mask)
        sums["reference_weights"] = _total(weights, terms.mask)
    return sums


def bin_counts(values: Tensor, edges: Sequence[float]) -> Tensor:
    """Count `values` in (edges[i-1], edges[i]], outer bins open: float64, (edges + 1,)."""
    bins = torch.bucketize(values.float(), torch.tensor(edges, device=values.device, dtype=torch.float32))
    return torch.bincount(bins.flatten(), minlength=len(edges) + 1).double()


def _total(x: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, x, 0).sum(dtype=torch.float64)
