"""The objectives: each `algorithm.name` as arguments of the pure functions.

There is one policy loss, one estimator of advantages and one baseline of groups. A name is a choice of their arguments
(`docs/objectives.md` has the formulas):

    name                advantage of token t                     ratio          divided by
    gae, tppo           GAE(gamma, lambda) with a critic         per token      tokens (or rows)
    appo                R - V(prompt)                            per prefix     rows
    grpo                (r - mean) / std                         per token      tokens (or rows)
    dr_grpo             r - mean                                 per token      rows x most tokens of a prefix
    rloo                r - mean of the others                   per token      tokens (or rows)
    reinforce_baseline  r - mean, whitened over the iteration    per token      tokens (or rows)

`prime` is rloo with process rewards and whitening. `algorithm.advantage_function`, a user's own, takes the place of the
baseline in the last four, `algorithm.loss_function` that of the surrogate under every name (`loss_function.py`).

Process rewards of an implicit reward model (`[implicit_reward]`) are a second source under every name. With a critic
they are rewards of tokens beside the outcome; without one each source has a baseline and a discount of its own, and the
advantage is the sum of their returns. Scores of steps (`scorer.prm.placement = "step"`) are rewards of tokens
under every name, without a critic less a baseline of their own.

Without a critic, values are 0 and gamma = lambda = 1: GAE is then the sum of the token rewards still to come.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from prefixrl.common.config.algorithm import AlgorithmConfig
from prefixrl.common.config.foreign import user_function
from prefixrl.common.config.step_rewards import ImplicitRewardConfig, ProcessModelConfig
from prefixrl.common.errors import ConfigError
from prefixrl.learner.models.batch import PreparedMicroBatch
from prefixrl.learner.training import loss_function
from prefixrl.learner.training.advantages import gae, group_advantages, token_rewards
from prefixrl.learner.training.implicit_reward import BaselineForm
from prefixrl.learner.training.ppo import (
    Bounds,
    PolicySettings,
    Ratio,
    kl_estimate,
    log_ratios,
    units,
)

STD_FLOOR = 1e-6
"""Added to the deviation of a group's rewards."""


@dataclass(frozen=True)
class Objective:
    """An objective's name resolved into the arguments of the pure functions."""

    baseline: Literal["critic", "mean", "leave_one_out", "function"]
    std_floor: float | None
    """Added to the deviation that rewards are divided by; None: they are not divided."""
    is_one_group: bool
    """True if all rows of the iteration count as one group."""
    gamma: float
    lambda_: float
    whiten_floor: float | None
    """None: advantages are not whitened."""
    kl_in_reward: float
    row_tokens: float | None
    """A row's weight in the denominator, whatever its length; None: tokens (or rows) are counted."""
    value_clip: float
    policy: PolicySettings
    counts_masked: bool = False
    """True if N counts what a mask leaves out."""
    has_vtrace: bool = False
    """True if the critic's targets are V-trace's."""
    second_moment: float | None = None
    """Bound of M2PO, for `ppo.second_moment_limit`; None: off."""
    advantage_function: str | None = None
    """`file.py:name` of the user's function; only with the baseline "function"."""
    outcome_coefficient: float = 1.0
    step_coefficient: float = 0.0
    """Weight of scores of steps that are rewards of their own; 0: there are none."""
    process_gamma: float = 1.0
    process_baseline: BaselineForm = "none"


def resolve(
    algorithm: AlgorithmConfig,
    sampled_tokens: int,
    implicit_reward: ImplicitRewardConfig | None = None,
    prm: ProcessModelConfig | None = None,
) -> Objective:
    """Resolve the objective of a run; `sampled_tokens` is the most tokens a row may have."""
    name = algorithm.name
    policy = PolicySettings(
        correction=algorithm.correction,
        clip=algorithm.clip,
        importance_cap=algorithm.importance_cap,
        aggregation="sequence" if name == "appo" else algorithm.aggregation,
        entropy=algorithm.entropy,
        kl_in_loss=algorithm.kl if algorithm.kl_placement == "loss" else 0.0,
        kl_estimator=algorithm.kl_estimator,
        clip_high=algorithm.clip_high,
        dual_clip=_limit(algorithm.dual_clip),
        ratio=algorithm.ratio_used,
        importance_ratio=algorithm.importance_ratio,
        is_one_action=name == "appo",
        above_cap=algorithm.importance_above_cap,
        is_interpolated=algorithm.proximal == "interpolated",
        bounds=Bounds(
            *map(
                _limit,
                (algorithm.bound_ratio, algorithm.bound_probability, algorithm.bound_negatives),
            )
        ),
    )
    if algorithm.loss_function is not None:
        own = loss_function.load(algorithm.loss_function)
        policy = replace(policy, correction="none", bounds=Bounds(), own=own)
    baseline: Literal["critic", "mean", "leave_one_out", "function"] = "critic"
    if algorithm.advantage_function is not None:
        baseline = "function"
    elif not algorithm.has_critic:
        baseline = "leave_one_out" if name in ("rloo", "prime") else "mean"
    objective = Objective(
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
        counts_masked=algorithm.count_masked,
        has_vtrace=algorithm.critic_targets == "vtrace",
        second_moment=algorithm.bound_second_moment,
        advantage_function=algorithm.advantage_function,
    )
    return _with_process_rewards(objective, algorithm, implicit_reward, prm)


