"""One iteration of PPO on every rank: B scored groups in, a few steps, figures out.

    rewards ──baseline of the group (or none)──┐
    rows ──plan──▶ micro-batches ──measure──▶ p, reference, V ──▶ GAE ──whiten over all ranks──▶ A, R
      └── reward model, where there is one ──▶ process rewards ───────────┘                                 │
                                                                                                        │
                              for each epoch, for each minibatch: backward per micro-batch, one step ◀──┘

Proximal logprobs, values and advantages are computed once and stay fixed for the iteration. Proximal logprobs of
the first minibatch that nothing needs before its loss are those of its first forward in training. The ranks
communicate only in the moments of the whitening, in the denominators, inside DeepSpeed and in the sums of the
figures. Every decision to drop a step or to leave steps out is taken from reduced values, so all ranks decide alike.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from prefixrl.common.config.algorithm import AlgorithmConfig
from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import TrainingFault
from prefixrl.learner.models.batch import (
    IterationData,
    MicroBatches,
    PreparedMicroBatch,
    Sample,
    filler_row,
    pad_lines,
)
from prefixrl.learner.models.distributed import sum_over_ranks
from prefixrl.learner.models.model import Models
from prefixrl.learner.training import ppo
from prefixrl.learner.training.advantages import moments, whiten
from prefixrl.learner.training.figures import (
    IterationFacts,
    IterationMetrics,
    Report,
    StepSums,
    report,
)
from prefixrl.learner.training.objectives import (
    Objective,
    denominators,
    estimate,
    resolve,
    row_rewards,
    value_mask,
)
from prefixrl.learner.training.plan import MicroBatch, Plan, forward_tokens, plan_iteration
from prefixrl.learner.training.process_rewards import with_process_rewards, with_step_rewards

PAD_ID = 0
"""Any id will do: padded positions are outside every mask, and no position after them counts."""


def train_iteration(
    models: Models,
    data: IterationData,
    config: RunConfig,
    total_steps: int,
    plan: Plan | None = None,
) -> IterationMetrics:
    """Train the actor, and the critic where there is one, on one iteration's rows.

    A collective over the learner's ranks.

    Args:
        models: changed in place.
        data: the same on every rank but for `samples`.
        total_steps: optimiser steps of the whole run, for the learning rate.
        plan: the plan by which this rank fetched its rows; None to make it here.

    Raises:
        TrainingFault: a token is older than `max_staleness` allows, or of a later version; or a
            reward or a measured figure is not finite.
        ValueError: a row of this rank is missing or has other lengths than announced.
    """
    algorithm = config.algorithm
    objective = resolve(
        algorithm,
        config.max_sampled_tokens,
        config.implicit_reward,
        config.scorer.prm,
        config.reward.weights,
    )
    # First of all: no optimiser step may see a token that is older than the window allows.
    _check_rows(data, algorithm.max_staleness)
    plan = plan or plan_for(models, data, config)
    is_late = is_measured_late(objective)
    # Everything that stays fixed in the iteration is computed before its first step.
    measured = [
        [_measure(models, data, lines, is_late and step == 0) for lines in minibatch[models.rank]]
        for step, minibatch in enumerate(plan)
    ]
    # Process rewards are part of the advantages, so they come before these.
    measured, figures = _with_other_rewards(models, measured, data, config, objective)
    advantage_moments, is_floored, micro_batches = _with_advantages(measured, data, objective)
    steps, left_out = _take_steps(
        models, micro_batches, data.iteration, algorithm, objective, total_steps
    )
    tokens = forward_tokens(plan, data.lengths)
    if models.is_packed:
        tokens = (tokens[0], tokens[0])
    facts = IterationFacts(
        advantage_moments,
        is_floored,
        objective.policy.ratio,
        objective.policy.bound_ratio,
        left_out,
        algorithm.max_staleness,
        *tokens,
        figures,
    )
    return report(data, list(chain.from_iterable(micro_batches)), steps, facts)


def _with_other_rewards(
    models: Models,
    measured: MicroBatches,
    data: IterationData,
    config: RunConfig,
    objective: Objective,
) -> tuple[MicroBatches, Report]:
    """Add scores of steps and process rewards, where the run has any. A collective."""
    figures: Report = {}
    if objective.step_coefficient:
        measured = with_step_rewards(measured, data, objective)
    if config.implicit_reward is not None:
        measured, figures = with_process_rewards(
            models, config.implicit_reward, measured, data, objective
        )
    return measured, figures


def _take_steps(
    models: Models,
    micro_batches: MicroBatches,
    iteration: int,
    algorithm: AlgorithmConfig,
    objective: Objective,
    total_steps: int,
) -> tuple[list[StepSums], int]:
    """Take the optimiser steps of all epochs; return their sums, and how many were left out.

    The first minibatch gets its proximal logprobs in place where no forward measured them before.
    """
    planned = list(range(len(micro_batches))) * algorithm.ppo_epochs
    schedule = (algorithm.critic_warmup_steps, total_steps)
    normalisers = _normalisers(micro_batches, objective)
    steps: list[StepSums] = []
    for index in planned:
        minibatch = micro_batches[index]
        step = _optimise(models, minibatch, objective, normalisers[index], schedule)
        steps.append(step)
        # Only its first step sees the weights of p: in later epochs they have moved.
        if any(micro_batch.is_proximal_late for micro_batch in minibatch):
            micro_batches[index] = _with_proximal(iteration, minibatch, step.logprobs)
        # Every rank leaves the same steps out: the KL is that of all ranks.
        if algorithm.kl_limit is not None:
            sums = torch.stack([step.sums["approx_kl"], step.sums["tokens"]])
            kl, tokens = sum_over_ranks(sums).tolist()
            if kl / max(tokens, 1.0) > algorithm.kl_limit:
                break
    left_out = len(planned) - len(steps)
    # Left-out steps count too: the schedule goes by planned steps.
    models.optimizer_steps += left_out
    return steps, left_out


def plan_for(models: Models, data: IterationData, config: RunConfig) -> Plan:
    """Return the plan of an iteration, the same on every rank; `samples` may be missing."""
    return plan_iteration(
        data.lengths,
        data.groups,
        data.seed,
        models.world_size,
        config.algorithm.minibatches_of(len(data.lengths)),
        config.learner.micro_batch_tokens,
        models.is_shared,
    )


def _check_rows(data: IterationData, max_staleness: int) -> None:
    ages = data.iteration - np.concatenate(
        [np.zeros(0, np.int32), *(each.versions for each in data.samples.values())]
    )
    bad = np.flatnonzero((ages < 0) | (ages > max_staleness))
    if bad.size:
        rows = [row for row, sample in data.samples.items() for _ in sample.versions]
        row, age = rows[bad[0]], int(ages[bad[0]])
        raise TrainingFault(
            f"iteration {data.iteration} was given row {row} (group {data.groups[row]}) of version "
            f"{data.iteration - age}, {age} versions old; algorithm.max_staleness allows 0 to {max_staleness}"
        )
    for row, reward in enumerate(data.rewards):
        if not math.isfinite(reward):
            raise TrainingFault(
                f"iteration {data.iteration} was given row {row} (group {data.groups[row]}) with reward {reward}; "
                f"rewards are finite numbers"
            )


def is_measured_late(objective: Objective) -> bool:
    """Return True if nothing before the first loss needs p.

    The first forward in training then tells it: the weights are still those of p. A KL in the
    reward needs p before.
    """
    return objective.kl_in_reward == 0.0


@torch.no_grad()
def _measure(
    models: Models,
    data: IterationData,
    lines: MicroBatch,
    is_late: bool,
) -> PreparedMicroBatch:
    """Measure proximal and reference logprobs and values by the forward that is trained.

    With `is_late` the first optimiser step finds the proximal logprobs; until then they are 0.
    """
    samples = [[_sample(data, row) for row in line] for line in lines]
    # Without rows it is a filler: other ranks run this forward too, and ZeRO needs every rank.
    batch = (pad_lines(samples, PAD_ID) if lines else filler_row(PAD_ID)).to(models.device)
    nothing = torch.zeros_like(batch.behaviour)
    proximal = nothing if is_late else models.forward_actor(batch)[0]
    values = models.forward_critic(batch)
    return PreparedMicroBatch(
        rows=tuple(row for line in lines for row in line),
        is_proximal_late=is_late,
        batch=batch,
        proximal=proximal,
        reference=models.forward_reference(batch),
        old_values=nothing if values is None else values,
        advantages=nothing,
        returns=nothing,
        ages=torch.where(batch.mask, data.iteration - batch.versions, 0),
    )


def _sample(data: IterationData, row: int) -> Sample:
    if row not in data.samples:
        raise ValueError(f"the plan gives this rank row {row}, but its batch does not hold it")
    sample = data.samples[row]
    if (len(sample.prompt_tokens), len(sample.tokens)) != tuple(data.lengths[row]):
        raise ValueError(
            f"row {row} has {len(sample.prompt_tokens)} prompt and {len(sample.tokens)} sampled tokens, "
            f"announced were {data.lengths[row][0]} and {data.lengths[row][1]}"
        )
    return sample


def _with_proximal(
    iteration: int, minibatch: Sequence[PreparedMicroBatch], logprobs: Sequence[Tensor]
) -> list[PreparedMicroBatch]:
    """Return micro-batches with p as a step saw it. A collective.

    Raises:
        TrainingFault: p is not finite on some rank.
    """
    bad = [
        (~torch.isfinite(p[micro_batch.batch.mask])).sum()
        for p, micro_batch in zip(logprobs, minibatch, strict=True)
    ]
    if sum_over_ranks(torch.stack(bad).sum()).item():
        raise TrainingFault(_fault_of_weights(iteration, "logprobs"))
    return [
        replace(micro_batch, proximal=p, is_proximal_late=False)
        for micro_batch, p in zip(minibatch, logprobs, strict=True)
    ]


def _fault_of_weights(iteration: int, what: str) -> str:
    return (
        f"iteration {iteration}: {what} are not finite, so the weights of the policy, critic or reference are not "
        f"either; resume from an older checkpoint with a smaller learning rate"
    )


def _with_advantages(
    micro_batches: MicroBatches, data: IterationData, objective: Objective
) -> tuple[list[float], bool, MicroBatches]:
    """Compute advantages per row, then whiten with the moments over all ranks.

    Returns:
        the moments before whitening, whether the floor on the deviation took effect, and the micro-batches.
    """
    rewards = row_rewards(objective, data.rewards, data.groups, data.parts)
    estimates = [
        [_estimate(micro_batch, rewards, objective) for micro_batch in minibatch]
        for minibatch in micro_batches
    ]
    counts = [_advantage_counts(each, objective) for each in chain.from_iterable(estimates)]
    # One sum over ranks carries the moments and the fault: all ranks whiten, or stop, alike.
    reduced = sum_over_ranks(torch.stack(counts).sum(dim=0))
    *sums, bad_logprobs = reduced.tolist()
    if bad_logprobs or not torch.isfinite(reduced).all():
        raise TrainingFault(
            _fault_of_weights(data.iteration, "logprobs" if bad_logprobs else "advantages")
        )
    if objective.whiten_floor is None:
        return sums, False, estimates
    is_floored = False
    whitened: MicroBatches = []
    for minibatch in estimates:
        whitened.append([])
        for micro_batch in minibatch:
            advantages, is_floored = whiten(
                micro_batch.advantages, micro_batch.batch.mask, reduced[:3], objective.whiten_floor
            )
            whitened[-1].append(replace(micro_batch, advantages=advantages))
    return sums, is_floored, whitened


def _estimate(
    micro_batch: PreparedMicroBatch, rewards: Sequence[float], objective: Objective
) -> PreparedMicroBatch:
    # A micro-batch without rows runs a filler.
    of_rows = [rewards[row] for row in micro_batch.rows] or [0.0]
    return estimate(objective, micro_batch, micro_batch.batch.rewards.new_tensor(of_rows))


def _advantage_counts(micro_batch: PreparedMicroBatch, objective: Objective) -> Tensor:
    """Return moments of the counted advantages and the number of bad logprobs: shape (4,)."""
    bad = (~torch.isfinite(micro_batch.proximal[micro_batch.batch.mask])).sum()
    counted = value_mask(objective, micro_batch.batch.mask)
    return torch.cat([moments(micro_batch.advantages, counted), bad[None].double()])


def _normalisers(micro_batches: MicroBatches, objective: Objective) -> list[tuple[float, float]]:
    """Add up the denominators of each minibatch's policy and value loss over all ranks."""
    counts = [
        torch.stack([denominators(objective, micro_batch) for micro_batch in minibatch]).sum(dim=0)
        for minibatch in micro_batches
    ]
    return [(policy, value) for policy, value in sum_over_ranks(torch.stack(counts)).tolist()]


