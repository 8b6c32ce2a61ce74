"""The objectives: the record of each `algorithm.name` as arguments of the pure functions.

There is one policy loss, one estimator of advantages and one baseline of groups. A record
(`common/config/objectives.py`) is a choice of their arguments; docs/objectives.md has the formulas:

    name                whitened   ratio        divided by                             critic
    gae                 yes        per token    tokens                                 yes
    tppo                yes        per token    tokens                                 yes
    appo                yes        per prefix   prefixes                               yes, one value
    grpo                no         per token    tokens                                 no
    dr_grpo             no         per token    prefixes × most tokens of a prefix     no
    rloo                no         per token    tokens                                 no
    reinforce_baseline  yes        per token    tokens                                 no
    prime               yes        per token    tokens                                 no

A function may give the advantages in place of the baseline: that of a record which a package adds,
or `algorithm.advantage_function`, a user's own. `algorithm.loss_function` takes the place of the
surrogate under every name (`loss_function.py`).

Process rewards of an implicit reward model (`[implicit_reward]`) are a second source under every
name. With a critic they are rewards of tokens beside the outcome; without one each source has a
baseline and a discount of its own, and the advantage is the sum of their returns. Scores of steps
(`scorer.prm.placement = "step"`) are rewards of tokens under every name, without a critic less a
baseline of their own.

Without a critic, values are 0 and gamma = lambda = 1: GAE is then the sum of the token rewards
still to come.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from prefixrl.common.config.algorithm import AlgorithmConfig
from prefixrl.common.config.foreign import user_function
from prefixrl.common.config.implicit_reward import ImplicitRewardConfig
from prefixrl.common.config.workers.process_model import ProcessModelConfig
from prefixrl.common.errors import ConfigError
from prefixrl.learner.models.batch import PreparedMicroBatch
from prefixrl.learner.training import loss_function
from prefixrl.learner.training.advantages import (
    advantages_by_parts,
    gae,
    group_advantages,
    token_rewards,
)
from prefixrl.learner.training.implicit_reward import BaselineForm
from prefixrl.learner.training.ppo import Aggregation, PolicySettings, kl_estimate, units

STD_FLOOR = 1e-6
"""Added to the deviation of a group's rewards."""


@dataclass(frozen=True)
class RowFunction:
    """A function (rewards, groups) -> advantages that is not of this software."""

    label: str
    """Its name in errors."""
    function: Callable[[list[float], list[int]], object]
    path: Path
    """Its file, for the line of an error."""

    def advantages(self, rewards: Sequence[float], groups: Sequence[int]) -> list[float]:
        """Return the advantage of each row; raises ConfigError where they are not numbers."""
        try:
            with loss_function.time_watched(self.label, f"{len(rewards)} rewards"):
                returned = self.function(list(rewards), list(groups))
        except BaseException as error:  # whatever it raises is its own: signals raise nothing here
            reason = user_function.explain(error, self.path)
            raise ConfigError(f"{self.label} failed: {reason}") from error
        values = returned.tolist() if hasattr(returned, "tolist") else returned
        if not isinstance(values, Sequence) or len(values) != len(rewards):
            kind = type(returned).__name__
            size = f"{len(values)} values" if isinstance(values, Sequence) else kind
            raise ConfigError(
                f"{self.label} returned {size}; expected a list of {len(rewards)}, one per row"
            )
        advantages = [user_function.number(value) for value in values]
        for row, advantage in enumerate(advantages):
            if not math.isfinite(advantage):
                value = advantage if math.isinf(advantage) else values[row]
                raise ConfigError(
                    f"{self.label} returned {value!r:.100} for row {row} (reward {rewards[row]}, "
                    f"group {groups[row]}); advantages are finite numbers"
                )
        return advantages


@dataclass(frozen=True)
class Objective:
    """An objective resolved into the arguments of the pure functions."""

    baseline: Literal["critic", "mean", "leave_one_out", "function"]
    std_floor: float | None
    """Added to the deviation that rewards are divided by; None: they are not divided."""
    is_one_group: bool
    """True if all rows of the iteration count as one group."""
    part_weights: Mapping[str, float]
    """Weights of the parts that are standardised each by itself; empty: the reward is, as a whole."""
    gamma: float
    lambda_: float
    whiten_floor: float | None
    """None: advantages are not whitened."""
    kl_in_reward: float
    row_tokens: float | None
    """A row's weight in the denominator, whatever its length; None: tokens (or rows) are counted."""
    value_clip: float
    policy: PolicySettings
    function: RowFunction | None = None
    """The function of the user or of a package; only with the baseline "function"."""
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
    part_weights: Mapping[str, float] | None = None,
) -> Objective:
    """Resolve the objective of a run.

    Args:
        algorithm: the section.
        sampled_tokens: the most tokens a row may have.
        implicit_reward: the section, where there is one.
        prm: the process reward model, where there is one.
        part_weights: `reward.weights`, for an objective that takes parts.
    """
    record = algorithm.record
    objective = Objective(
        baseline="function" if algorithm.has_function else record.baseline,
        std_floor=STD_FLOOR if record.divides_by_deviation else None,
        is_one_group=algorithm.zscore == "buffer",
        part_weights=(part_weights or {}) if algorithm.zscore == "parts" else {},
        gamma=algorithm.gamma,
        lambda_=algorithm.gae_lambda if record.has_lambda else 1.0,
        whiten_floor=algorithm.whiten_floor if algorithm.is_whitened else None,
        kl_in_reward=algorithm.kl if algorithm.kl_placement == "reward" else 0.0,
        row_tokens=float(sampled_tokens) if record.divisor == "longest_row" else None,
        value_clip=algorithm.value_clip,
        policy=_policy_settings(algorithm),
        function=_row_function(algorithm),
    )
    return _with_process_rewards(objective, algorithm, implicit_reward, prm)


