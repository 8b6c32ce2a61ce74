"""The losses: pure functions, tensors in, `(loss, sums)` out.

Three policies meet here: behaviour mu (the engine that sampled), proximal p (the learner at the start of the batch) and
current theta. All tensors are (rows, tokens); `mask` is True where a token was sampled. Every loss is a sum over a global
denominator, so micro-batches and ranks add up to the same loss however they are cut; the second result holds plain sums
for the same reason.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Sums = dict[str, Tensor]


@dataclass(frozen=True)
class PolicyTerms:
    """What the policy loss of one micro-batch is made of; all (rows, tokens)."""

    logprobs: Tensor
    """Of the current policy; carries the gradient."""
    entropy: Tensor
    """Of the current policy's next-token distribution, in nats; carries the gradient."""
    proximal: Tensor
    behaviour: Tensor
    reference: Tensor | None
    advantages: Tensor
    mask: Tensor


@dataclass(frozen=True)
class ValueTerms:
    """What the value loss of one micro-batch is made of; all (rows, tokens)."""

    values: Tensor
    """Of the current critic; carries the gradient."""
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


def token_logprobs(logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Logprob of each token and entropy of its distribution, at the sampling temperature, in float32.

    Args:
        logits: (..., vocabulary), any float type.
        tokens: (...), the token each distribution is asked about.
    """
    scaled = logits.float() / temperature
    logs = torch.log_softmax(scaled, dim=-1)
    entropy = -(logs.exp() * logs).sum(dim=-1)
    return logs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), entropy


def kl_estimate(
    logprobs: Tensor, reference: Tensor, estimator: Literal["k1", "k2", "k3"]
) -> Tensor:
    """Per-token estimate of KL(policy || reference) from samples of the policy (Schulman 2020, "Approximating KL")."""
    log_ratio = logprobs - reference
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    return torch.exp(-log_ratio) - 1.0 + log_ratio


def importance_weights(proximal: Tensor, behaviour: Tensor, cap: float) -> Tensor:
    """min(p / mu, cap), without gradient: how much more likely the proximal policy was to write the token."""
    return torch.exp(proximal - behaviour).clamp(max=cap).detach()


def aggregate(
    x: Tensor, mask: Tensor, aggregation: Literal["token", "sequence"], normaliser: float
) -> Tensor:
    """Sum over tokens / normaliser, or sum over rows of the row's mean / normaliser."""
    kept = torch.where(mask, x, 0.0)
    if aggregation == "token":
        return kept.sum() / normaliser
    return (kept.sum(dim=1) / mask.sum(dim=1).clamp(min=1)).sum() / normaliser


def policy_loss(
    terms: PolicyTerms, settings: PolicySettings, normaliser: float
) -> tuple[Tensor, Sums]:
    """L = -sum w min(rho A, clip(rho) A) / N - entropy bonus + KL, the decoupled PPO objective (Hilton et al. 2022).

    `correction` = "decoupled": rho = theta/p, w = min(p/mu, cap). "behaviour": rho = theta/mu, w = 1. "none": rho = theta/p,
    w = 1, that is, samples count as if the proximal policy had written them.

    Args:
        normaliser: sampled tokens (or rows, with aggregation by sequence) of the whole optimiser step, all ranks.

    Returns:
        the loss, and sums over the unmasked tokens of this call (`tokens` counts them).
    """
    logprobs, proximal, behaviour = _masked(
        terms.mask, terms.logprobs, terms.proximal, terms.behaviour
    )
    ratio = torch.exp(logprobs - (behaviour if settings.correction == "behaviour" else proximal))
    weight = importance_weights(proximal, behaviour, settings.importance_cap)
    applied = weight if settings.correction == "decoupled" else torch.ones_like(weight)
    free = ratio * terms.advantages
    clipped = ratio.clamp(1.0 - settings.clip, 1.0 + settings.clip) * terms.advantages
    per_token = -applied * torch.minimum(free, clipped)
    if settings.entropy != 0.0:
        per_token = per_token - settings.entropy * terms.entropy
    if settings.kl_in_loss != 0.0 and terms.reference is not None:
        (reference,) = _masked(terms.mask, terms.reference)
        per_token = per_token + settings.kl_in_loss * kl_estimate(
            logprobs, reference, settings.kl_estimator
        )
    loss = aggregate(per_token, terms.mask, settings.aggregation, normaliser)
    return loss, _policy_sums(terms, ratio, clipped < free, settings.importance_cap)


def value_loss(
    terms: ValueTerms, clip: float, aggregation: Literal["token", "sequence"], normaliser: float
) -> tuple[Tensor, Sums]:
    """0.5 max((V - R)^2, (clip(V) - R)^2), V clipped to within `clip` of the old value (PPO's value clip).

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
            "value_clipped": _total(clipped > free, terms.mask),
            "value": _total(old_values, terms.mask),
            "return": _total(returns, terms.mask),
            "return_squared": _total(returns.double().square(), terms.mask),
            "value_error": _total(error, terms.mask),
            "value_error_squared": _total(error.double().square(), terms.mask),
        }


@torch.no_grad()
def _policy_sums(terms: PolicyTerms, ratio: Tensor, is_clipped: Tensor, cap: float) -> Sums:
    logprobs, proximal, behaviour = _masked(
        terms.mask, terms.logprobs, terms.proximal, terms.behaviour
    )
    raw = torch.exp(proximal - behaviour)
    sums = {
        "tokens": terms.mask.sum().double(),
        "clipped": _total(is_clipped, terms.mask),
        "approx_kl": _total(kl_estimate(proximal, logprobs, "k3"), terms.mask),
        "entropy": _total(terms.entropy, terms.mask),
        "ratio": _total(ratio, terms.mask),
        "importance": _total(raw, terms.mask),
        "importance_squared": _total(raw.double().square(), terms.mask),
        "importance_capped": _total(raw > cap, terms.mask),
        "behaviour_gap": _total((proximal - behaviour).abs(), terms.mask),
    }
    if terms.reference is not None:
        (reference,) = _masked(terms.mask, terms.reference)
        sums["reference_kl"] = _total(logprobs - reference, terms.mask)
    return sums


def _masked(mask: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """0 outside the mask before any exp: what stands under padding may be anything, and inf x 0 is not 0."""
    return tuple(torch.where(mask, tensor, 0.0) for tensor in tensors)


def _total(x: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, x, 0).sum(dtype=torch.float64)
