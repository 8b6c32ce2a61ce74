"""The losses: pure functions, tensors in, `(loss, sums)` out.

Three policies meet here: behaviour mu (the engine that sampled), proximal p (the learner at the start of the batch) and
current theta. All tensors are (rows, tokens); `mask` is True where a sampled token counts. Every loss is a sum over a
global denominator, so micro-batches and ranks add up to the same loss however they are cut; the second result holds
plain sums for the same reason.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from prefixrl.common.config.algorithm import BOUND_TOKENS
from prefixrl.common.run.documents import AgeDrift

Ratio = Literal["token", "prefix", "prefix_mean"]
Aggregation = Literal["token", "sequence"]
KlEstimator = Literal["k1", "k2", "k3"]

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


def is_past_ratio(
    logprobs: Tensor, behaviour: Tensor, mask: Tensor, advantages: Tensor, bound: float
) -> Tensor:
    """Return True where the row's theta/mu is past `bound`, or 1/bound, as it is pushed.

    The whole row, since the reward is the row's: tokens that moved little each may have moved far together. Above
    `BOUND_TOKENS` log `bound` grows as the noise of a row does, with the root of its tokens (docs/objectives.md).
    """
    longer = (mask.sum(dim=1, keepdim=True) / BOUND_TOKENS).clamp(min=1.0).sqrt()
    moved, limit = log_ratios(logprobs, behaviour, mask, "prefix"), math.log(bound) * longer
    return ((advantages > 0) & (moved > limit)) | ((advantages < 0) & (moved < -limit))


Sums = dict[str, Tensor]
Correction = Literal["decoupled", "behaviour", "none"]

MOST_RATIO = 1e4
"""A row is left out if p/mu of a token is above this, or below its inverse: sampler and learner do not compute the same
policy."""
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

    correction: Correction
    clip: float
    importance_cap: float
    aggregation: Aggregation
    entropy: float
    """Coefficient of the entropy bonus: positive keeps the policy random."""
    kl_in_loss: float
    """Coefficient of the KL term in the loss; 0 when the KL is in the reward or off."""
    kl_estimator: KlEstimator
    clip_high: float | None = None
    """The ratio is clipped to [1 - clip, 1 + clip_high]; None for `clip`."""
    dual_clip: float = math.inf
    """Bound on the objective as a multiple of a negative advantage."""
    ratio: Ratio = "token"
    importance_ratio: Ratio | None = None
    """Granularity of the weight p/mu; None for `ratio`."""
    is_one_action: bool = False
    """True if a prefix is one action: the surrogate of its ratio counts whole, not divided by its tokens."""
    above_cap: Literal["truncate", "mask"] = "truncate"
    """A weight above `importance_cap` counts as the cap, or as 0; the token stays in the denominator."""
    bound_ratio: float = math.inf
    """Bound on theta/mu and mu/theta of a whole row of up to `BOUND_TOKENS`; inf: off."""
    loss_function: "Callable[[PolicyTerms], tuple[Tensor, Sums]] | None" = None
    """Returns the sum of a loss that replaces the surrogate, and sums to report."""


def kl_estimate(logprobs: Tensor, reference: Tensor, estimator: KlEstimator) -> Tensor:
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


def aggregate(x: Tensor, mask: Tensor, aggregation: Aggregation, normaliser: float) -> Tensor:
    """Return sum over tokens / normaliser, or sum over rows of the row's mean / normaliser."""
    counted = torch.where(mask, x, 0.0)
    if aggregation == "token":
        return counted.sum() / normaliser
    return (counted.sum(dim=1) / mask.sum(dim=1).clamp(min=1)).sum() / normaliser


