"""What each `algorithm.name` stands for, in the terms of the pure functions; docs/objectives.md has the formulas.

There is one policy loss, one estimator of advantages and one baseline of groups. A name is a choice of their arguments:

    name                advantage of token t                     ratio          divided by
    gae, tppo           GAE(gamma, lambda) with a critic         per token      tokens (or rows)
    appo                R - V(prompt)                            per prefix     rows
    grpo                (r - mean) / std                         per token      tokens (or rows)
    dr_grpo             r - mean                                 per token      rows x most tokens of a prefix
    rloo                r - mean of the others                   per token      tokens (or rows)
    reinforce_baseline  r - mean, whitened over the iteration    per token      tokens (or rows)

`algorithm.advantage_function`, a user's own, takes the place of the baseline in the last four.

Without a critic, values are 0 and gamma = lambda = 1: GAE is then the sum of the token rewards still to come.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from prefixrl.common import user_function
from prefixrl.common.algorithm import AlgorithmConfig
from prefixrl.common.errors import TrainingFault
from prefixrl.learner.advantages import gae, group_advantages, token_rewards
from prefixrl.learner.batch import Piece
from prefixrl.learner.ppo import PolicySettings, kl_estimate, units

STD_FLOOR = 1e-6
"""Added to the deviation of a group's rewards."""


@dataclass(frozen=True)
class Objective:
    """A name with its options."""

    baseline: Literal["critic", "mean", "leave_one_out", "function"]
    std_floor: float | None
    """What is added to the deviation rewards are divided by; None not to divide."""
    is_one_group: bool
    """Whether all rows of the iteration count as one group."""
    gamma: float
    lambda_: float
    whiten_floor: float | None
    """None not to whiten."""
    kl_in_reward: float
    row_tokens: float | None
    """What a row counts in the denominator whatever its length; None when tokens (or rows) are counted."""
    value_clip: float
    policy: PolicySettings
    advantage_function: str | None = None
    """Place of the user's function; given with the baseline "function" only."""


def resolve(algorithm: AlgorithmConfig, sampled_tokens: int) -> Objective:
    """The objective a run asks for; `sampled_tokens` is the most tokens a row may have."""
    name = algorithm.name
    granularity: Literal["token", "product", "geometric_mean"] = "token"
    if name == "appo":
        granularity = "geometric_mean" if algorithm.length_normalised else "product"
    policy = PolicySettings(
        correction=algorithm.correction,
        clip=algorithm.clip,
        importance_cap=algorithm.importance_cap,
        aggregation="sequence" if name == "appo" else algorithm.aggregation,
        entropy=algorithm.entropy,
        kl_in_loss=algorithm.kl if algorithm.kl_placement == "loss" else 0.0,
        kl_estimator=algorithm.kl_estimator,
        clip_high=algorithm.clip_high,
        dual_clip=algorithm.dual_clip,
        granularity=granularity,
    )
    baseline: Literal["critic", "mean", "leave_one_out", "function"] = "critic"
    if algorithm.advantage_function is not None:
        baseline = "function"
    elif not algorithm.has_critic:
        baseline = "leave_one_out" if name == "rloo" else "mean"
    return Objective(
        baseline=baseline,
        std_floor=STD_FLOOR if name == "grpo" else None,
        is_one_group=algorithm.zscore == "buffer",
        gamma=algorithm.gamma,
        lambda_=algorithm.gae_lambda if name in ("gae", "tppo") else 1.0,
        whiten_floor=algorithm.whiten_floor if algorithm.is_whitened else None,
        kl_in_reward=algorithm.kl if algorithm.kl_placement == "reward" else 0.0,
        row_tokens=float(sampled_tokens) if name == "dr_grpo" else None,
        value_clip=algorithm.value_clip,
        policy=policy,
        advantage_function=algorithm.advantage_function,
    )


def row_rewards(
    objective: Objective, rewards: Sequence[float], groups: Sequence[int]
) -> list[float]:
    """What each row of the iteration earns: its verdict with a critic, else what it is above its baseline.

    Raises:
        TrainingFault: a user's function failed, or gave something else than a finite number per row.
    """
    if objective.baseline == "critic":
        return list(rewards)
    if objective.baseline == "function":
        assert objective.advantage_function is not None, "resolve sets both"
        return _ask(objective.advantage_function, rewards, groups)
    whose = [0] * len(groups) if objective.is_one_group else groups
    return group_advantages(rewards, whose, objective.baseline, objective.std_floor)


def _ask(place: str, rewards: Sequence[float], groups: Sequence[int]) -> list[float]:
    """Advantages by the user's function."""
    what = f"algorithm.advantage_function = {place!r}"
    try:
        given = user_function.load(place)(list(rewards), list(groups))
    except (Exception, SystemExit) as error:
        said = user_function.explain(error, user_function.file_of(place))
        raise TrainingFault(f"{what} failed: {said}") from error
    values = given.tolist() if hasattr(given, "tolist") else given
    if not isinstance(values, Sequence) or len(values) != len(rewards):
        size = f"{len(values)} values" if isinstance(values, Sequence) else type(given).__name__
        raise TrainingFault(
            f"{what} returned {size}; expected a list of {len(rewards)}, one per row"
        )
    advantages = [user_function.number(value) for value in values]
    for row, advantage in enumerate(advantages):
        if not math.isfinite(advantage):
            shown = advantage if math.isinf(advantage) else values[row]
            raise TrainingFault(
                f"{what} returned {shown!r:.100} for row {row} (reward {rewards[row]}, group {groups[row]}); advantages "
                "are finite numbers"
            )
    return advantages


def estimate(objective: Objective, piece: Piece, rewards: Tensor) -> Piece:
    """The piece with its advantages, before whitening, and the returns its critic learns.

    Args:
        rewards: (rows,), of `row_rewards`.
    """
    mask, penalty = piece.batch.mask, None
    if piece.reference is not None and objective.kl_in_reward != 0.0:
        penalty = objective.kl_in_reward * kl_estimate(piece.proximal, piece.reference, "k1")
    values = torch.where(value_mask(objective, mask), piece.old_values, 0.0)
    advantages, returns = gae(
        token_rewards(rewards, mask, penalty), values, mask, objective.gamma, objective.lambda_
    )
    if objective.policy.granularity != "token":
        advantages = torch.where(mask, advantages[:, :1], 0.0)
    return replace(piece, advantages=advantages, returns=returns)


def value_mask(objective: Objective, mask: Tensor) -> Tensor:
    """Where the critic is asked and taught: one value for each action."""
    return units(mask, objective.policy.granularity)


def denominators(objective: Objective, piece: Piece) -> Tensor:
    """What one piece adds to the denominators of the policy and the value loss: float64, shape (2,)."""
    kept, asked = piece.kept, value_mask(objective, piece.batch.mask)
    if objective.row_tokens is not None:
        policy = kept.any(dim=1).sum() * objective.row_tokens
    else:
        policy = _count(kept, objective.policy.aggregation)
    return torch.stack([policy.double(), _count(asked, objective.policy.aggregation).double()])


def _count(mask: Tensor, aggregation: Literal["token", "sequence"]) -> Tensor:
    return mask.sum() if aggregation == "token" else mask.any(dim=1).sum()
