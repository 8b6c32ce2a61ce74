"""Token rewards, advantages and whitening: pure, on padded (rows, tokens) tensors.

`mask` is True where a token was sampled; rows are padded on the right. Values outside the mask never count.
`group_advantages` works on the rewards of whole rows, which every rank knows.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from prefixrl.learner.training.plan import by_group

LARGEST_PART = 1e100
"""A part that is larger counts as this: a user's function gives any finite number, and squares must stay finite."""


def token_rewards(rewards: Tensor, mask: Tensor, penalty: Tensor | None = None) -> Tensor:
    """Return the verdict at each row's last sampled token, less a penalty at every token.

    Args:
        rewards: (rows,), one verdict per row.
        mask: (rows, tokens).
        penalty: (rows, tokens), for example the KL coefficient times k1; None for none.
    """
    at_last = torch.where(last_tokens(mask), rewards[:, None], 0.0)
    return at_last if penalty is None else at_last - torch.where(mask, penalty, 0.0)


def last_tokens(mask: Tensor) -> Tensor:
    """Return True at each row's last sampled token."""
    after = torch.zeros_like(mask)
    after[:, :-1] = mask[:, 1:]
    return mask & ~after


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lambda_: float
) -> tuple[Tensor, Tensor]:
    """Return GAE advantages and returns (Schulman et al. 2016, eq. 16).

    delta_t = r_t + gamma V_{t+1} - V_t,  A_t = delta_t + gamma lambda A_{t+1},  R_t = A_t + V_t.
    The last token has no bootstrap, whether it is an EOS or the length cap: the episode is the
    prefix.

    Args:
        rewards: (rows, tokens).
        values: (rows, tokens); V_t is read where token t is predicted, the first at the last
            prompt token.
        mask: (rows, tokens).

    Returns:
        advantages and returns on the rewards' own scale, both (rows, tokens), 0 outside the mask.
    """
    values = torch.where(mask, values, 0.0)
    rewards = torch.where(mask, rewards, 0.0)
    advantages = torch.zeros_like(values)
    next_advantage = torch.zeros_like(values[:, 0])
    next_value = torch.zeros_like(next_advantage)
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantages[:, t] = torch.where(mask[:, t], delta + gamma * lambda_ * next_advantage, 0.0)
        next_advantage = advantages[:, t]
        next_value = values[:, t]
    return advantages, advantages + values


def group_advantages(
    rewards: Sequence[float],
    groups: Sequence[int],
    baseline: Literal["mean", "leave_one_out"],
    floor: float | None,
) -> list[float]:
    """Return each row's reward less its group's baseline.

    A_i = r_i - mean(r) with "mean"; A_i = r_i - mean of the others with "leave_one_out" (RLOO, Ahmadian et al. 2024,
    eq. 8). With `floor`, divided by std(r) + floor (GRPO, Shao et al. 2024, section 4.1.2), std unbiased. A row that is
    alone in its group gets 0: there is nothing to compare it with.

    Args:
        groups: the group of each row; rows of a group need not be neighbours, groups may differ in size.
        floor: added to the standard deviation; None not to divide at all.
    """
    members = by_group(rewards, groups)
    advantages = []
    for reward, group in zip(rewards, groups, strict=True):
        peers = members[group]
        count, mean = len(peers), sum(peers) / len(peers)
        advantage = reward - mean
        if count == 1 or min(peers) == max(peers):
            advantage = 0.0  # exactly: the mean of equal numbers may round
        elif floor is not None:
            advantage /= (sum((each - mean) ** 2 for each in peers) / (count - 1)) ** 0.5 + floor
        elif baseline == "leave_one_out":
            advantage *= count / (count - 1)
        advantages.append(advantage)
    return advantages


def advantages_by_parts(
    parts: Mapping[str, Sequence[float]],
    weights: Mapping[str, float],
    groups: Sequence[int],
    floor: float,
) -> list[float]:
    """Return each row's advantage with every part of its reward standardised by itself (GDPO, Liu et al. 2026).

    A_k = (r_k - mean of the group) / (std of the group + floor) for each part k, A = sum of w_k A_k, and the result
    (A - mean) / (std + floor) over all rows of the iteration. Parts on other scales so keep their weights.

    Args:
        parts: by name, one value per row; a part that no row has counts as 0 everywhere.
        weights: by name.
        groups: the group of each row.
        floor: added to each standard deviation.
    """
    summed = [0.0] * len(groups)
    for name, weight in weights.items():
        if name in parts:
            bounded = [max(-LARGEST_PART, min(LARGEST_PART, part)) for part in parts[name]]
            standard = group_advantages(bounded, groups, "mean", floor)
            summed = [total + weight * part for total, part in zip(summed, standard, strict=True)]
    return group_advantages(summed, [0] * len(groups), "mean", floor)


def moments(x: Tensor, mask: Tensor) -> Tensor:
    """Return sum, sum of squares and count of x in the mask: float64, shape (3,), per rank."""
    values = x[mask].double()
    return torch.stack([values.sum(), values.square().sum(), mask.sum().double()])


def whiten(x: Tensor, mask: Tensor, moments: Tensor, floor: float) -> tuple[Tensor, bool]:
    """Subtract the mean and divide by the deviation of `moments`; 0 outside the mask.

    The deviation never counts as less than `floor`: a batch of equal advantages would otherwise turn rounding noise
    into advantages of size 1.

    Returns:
        whitened x and whether the floor took effect.
    """
    total, squares, count = moments.tolist()
    mean = total / max(count, 1.0)
    deviation = max(squares / max(count, 1.0) - mean * mean, 0.0) ** 0.5
    return torch.where(mask, (x - mean) / max(deviation, floor), 0.0), deviation < floor