def _optimise(
    models: Models,
    minibatch: Sequence[PreparedMicroBatch],
    objective: Objective,
    normalisers: tuple[float, float],
    schedule: tuple[int, int],
) -> StepSums:
    """Run one minibatch and step each model.

    Args:
        schedule: optimiser steps at the start of the run in which only the critic learns, and
            those of the whole run. The actor's learning rate counts from the end of the first.
    """
    policy_normaliser, value_normaliser = normalisers
    frozen_steps, total_steps = schedule
    is_actor_trained = models.optimizer_steps >= frozen_steps
    totals: ppo.Sums = {}
    logprobs: list[Tensor] = []
    for index, micro_batch in enumerate(minibatch):
        is_last = index == len(minibatch) - 1
        # While only the critic learns, the actor's forward still gives its figures, and p.
        with torch.set_grad_enabled(is_actor_trained):
            terms = _policy_terms(models, micro_batch)
            loss, sums = ppo.policy_loss(terms, objective.policy, max(policy_normaliser, 1.0))
        logprobs.append(terms.logprobs.detach())
        if is_actor_trained:
            models.actor.backward(loss, is_last)
        sums |= {"policy_loss": loss.detach().double()}
        sums |= _backward_critic(models, micro_batch, objective, value_normaliser, is_last)
        for name, value in sums.items():
            totals[name] = totals[name] + value if name in totals else value
    step = models.optimizer_steps
    # A step that is dropped counts too: the schedule goes by planned steps.
    models.optimizer_steps += 1
    return StepSums(
        totals,
        logprobs,
        models.actor.step(step - frozen_steps, total_steps - frozen_steps)
        if is_actor_trained
        else None,
        models.critic.step(step, total_steps) if models.critic else None,
    )


def _policy_terms(models: Models, micro_batch: PreparedMicroBatch) -> ppo.PolicyTerms:
    logprobs, entropy = models.forward_actor(micro_batch.batch, has_entropy=True)
    return ppo.PolicyTerms(
        logprobs=logprobs,
        entropy=entropy,
        proximal=logprobs.detach() if micro_batch.is_proximal_late else micro_batch.proximal,
        behaviour=micro_batch.batch.behaviour,
        reference=micro_batch.reference,
        advantages=micro_batch.advantages,
        mask=micro_batch.batch.mask,
        ages=micro_batch.ages,
    )


def _backward_critic(
    models: Models,
    micro_batch: PreparedMicroBatch,
    objective: Objective,
    normaliser: float,
    is_last: bool,
) -> ppo.Sums:
    values = models.forward_critic(micro_batch.batch)
    if models.critic is None or values is None:
        return {}
    mask = value_mask(objective, micro_batch.batch.mask)
    loss, sums = ppo.value_loss(
        ppo.ValueTerms(values, micro_batch.old_values, micro_batch.returns, mask),
        objective.value_clip,
        objective.policy.aggregation,
        normaliser,
    )
    models.critic.backward(loss, is_last)
    return sums | {"value_loss": loss.detach().double()}