def policy_loss(
    terms: PolicyTerms, settings: PolicySettings, normaliser: float
) -> tuple[Tensor, Sums]:
    """Return L = -sum (w [surrogate + entropy bonus] - v KL) / N and its sums.

    `correction`, with surrogate min(rho A, clip(rho) A):
        "decoupled": rho = theta/p, w = p/mu up to the cap (Hilton et al. 2022).
        "behaviour": rho = theta/mu, w = 1.
        "none": rho = theta/p, w = 1: samples count as if the proximal policy had written them.
    v = theta/mu up to the cap, without gradient, or 1 with "none": the KL is the current policy's.
    A row with a token past `MOST_RATIO` counts in N alone. Where A < 0, `dual_clip` = c bounds the
    clipped surrogate from below by c A (Ye et al. 2020, eq. 5). Past `bound_ratio` the surrogate has
    no gradient. `settings.loss_function`, a loss of the user's own, replaces the surrogate.

    Args:
        normaliser: tokens (or rows, with aggregation by sequence) of the whole optimiser step, of
            all ranks.

    Returns:
        the loss, and sums over the tokens (`tokens` counts them) or ratios (`units` counts them)
        of this call.
    """
    mask = terms.mask
    logprobs, proximal, behaviour = masked(mask, terms.logprobs, terms.proximal, terms.behaviour)
    denominator = behaviour if settings.correction == "behaviour" else proximal
    log_ratio = log_ratios(logprobs, denominator, mask, settings.ratio)
    weight_ratio = settings.importance_ratio or settings.ratio
    # p/mu weighs what the behaviour policy sampled as the proximal one would. It has no gradient.
    importance = log_ratios(proximal, behaviour, mask, weight_ratio).exp().detach()
    is_left_out = has_outlier(proximal, behaviour)
    is_clipped = is_bounded = torch.zeros_like(mask)
    per_token = torch.zeros_like(logprobs)
    if settings.loss_function is None:
        surrogate, is_clipped = _surrogate(terms, log_ratio, settings)
        if math.isfinite(settings.bound_ratio):
            is_bounded = mask & is_past_ratio(
                logprobs.detach(), behaviour, mask, terms.advantages, settings.bound_ratio
            )
        # A bounded token still counts in N: it is only not pushed any further.
        per_token = -torch.where(is_bounded, surrogate.detach(), surrogate)
    if settings.entropy != 0.0:
        per_token = per_token - settings.entropy * terms.entropy
    if settings.correction == "decoupled":
        per_token = per_token * _weights(importance, settings)
    per_token = per_token + _weighted_kl(terms, logprobs, behaviour, settings)
    per_token = torch.where(is_left_out, 0.0, per_token)
    loss = aggregate(per_token, mask, settings.aggregation, normaliser)
    reported = Sums()
    if settings.loss_function is not None:
        counted = replace(terms, proximal=proximal, mask=mask & ~is_left_out)
        total, reported = settings.loss_function(counted)
        loss = loss + total / normaliser
    with torch.no_grad():
        return loss, _token_sums(terms, logprobs, proximal, behaviour) | reported | {
            "bounded": _total(is_bounded, mask),
            **_row_sums(mask, is_left_out),
            **_ratio_sums(mask, log_ratio, is_clipped, settings),
            **_weight_sums(mask, importance, settings),
        }


def _surrogate(
    terms: PolicyTerms, log_ratio: Tensor, settings: PolicySettings
) -> tuple[Tensor, Tensor]:
    """Return each token's min(rho A, clip(rho) A) with the dual clip, and the positions of active clips."""
    advantages = torch.where(terms.mask, terms.advantages, 0.0)
    ratio = log_ratio.exp()
    high = settings.clip if settings.clip_high is None else settings.clip_high
    free = ratio * advantages
    surrogate = torch.minimum(free, ratio.clamp(1.0 - settings.clip, 1.0 + high) * advantages)
    if math.isfinite(settings.dual_clip):
        bounded = torch.maximum(surrogate, settings.dual_clip * advantages)
        surrogate = torch.where(advantages < 0, bounded, surrogate)
    is_clipped = surrogate != free
    if settings.ratio == "prefix" and not settings.is_one_action:
        # At ratio 1 the gradient is then that of the ratios of tokens, and so is its share beside
        # entropy and KL.
        surrogate = surrogate / terms.mask.sum(dim=1, keepdim=True).clamp(min=1)
    return surrogate, is_clipped


def _weighted_kl(
    terms: PolicyTerms, logprobs: Tensor, behaviour: Tensor, settings: PolicySettings
) -> Tensor:
    """Return the KL term of each token of the current policy, estimated from tokens of the behaviour policy."""
    if settings.kl_in_loss == 0.0 or terms.reference is None:
        return torch.zeros_like(logprobs)
    (reference,) = masked(terms.mask, terms.reference)
    kl = settings.kl_in_loss * kl_estimate(logprobs, reference, settings.kl_estimator)
    if settings.correction == "none":
        return kl
    weights = log_ratios(logprobs.detach(), behaviour, terms.mask, "token").exp()
    return kl * weights.clamp(max=settings.importance_cap)


def has_outlier(proximal: Tensor, behaviour: Tensor) -> Tensor:
    """Return True for rows with a token whose p/mu is past `MOST_RATIO`; bool, (rows, 1)."""
    gap = (proximal - behaviour).abs()
    return (gap > math.log(MOST_RATIO)).any(dim=1, keepdim=True)


def _weights(importance: Tensor, settings: PolicySettings) -> Tensor:
    if settings.above_cap == "mask":
        return torch.where(importance > settings.importance_cap, 0.0, importance)
    return importance.clamp(max=settings.importance_cap)


