"""Process rewards of an iteration: a model scores its tokens, and learns its outcomes.

    rows of all ranks ──▶ log pi_phi - log pi_ref ──▶ / largest return ──▶ - baseline of the group ──▶ process rewards
                               ▲                            (max over ranks)      (mean mu of every row, all ranks)
                               └── one step per minibatch on the outcomes: after the scoring, or before it

The formulas are in `implicit_reward.py`. Every rank calls the functions here for the same minibatches.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, islice

import torch
from torch import Tensor

from prefixrl.common.config.implicit_reward import ImplicitRewardConfig
from prefixrl.common.errors import TrainingFault
from prefixrl.learner.models.batch import IterationData, MicroBatches, PreparedMicroBatch
from prefixrl.learner.models.distributed import gather_over_ranks, sum_over_ranks
from prefixrl.learner.models.model import Models
from prefixrl.learner.training import implicit_reward as implicit
from prefixrl.learner.training.advantages import gae, token_rewards
from prefixrl.learner.training.figures import Report, model_figures, model_report
from prefixrl.learner.training.objectives import Objective, row_rewards
from prefixrl.learner.training.step_scores import (
    StepMoments,
    row_steps,
    step_baselines,
    step_moments,
)


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
    _check_outcomes(data)
    micro_batches = list(chain.from_iterable(measured))
    # Measured once: within an iteration the reference does not change, while the reward model may.
    references = [models.forward_reward_reference(each.batch) for each in micro_batches]
    figures: Report = {}
    if settings.update == "before":
        figures |= _learn(models, settings.beta, measured, references, data.outcomes)
    scored = [
        _score(models, settings, micro_batch, reference)
        for micro_batch, reference in zip(micro_batches, references, strict=True)
    ]
    if settings.update == "after":
        figures |= _learn(models, settings.beta, measured, references, data.outcomes)
    largest = _largest_return(scored, data.iteration)
    divisor = largest + implicit.NORM_FLOOR if settings.norm == "batch_norm" else 1.0
    means, scores = _per_row(scored, micro_batches, len(data.rewards), divisor)
    accuracy = implicit.pairwise_accuracy(scores, data.outcomes, data.groups)
    if accuracy is not None:
        figures["reward_model_accuracy"] = accuracy
    figures["process_largest_return"] = largest
    groups = [0] * len(data.groups) if objective.is_one_group else data.groups
    baselines = implicit.row_baselines(
        means, groups, objective.process_baseline, objective.std_floor or 0.0
    )
    # The baselines are means of divided rewards, so the rewards are divided first.
    rewarded = [
        _with_process(micro_batch, rewards / divisor, counted, baselines, settings.coefficient)
        for micro_batch, (rewards, counted) in zip(micro_batches, scored, strict=True)
    ]
    figures["process_advantage_ratio"] = _advantage_ratio(rewarded, data, objective)
    # Back into minibatches as they were measured.
    remaining = iter(rewarded)
    return [list(islice(remaining, len(minibatch))) for minibatch in measured], figures


def _check_outcomes(data: IterationData) -> None:
    for row, outcome in enumerate(data.outcomes):
        if not 0.0 <= outcome <= 1.0:
            raise TrainingFault(
                f"iteration {data.iteration}: row {row} has reward {outcome}; the implicit reward "
                f"model learns outcomes in [0, 1]: let reward.function return such, or leave "
                f"[implicit_reward] out"
            )


def _largest_return(scored: Sequence[tuple[Tensor, Tensor]], iteration: int) -> float:
    """Return the largest return of all ranks. A collective.

    Raises:
        TrainingFault: it is not finite; NaN and infinity are larger than any number here.
    """
    returns = [implicit.largest_return(*each) for each in scored]
    largest = float(gather_over_ranks(torch.stack(returns).amax()[None]).amax())
    if not math.isfinite(largest):
        raise TrainingFault(
            f"iteration {iteration}: scores of the implicit reward model are not finite, so its "
            f"weights are not either; resume from an older checkpoint with a smaller "
            f"implicit_reward.lr"
        )
    return largest


def with_step_rewards(
    measured: MicroBatches, data: IterationData, objective: Objective
) -> MicroBatches:
    """Return micro-batches with the scores of steps as rewards of tokens, less their baseline.

    A collective over the learner's ranks.

    Args:
        measured: [minibatch][micro-batch] of this rank.
    """
    # Each rank fills in its own rows; by the sum every rank has all of them, for the baselines.
    own_rows = torch.zeros(len(data.rewards), 3, dtype=torch.float64)
    for micro_batch in chain.from_iterable(measured):
        for row in micro_batch.rows:
            steps = row_steps(data.samples[row])
            own_rows[row] = torch.tensor(step_moments(steps), dtype=torch.float64)
    sums = sum_over_ranks(own_rows.to(measured[0][0].batch.mask.device)).tolist()
    moments = [StepMoments(*row) for row in sums]
    groups = [0] * len(data.groups) if objective.is_one_group else data.groups
    baselines = step_baselines(
        moments, groups, objective.process_baseline, objective.std_floor or 0.0
    )
    return [
        [
            replace(micro_batch, steps=_step_rewards(micro_batch, data, objective, baselines))
            for micro_batch in minibatch
        ]
        for minibatch in measured
    ]


def _step_rewards(
    micro_batch: PreparedMicroBatch,
    data: IterationData,
    objective: Objective,
    baselines: Sequence[implicit.RowBaseline],
) -> Tensor:
    rewards = torch.zeros(
        micro_batch.batch.mask.shape
    )  # filled on the host: a device takes each entry as a call
    for index, row in enumerate(micro_batch.rows):
        offset, scale = baselines[row]
        weight = objective.step_coefficient * scale
        for end, score in row_steps(data.samples[row]):
            rewards[index, end - 1] += weight * (score - offset)
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
    references: Sequence[Tensor],
    outcomes: Sequence[float],
) -> Report:
    """Take one step per minibatch; return losses and norms, means over the steps. A collective."""
    assert models.reward is not None and models.reward.trained is not None, "a model that learns"
    trained = models.reward.trained
    counts = torch.tensor(
        [sum(len(micro_batch.rows) for micro_batch in minibatch) for minibatch in measured],
        dtype=torch.float64,
        device=models.device,
    )
    losses, steps = [], []
    remaining = iter(references)
    # The loss is a mean over the rows of all ranks: their number is needed before the backward.
    for minibatch, rows in zip(measured, sum_over_ranks(counts).tolist(), strict=True):
        total = torch.zeros((), dtype=torch.float64, device=models.device)
        for index, micro_batch in enumerate(minibatch):
            reference = next(remaining)
            log_ratio = models.forward_reward(micro_batch.batch) - reference
            # A filler has no outcome: its mask is empty, and the label only has a shape.
            labels = reference.new_tensor([outcomes[row] for row in micro_batch.rows] or [0.0])
            loss = implicit.outcome_loss(
                log_ratio, micro_batch.batch.mask, labels, beta, max(rows, 1.0)
            )
            trained.backward(loss, index == len(minibatch) - 1)
            total += loss.detach().double()
        losses.append(total)
        steps.append(trained.step(0, 1))
    loss_of_steps = sum_over_ranks(torch.stack(losses)).tolist()
    reports = [
        {"reward_model_loss": loss} | model_report("reward_model", step)
        for loss, step in zip(loss_of_steps, steps, strict=True)
    ]
    return model_figures("reward_model", "reward_model_loss", reports)


def _per_row(
    scored: Sequence[tuple[Tensor, Tensor]],
    micro_batches: Sequence[PreparedMicroBatch],
    rows: int,
    divisor: float,
) -> tuple[list[float], list[float]]:
    """Return mean reward and score of every row of the iteration. A collective."""
    sums = torch.zeros(2, rows, dtype=torch.float64, device=scored[0][0].device)
    for micro_batch, (rewards, counted) in zip(micro_batches, scored, strict=True):
        if micro_batch.rows:
            index = list(micro_batch.rows)
            sums[0, index] = implicit.row_means(rewards / divisor, counted).double()
            sums[1, index] = rewards.sum(dim=1).double()
    means, scores = sum_over_ranks(sums).tolist()
    return means, scores


def _with_process(
    micro_batch: PreparedMicroBatch,
    rewards: Tensor,
    counted: Tensor,
    baselines: Sequence[implicit.RowBaseline],
    coefficient: float,
) -> PreparedMicroBatch:
    """Return a micro-batch with its process rewards, less the baseline of each row."""
    if not micro_batch.rows:
        return replace(micro_batch, process=torch.zeros_like(rewards))
    offsets, scales = rewards.new_tensor([baselines[row] for row in micro_batch.rows]).T[..., None]
    process = torch.where(counted, coefficient * scales * (rewards - offsets), 0.0)
    return replace(micro_batch, process=process)


def _advantage_ratio(
    micro_batches: Sequence[PreparedMicroBatch], data: IterationData, objective: Objective
) -> float:
    """Return mean |return| of the process rewards over that of the outcomes. A collective."""
    outcomes = row_rewards(objective, data.rewards, data.groups)
    sums = torch.zeros(2, dtype=torch.float64, device=micro_batches[0].batch.mask.device)
    for micro_batch in micro_batches:
        process = micro_batch.process
        assert process is not None, "scored"
        mask = micro_batch.batch.mask
        zeros = torch.zeros_like(process)
        verdicts = zeros.new_tensor([outcomes[row] for row in micro_batch.rows] or [0.0])
        outcome = objective.outcome_coefficient * token_rewards(verdicts, mask)
        if micro_batch.steps is not None:
            outcome = outcome + micro_batch.steps
        sources = ((process, objective.process_gamma), (outcome, objective.gamma))
        for index, (rewards, gamma) in enumerate(sources):
            sums[index] += gae(rewards, zeros, mask, gamma, 1.0)[0].abs().sum().double()
    of_process, of_outcome = sum_over_ranks(sums).tolist()
    return float(of_process / of_outcome) if of_outcome else math.nan
