"""Process rewards of an iteration: a model scores its tokens, and learns its outcomes.

    rows of all ranks ──▶ log pi_phi - log pi_ref ──▶ / largest return ──▶ - baseline of the group ──▶ process rewards
                               ▲                            (max over ranks)      (mean mu of every row, all ranks)
                               └── one step per minibatch on the outcomes: after the scoring, or before it

The formulas are in `implicit_reward.py`. Every rank calls the functions here for the same minibatches.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from prefixrl.common.config.step_rewards import ImplicitRewardConfig
from prefixrl.common.errors import TrainingFault
from prefixrl.learner.models.batch import IterationData, PreparedMicroBatch
from prefixrl.learner.models.distributed import gather_over_ranks, sum_over_ranks
from prefixrl.learner.models.model import Models
from prefixrl.learner.models.trained_model import StepReport
from prefixrl.learner.training import implicit_reward as implicit
from prefixrl.learner.training.advantages import gae, token_rewards
from prefixrl.learner.training.figures import Report
from prefixrl.learner.training.objectives import Objective, row_rewards
from prefixrl.learner.training.step_scores import (
    StepMoments,
    row_steps,
    step_baselines,
    step_moments,
)

MicroBatches = list[list[PreparedMicroBatch]]


def with_process_rewards(
    models: Models,
    settings: ImplicitRewardConfig,
    measured: MicroBatches,
    data: IterationData,
    objective: Objective,
) -> tuple[MicroBatches, Report]:
    """Score every token and train the reward model; return process rewards, and figures.

    A collective over the learner's ranks.

    Args:
        measured: [minibatch][micro-batch] of this rank.

    Raises:
        TrainingFault: an outcome is outside [0, 1], or a score is not finite.
    """
    for row, outcome in enumerate(data.outcomes):
        if not 0.0 <= outcome <= 1.0:
            raise TrainingFault(
                f"iteration {data.iteration}: row {row} has reward {outcome}; the implicit reward model learns "
                f"outcomes in [0, 1]: let reward.function return such, or leave [implicit_reward] out"
            )
    references = [[models.forward_reward_reference(each.batch) for each in own] for own in measured]
    figures: Report = {}
    if settings.update == "before":
        figures |= _learn(models, settings.beta, measured, references, data.outcomes)
    scored = [
        [
            _score(models, settings, each, reference)
            for each, reference in zip(own, theirs, strict=True)
        ]
        for own, theirs in zip(measured, references, strict=True)
    ]
    if settings.update == "after":
        figures |= _learn(models, settings.beta, measured, references, data.outcomes)
    own = torch.stack(
        [
            implicit.largest_return(rewards, counted)
            for found in scored
            for rewards, counted in found
        ]
    )
    # NaN and infinity stay.
    if not math.isfinite(largest := float(gather_over_ranks(own.amax()[None]).amax())):
        raise TrainingFault(
            f"iteration {data.iteration}: scores of the implicit reward model are not finite, so its weights are not "
            f"either; resume from an older checkpoint with a smaller implicit_reward.lr"
        )
    divisor = largest + implicit.NORM_FLOOR if settings.norm == "batch_norm" else 1.0
    means, scores = _per_row(scored, measured, len(data.rewards), divisor)
    groups = [0] * len(data.groups) if objective.is_one_group else data.groups
    baselines = implicit.row_baselines(
        means, groups, objective.process_baseline, objective.std_floor or 0.0
    )
    if (ranked := implicit.pairwise_accuracy(scores, data.outcomes, data.groups)) is not None:
        figures["reward_model_accuracy"] = ranked
    figures["process_largest_return"] = largest
    done = [
        [
            replace(
                each,
                process=_less_baseline(
                    each, rewards / divisor, counted, baselines, settings.coefficient
                ),
            )
            for each, (rewards, counted) in zip(own, found, strict=True)
        ]
        for own, found in zip(measured, scored, strict=True)
    ]
    figures["process_advantage_ratio"] = _advantage_ratio(done, data, objective)
    return done, figures


def with_step_rewards(
    measured: MicroBatches, data: IterationData, objective: Objective
) -> MicroBatches:
    """Return micro-batches with the scores of steps as rewards of tokens, less their baseline.

    A collective over the learner's ranks.

    Args:
        measured: [minibatch][micro-batch] of this rank.
    """
    found = torch.zeros(len(data.rewards), 3, dtype=torch.float64)
    for row in (row for minibatch in measured for each in minibatch for row in each.rows):
        found[row] = torch.tensor(step_moments(row_steps(data.samples[row])), dtype=torch.float64)
    sums = sum_over_ranks(found.to(measured[0][0].batch.mask.device)).tolist()
    moments = [StepMoments(int(count), *rest) for count, *rest in sums]
    groups = [0] * len(data.groups) if objective.is_one_group else data.groups
    baselines = step_baselines(
        moments, groups, objective.process_baseline, objective.std_floor or 0.0
    )
    return [
        [replace(each, steps=_placed(each, data, objective, baselines)) for each in minibatch]
        for minibatch in measured
    ]


def _placed(
    micro_batch: PreparedMicroBatch,
    data: IterationData,
    objective: Objective,
    baselines: implicit.RowBaselines,
) -> Tensor:
    rewards = torch.zeros(
        micro_batch.batch.mask.shape
    )  # filled on the host: a device takes each entry as a call
    for index, row in enumerate(micro_batch.rows):
        weight = objective.step_coefficient * baselines.scales[row]
        for end, score in row_steps(data.samples[row]):
            rewards[index, end - 1] += weight * (score - baselines.offsets[row])
    return rewards.to(micro_batch.batch.behaviour)


@torch.no_grad()
def _score(
    models: Models,
    settings: ImplicitRewardConfig,
    micro_batch: PreparedMicroBatch,
    reference: Tensor,
) -> tuple[Tensor, Tensor]:
    log_ratio = models.forward_reward(micro_batch.batch) - reference
    return implicit.process_rewards(
        log_ratio, micro_batch.batch.mask, settings.beta, settings.granularity
    )


def _learn(
    models: Models,
    beta: float,
    measured: MicroBatches,
    references: list[list[Tensor]],
    outcomes: Sequence[float],
) -> Report:
    """Take one step per minibatch; return losses and norms, means over the steps. A collective."""
    assert models.reward is not None and models.reward.trained is not None, "a model that learns"
    trained = models.reward.trained
    counts = torch.stack(
        [torch.stack([each.batch.mask.any(dim=1).sum() for each in own]).sum() for own in measured]
    )
    losses, steps = [], []
    for own, theirs, rows in zip(
        measured, references, sum_over_ranks(counts.double()).tolist(), strict=True
    ):
        total = torch.zeros((), dtype=torch.float64, device=models.device)
        for index, (each, reference) in enumerate(zip(own, theirs, strict=True)):
            log_ratio = models.forward_reward(each.batch) - reference
            labels = reference.new_tensor([outcomes[row] for row in each.rows] or [0.0])
            loss = implicit.outcome_loss(log_ratio, each.batch.mask, labels, beta, max(rows, 1.0))
            trained.backward(loss, index == len(own) - 1)
            total += loss.detach().double()
        losses.append(total)
        steps.append(trained.step(0, 1))
    return _step_figures(sum_over_ranks(torch.stack(losses)).tolist(), steps)


def _step_figures(losses: Sequence[float], steps: Sequence[StepReport]) -> Report:
    applied = [
        (loss, step.grad_norm) for loss, step in zip(losses, steps, strict=True) if step.is_applied
    ]
    dropped = float(len(steps) - len(applied))
    figures: Report = {"reward_model_steps_dropped": dropped, "reward_model_lr": steps[-1].lr}
    if applied:
        figures["reward_model_loss"] = sum(loss for loss, _ in applied) / len(applied)
        figures["reward_model_grad_norm"] = sum(norm for _, norm in applied) / len(applied)
    return figures


def _per_row(
    scored: Sequence[Sequence[tuple[Tensor, Tensor]]],
    measured: MicroBatches,
    rows: int,
    divisor: float,
) -> tuple[list[float], list[float]]:
    """Return mean reward and score of every row of the iteration. A collective."""
    found = torch.zeros(2, rows, dtype=torch.float64, device=measured[0][0].batch.mask.device)
    for own, theirs in zip(measured, scored, strict=True):
        for each, (rewards, counted) in zip(own, theirs, strict=True):
            if each.rows:
                found[0, list(each.rows)] = implicit.row_means(rewards / divisor, counted).double()
                found[1, list(each.rows)] = rewards.sum(dim=1).double()
    means, scores = sum_over_ranks(found).tolist()
    return means, scores


def _less_baseline(
    micro_batch: PreparedMicroBatch,
    rewards: Tensor,
    counted: Tensor,
    baselines: implicit.RowBaselines,
    coefficient: float,
) -> Tensor:
    if not micro_batch.rows:
        return torch.zeros_like(rewards)
    offsets = rewards.new_tensor([baselines.offsets[row] for row in micro_batch.rows])[:, None]
    scales = rewards.new_tensor([baselines.scales[row] for row in micro_batch.rows])[:, None]
    return torch.where(counted, coefficient * scales * (rewards - offsets), 0.0)


def _advantage_ratio(
    micro_batches: MicroBatches, data: IterationData, objective: Objective
) -> float:
    """Return mean |return| of the process rewards over that of the outcomes. A collective."""
    outcomes = row_rewards(objective, data.rewards, data.groups)
    sums = torch.zeros(2, dtype=torch.float64, device=micro_batches[0][0].batch.mask.device)
    for each in (each for own in micro_batches for each in own):
        assert each.process is not None, "scored"
        mask, zeros = each.batch.mask, torch.zeros_like(each.process)
        own = token_rewards(zeros.new_tensor([outcomes[row] for row in each.rows] or [0.0]), mask)
        own = objective.outcome_coefficient * own
        own = own if each.steps is None else own + each.steps
        for index, (rewards, gamma) in enumerate(
            ((each.process, objective.process_gamma), (own, objective.gamma))
        ):
            sums[index] += gae(rewards, zeros, mask, gamma, 1.0)[0].abs().sum().double()
    of_process, of_outcome = sum_over_ranks(sums).tolist()
    return float(of_process / of_outcome) if of_outcome else math.nan