def _with_process_rewards(
    objective: Objective,
    algorithm: AlgorithmConfig,
    implicit_reward: ImplicitRewardConfig | None,
    prm: ProcessModelConfig | None,
) -> Objective:
    """Return the objective with weights, discounts and baseline of the other sources of reward."""
    if prm is not None and prm.placement == "step":
        objective = replace(
            objective,
            outcome_coefficient=prm.outcome_coefficient,
            step_coefficient=prm.coefficient,
            process_baseline=_process_baseline(objective, "paper"),
        )
    if implicit_reward is None:
        return objective
    weight = implicit_reward.outcome_coefficient
    return replace(
        objective,
        gamma=algorithm.gamma if algorithm.has_critic else implicit_reward.outcome_gamma,
        outcome_coefficient=weight * objective.outcome_coefficient,
        step_coefficient=weight * objective.step_coefficient,
        process_gamma=implicit_reward.gamma,
        process_baseline=_process_baseline(objective, implicit_reward.baseline),
    )


def _process_baseline(objective: Objective, leave_one_out: BaselineForm) -> BaselineForm:
    forms: dict[str, BaselineForm] = {
        "critic": "none",
        "leave_one_out": leave_one_out,
        "mean": "mean",
    }
    return "zscore" if objective.std_floor is not None else forms[objective.baseline]


def _limit(bound: float | None) -> float:
    return math.inf if bound is None else bound


def row_rewards(
    objective: Objective, rewards: Sequence[float], groups: Sequence[int]
) -> list[float]:
    """Return each row's reward: its verdict with a critic, else its verdict less its baseline.

    Raises:
        ConfigError: the user's function failed, or did not return a finite number per row.
    """
    if objective.baseline == "critic":
        return list(rewards)
    if objective.baseline == "function":
        assert objective.advantage_function is not None, "resolve sets both"
        return _call(objective.advantage_function, rewards, groups)
    whose = [0] * len(groups) if objective.is_one_group else groups
    return group_advantages(rewards, whose, objective.baseline, objective.std_floor)


def _call(function_ref: str, rewards: Sequence[float], groups: Sequence[int]) -> list[float]:
    """Return the advantages of the user's function."""
    what = f"algorithm.advantage_function = {function_ref!r}"
    try:
        with loss_function.watched(what, f"{len(rewards)} rewards"):
            given = user_function.load(function_ref)(list(rewards), list(groups))
    except BaseException as error:  # whatever it raises is its own: signals raise nothing here
        reason = user_function.explain(error, user_function.file_of(function_ref))
        raise ConfigError(f"{what} failed: {reason}") from error
    values = given.tolist() if hasattr(given, "tolist") else given
    if not isinstance(values, Sequence) or len(values) != len(rewards):
        size = f"{len(values)} values" if isinstance(values, Sequence) else type(given).__name__
        raise ConfigError(f"{what} returned {size}; expected a list of {len(rewards)}, one per row")
    advantages = [user_function.number(value) for value in values]
    for row, advantage in enumerate(advantages):
        if not math.isfinite(advantage):
            shown = advantage if math.isinf(advantage) else values[row]
            raise ConfigError(
                f"{what} returned {shown!r:.100} for row {row} (reward {rewards[row]}, group {groups[row]}); "
                f"advantages are finite numbers"
            )
    return advantages


def estimate(
    objective: Objective, micro_batch: PreparedMicroBatch, rewards: Tensor
) -> PreparedMicroBatch:
    """Return a copy with advantages, before whitening, and the returns that the critic learns.

    Args:
        rewards: (rows,), of `row_rewards`.
    """
    mask, penalty = micro_batch.batch.mask, None
    if micro_batch.reference is not None and objective.kl_in_reward != 0.0:
        penalty = objective.kl_in_reward * kl_estimate(
            micro_batch.proximal, micro_batch.reference, "k1"
        )
    values = torch.where(value_mask(objective, mask), micro_batch.old_values, 0.0)
    found = token_rewards(objective.outcome_coefficient * rewards, mask, penalty)
    has_own_return = micro_batch.process is not None and objective.baseline != "critic"
    if micro_batch.steps is not None:
        found = found + micro_batch.steps
    if micro_batch.process is not None and not has_own_return:
        found = found + micro_batch.process
    importance = _importance(objective, micro_batch) if objective.has_vtrace else None
    advantages, returns = gae(found, values, mask, objective.gamma, objective.lambda_, importance)
    if micro_batch.process is not None and has_own_return:
        advantages = (
            advantages + gae(micro_batch.process, values, mask, objective.process_gamma, 1.0)[0]
        )
    if objective.policy.is_one_action:
        advantages = torch.where(mask, advantages[:, :1], 0.0)
    return replace(micro_batch, advantages=advantages, returns=returns)


def _importance(objective: Objective, micro_batch: PreparedMicroBatch) -> Tensor:
    """Return p/mu of each action: at every token, or once at the first; 1 elsewhere."""
    mask = micro_batch.batch.mask
    ratio: Ratio = "prefix" if objective.policy.is_one_action else "token"
    importance = log_ratios(micro_batch.proximal, micro_batch.batch.behaviour, mask, ratio).exp()
    return torch.where(value_mask(objective, mask), importance, 1.0)


def value_mask(objective: Objective, mask: Tensor) -> Tensor:
    """Return the positions of the critic's values: one for each action."""
    return units(mask, "prefix" if objective.policy.is_one_action else "token")


def denominators(objective: Objective, micro_batch: PreparedMicroBatch) -> Tensor:
    """Return a micro-batch's share of policy and value denominator: float64, shape (2,)."""
    kept = micro_batch.batch.mask if objective.counts_masked else micro_batch.kept
    asked = value_mask(objective, micro_batch.batch.mask)
    if objective.row_tokens is not None:
        policy = kept.any(dim=1).sum() * objective.row_tokens
    else:
        policy = _count(kept, objective.policy.aggregation)
    return torch.stack([policy.double(), _count(asked, objective.policy.aggregation).double()])


def _count(mask: Tensor, aggregation: Literal["token", "sequence"]) -> Tensor:
    return mask.sum() if aggregation == "token" else mask.any(dim=1).sum()