def value_loss(
    terms: ValueTerms, clip: float, aggregation: Aggregation, normaliser: float
) -> tuple[Tensor, Sums]:
    """Return 0.5 max((V - R)^2, (clip(V) - R)^2), V clipped to within `clip` of the old value.

    Args:
        normaliser: as for `policy_loss`.

    Returns:
        the loss, and sums over the tokens of this call.
    """
    values, old_values, returns = masked(terms.mask, terms.values, terms.old_values, terms.returns)
    near = old_values + (values - old_values).clamp(-clip, clip)
    free, clipped = (values - returns).square(), (near - returns).square()
    loss = aggregate(0.5 * torch.maximum(free, clipped), terms.mask, aggregation, normaliser)
    # From the values before these steps, as `explained_variance` judges them.
    error = returns - old_values
    with torch.no_grad():
        return loss, {
            "value_tokens": terms.mask.sum().double(),
            # Within the range both are equal but for rounding.
            "value_clipped": _total(
                (clipped > free) & ((values - old_values).abs() > clip), terms.mask
            ),
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


def _row_sums(mask: Tensor, is_left_out: Tensor) -> Sums:
    row = units(mask, "prefix")
    return {
        "rows": row.sum().double(),
        "rows_left_out": _total(is_left_out.expand_as(row), row),
    }


# Both ratios may be per token or per row, so each share is of its own count.


def _ratio_sums(
    mask: Tensor, log_ratio: Tensor, is_clipped: Tensor, settings: PolicySettings
) -> Sums:
    unit = units(mask, settings.ratio)
    return {
        "units": unit.sum().double(),
        "clipped": _total(is_clipped, unit),
        "ratio": _total(log_ratio.exp(), unit),
        "log_ratio_bins": bin_counts(log_ratio[unit], LOG_RATIO_EDGES),
    }


def _weight_sums(mask: Tensor, importance: Tensor, settings: PolicySettings) -> Sums:
    unit = units(mask, settings.importance_ratio or settings.ratio)
    return {
        "weights": unit.sum().double(),
        "importance": _total(importance, unit),
        "importance_squared": _total(importance.double().square(), unit),
        "importance_capped": _total(importance > settings.importance_cap, unit),
    }


def bin_counts(values: Tensor, edges: Sequence[float]) -> Tensor:
    """Count `values` in (edges[i-1], edges[i]], outer bins open: float64, (edges + 1,)."""
    bins = torch.bucketize(
        values.float(), torch.tensor(edges, device=values.device, dtype=torch.float32)
    )
    return torch.bincount(bins.flatten(), minlength=len(edges) + 1).double()


def _total(x: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, x, 0).sum(dtype=torch.float64)


ENOUGH, ENOUGH_OLD, ENOUGH_TOKENS = 0.05, 0.25, 256
"""Fractions of an iteration's tokens that must be of age 0, and older (or so many), for their ESS to be a figure."""
_FIELDS = 7


def drift_sums(
    proximal: Tensor, behaviour: Tensor, mask: Tensor, ages: Tensor, oldest: int
) -> Tensor:
    """Add up by age what `drift_by_age` divides: float64, (oldest + 1, 7).

    Args:
        ages: (rows, tokens), 0 to `oldest`; a row counts as old as its oldest token.
    """
    per_token = log_ratios(proximal, behaviour, mask, "token").double()
    weights = per_token.exp()
    tokens = torch.stack(
        [torch.ones_like(weights), per_token.abs(), weights, weights.square()], dim=-1
    )
    per_row = log_ratios(proximal, behaviour, mask, "prefix").double().exp()
    rows = torch.stack([torch.ones_like(per_row), per_row, per_row.square()], dim=-1)
    first = units(mask, "prefix")
    row_ages = torch.where(mask, ages, 0).amax(dim=1, keepdim=True).expand_as(ages)
    sums = torch.zeros(oldest + 1, _FIELDS, dtype=torch.float64, device=mask.device)
    sums[:, :4].index_add_(0, ages[mask], tokens[mask])
    sums[:, 4:].index_add_(0, row_ages[first], rows[first])
    return sums


def drift_by_age(sums: Tensor) -> tuple[AgeDrift, ...]:
    """Return the drift of every age that was trained and is finite, youngest first."""
    drifts = (_drift(age, row) for age, row in enumerate(sums.tolist()) if row[0])
    return tuple(
        each
        for each in drifts
        if math.isfinite(each.gap + each.ess_fraction + each.row_ess_fraction)
    )


def drift_figures(sums: Tensor) -> dict[str, float]:
    """Return the figures of all ages together.

    `row_ess_fraction`: of whole rows. `engine_mismatch_gap` (age 0) is there only where such samples are,
    `old_ess_fraction` (tokens of age 1 and more) and `fresh_ess_fraction` (age 0) where they are enough to judge by.
    """
    whole, old, fresh = (_drift(0, part.sum(dim=0).tolist()) for part in (sums, sums[1:], sums[:1]))
    figures = {"row_ess_fraction": whole.row_ess_fraction}
    if fresh.tokens:
        figures["engine_mismatch_gap"] = fresh.gap
    if old.tokens > min(ENOUGH_OLD * whole.tokens, ENOUGH_TOKENS):
        figures["old_ess_fraction"] = old.ess_fraction
    if fresh.tokens > ENOUGH * whole.tokens:
        figures["fresh_ess_fraction"] = fresh.ess_fraction
    return figures


def _drift(age: int, row: list[float]) -> AgeDrift:
    tokens, gap, total, squares, rows, row_total, row_squares = row
    return AgeDrift(
        age=age,
        tokens=int(tokens),
        gap=gap / max(tokens, 1.0),
        ess_fraction=total**2 / max(squares * tokens, 1e-300),
        rows=int(rows),
        row_ess_fraction=row_total**2 / max(row_squares * rows, 1e-300),
    )
