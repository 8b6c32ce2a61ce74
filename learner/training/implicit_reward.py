"""Process rewards of an implicit reward model: pure, on padded (rows, tokens) tensors.

    q_t = log pi_phi(y_t) - log pi_ref(y_t), at temperature 1        r_t = beta q_t   (Yuan et al. 2024, section 3)
    loss = -o log sigma(beta sum_t q_t) - (1 - o) log(1 - sigma(beta sum_t q_t)),     o a row's outcome in [0, 1]
    A_t = c_p sum_{s >= t} gamma_p^(s-t) (r_s - b_p) + c_o gamma_o^(T-t) (o - b_o)    (PRIME, Cui et al. 2025, eq. 5)

A row's mean process reward is mu_j, over the tokens that have one: with granularity "whole" the last token alone, which
holds the sum. The baseline b_p of a row is the mean of the mu_j of the others in its group.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from prefixrl.learner.training.advantages import last_tokens
from prefixrl.learner.training.plan import by_group

Granularity = Literal["token", "whole"]
BaselineForm = Literal["paper", "code", "mean", "zscore", "none"]
NORM_FLOOR = 1e-6
"""Added to the largest return before rewards are divided by it."""


def process_rewards(
    log_ratio: Tensor, mask: Tensor, beta: float, granularity: Granularity
) -> tuple[Tensor, Tensor]:
    """Return the rewards of the tokens, and the mask of those that have one.

    Args:
        log_ratio: (rows, tokens), q.
        mask: (rows, tokens).
        granularity: "whole": a row's sum at its last token.
    """
    rewards = torch.where(mask, beta * log_ratio, 0.0)
    if granularity == "token":
        return rewards, mask
    last = last_tokens(mask)
    return torch.where(last, rewards.sum(dim=1, keepdim=True), 0.0), last


def outcome_loss(
    log_ratio: Tensor, mask: Tensor, outcomes: Tensor, beta: float, rows: float
) -> Tensor:
    """Return this micro-batch's share of the mean cross-entropy of the outcomes.

    In the form of logits: sigma first would saturate.

    Args:
        outcomes: (rows,), in [0, 1]; a row without a counted token does not count.
        rows: of the whole minibatch, over all ranks.
    """
    logits = beta * torch.where(mask, log_ratio, 0.0).sum(dim=1)
    losses = F.binary_cross_entropy_with_logits(logits, outcomes.to(logits.dtype), reduction="none")
    return torch.where(mask.any(dim=1), losses, 0.0).sum() / rows


def largest_return(rewards: Tensor, mask: Tensor) -> Tensor:
    """Return max |sum_{s >= t} r_s| over rows and tokens, a scalar; 0 without tokens."""
    returns = torch.where(mask, rewards, 0.0).flip(1).cumsum(1).flip(1)
    return torch.where(mask, returns.abs(), 0.0).amax()


def row_means(rewards: Tensor, mask: Tensor) -> Tensor:
    """Return mu, each row's mean reward over its mask: (rows,), 0 without tokens."""
    return torch.where(mask, rewards, 0.0).sum(dim=1) / mask.sum(dim=1).clamp(min=1)


class RowBaseline(NamedTuple):
    """The baseline of a row: a token's reward r becomes scale x (r - offset)."""

    offset: float
    scale: float


def row_baselines(
    means: Sequence[float], groups: Sequence[int], form: BaselineForm, floor: float = 0.0
) -> list[RowBaseline]:
    """Return the baselines of the process rewards, one per row.

    "paper" is PRIME's equation 5: the mean mu of the others. "code" is what its program does: K/(K-1) (r - mean mu),
    which adds (r - mu_i)/(K-1). "mean" is r less the group's mean, "zscore" that divided by the deviation of the mu
    (unbiased) and `floor`, as GRPO does with outcomes. A row that is alone in its group has scale 0, except with
    "none".

    Args:
        means: mu of all rows of the iteration.
        groups: the group of each.
        floor: added to the deviation.
    """
    members = by_group(means, groups)
    baselines = []
    for mean, group in zip(means, groups, strict=True):
        group_means = members[group]
        count, total = len(group_means), sum(group_means)
        offset, scale = total / count, 1.0
        # A row's rewards become scale x (r - offset).
        if form == "none":
            offset = 0.0
        elif count == 1:
            scale = 0.0
        elif form == "paper":
            offset = (total - mean) / (count - 1)
        elif form == "code":
            # For r = mu this is "paper": mu - mean of the others = K/(K-1) (mu - mean of all).
            scale = count / (count - 1)
        elif form == "zscore":
            deviation = (sum((each - offset) ** 2 for each in group_means) / (count - 1)) ** 0.5
            # Without a deviation the floor alone would divide, and make small rests large.
            scale = 1.0 / (deviation + floor) if deviation > 0.0 else 0.0
        baselines.append(RowBaseline(offset, scale))
    return baselines


def pairwise_accuracy(
    scores: Sequence[float], outcomes: Sequence[float], groups: Sequence[int]
) -> float | None:
    """Return how often the better of two rows of a group has the higher score; mean over groups.

    Pairs weigh by the difference of their outcomes; equal scores count as half. A group whose outcomes are all equal
    has no pair and does not count; None where no group has one.
    """
    shares = []
    for rows in by_group(zip(outcomes, scores, strict=True), groups).values():
        right = weight = 0.0
        for better, high in rows:
            for worse, low in rows:
                if better > worse:
                    weight += better - worse
                    right += (better - worse) * (float(high > low) + 0.5 * float(high == low))
        if weight:
            shares.append(right / weight)
    return sum(shares) / len(shares) if shares else None