def _policy_settings(algorithm: AlgorithmConfig) -> PolicySettings:
    record = algorithm.record
    policy = PolicySettings(
        correction=algorithm.correction,
        clip=algorithm.clip,
        importance_cap=algorithm.importance_cap,
        aggregation="sequence" if record.divisor == "rows" else algorithm.aggregation,
        entropy=algorithm.entropy,
        kl_in_loss=algorithm.kl if algorithm.kl_placement == "loss" else 0.0,
        kl_estimator=algorithm.kl_estimator,
        clip_high=algorithm.clip_high,
        dual_clip=algorithm.dual_clip or math.inf,
        ratio=algorithm.ratio_used,
        importance_ratio=algorithm.importance_ratio,
        is_one_action=record.is_one_action,
        above_cap=algorithm.importance_above_cap,
        bound_ratio=algorithm.bound_ratio or math.inf,
    )
    if algorithm.loss_function is None:
        return policy
    # The function takes the place of the surrogate: it corrects and bounds as it likes.
    function = loss_function.load(algorithm.loss_function)
    return replace(policy, correction="none", bound_ratio=math.inf, loss_function=function)


def _row_function(algorithm: AlgorithmConfig) -> RowFunction | None:
    if algorithm.advantage_function is not None:
        ref = algorithm.advantage_function
        path = user_function.file_of(ref)
        return RowFunction(f"algorithm.advantage_function = {ref!r}", user_function.load(ref), path)
    function = algorithm.record.function
    if function is None:
        return None
    path = Path(getattr(inspect.getmodule(function), "__file__", None) or "")
    return RowFunction(f"the objective algorithm.name = {algorithm.name!r}", function, path)


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
    # Outcomes and scores of steps share one weight against the implicit rewards.
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
    if objective.std_floor is not None:
        return "zscore"
    match objective.baseline:
        case "critic":
            return "none"
        case "mean":
            return "mean"
        case "leave_one_out":
            return leave_one_out
        case "function":
            raise AssertionError("the config refuses rewards of tokens with a function")


def row_rewards(
    objective: Objective,
    rewards: Sequence[float],
    groups: Sequence[int],
    parts: Mapping[str, Sequence[float]] | None = None,
) -> list[float]:
    """Return each row's reward: its verdict with a critic, else its verdict less its baseline.

    Raises:
        ConfigError: a function failed, or did not return a finite number per row.
    """
    if objective.baseline == "critic":
        return list(rewards)
    if objective.baseline == "function":
        assert objective.function is not None, "resolve sets both"
        return objective.function.advantages(rewards, groups)
    if objective.part_weights:
        assert objective.std_floor is not None, "the config has it with grpo alone"
        return advantages_by_parts(parts or {}, objective.part_weights, groups, objective.std_floor)
    row_groups = [0] * len(groups) if objective.is_one_group else groups
    return group_advantages(rewards, row_groups, objective.baseline, objective.std_floor)


def estimate(
    objective: Objective, micro_batch: PreparedMicroBatch, rewards: Tensor
) -> PreparedMicroBatch:
    """Return a copy with advantages, before whitening, and the returns that the critic learns.

    Args:
        rewards: (rows,), of `row_rewards`.
    """
    mask = micro_batch.batch.mask
    penalty = None
    # A KL in the reward is measured at p, once: it has no gradient.
    if micro_batch.reference is not None and objective.kl_in_reward != 0.0:
        penalty = objective.kl_in_reward * kl_estimate(
            micro_batch.proximal, micro_batch.reference, "k1"
        )
    values = torch.where(value_mask(objective, mask), micro_batch.old_values, 0.0)
    per_token = token_rewards(objective.outcome_coefficient * rewards, mask, penalty)
    if micro_batch.steps is not None:
        per_token = per_token + micro_batch.steps
    has_critic = objective.baseline == "critic"
    if micro_batch.process is not None and has_critic:
        per_token = per_token + micro_batch.process
    advantages, returns = gae(per_token, values, mask, objective.gamma, objective.lambda_)
    if micro_batch.process is not None and not has_critic:
        # Without a critic each source is discounted by itself.
        process, _ = gae(micro_batch.process, values, mask, objective.process_gamma, 1.0)
        advantages = advantages + process
    # The row is one action, so every token has the advantage of the first.
    if objective.policy.is_one_action:
        advantages = torch.where(mask, advantages[:, :1], 0.0)
    return replace(micro_batch, advantages=advantages, returns=returns)


def value_mask(objective: Objective, mask: Tensor) -> Tensor:
    """Return the positions of the critic's values: one for each action."""
    return units(mask, "prefix" if objective.policy.is_one_action else "token")


def denominators(objective: Objective, micro_batch: PreparedMicroBatch) -> Tensor:
    """Return a micro-batch's share of policy and value denominator: float64, shape (2,)."""
    mask = micro_batch.batch.mask
    aggregation = objective.policy.aggregation
    if objective.row_tokens is not None:
        policy = mask.any(dim=1).sum() * objective.row_tokens
    else:
        policy = _count(mask, aggregation)
    value = _count(value_mask(objective, mask), aggregation)
    return torch.stack([policy.double(), value.double()])


def _count(mask: Tensor, aggregation: Aggregation) -> Tensor:
    return mask.sum() if aggregation == "token" else mask.any(dim=1).sum()
