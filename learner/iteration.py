"""One iteration of PPO: B scored groups in, a few optimiser steps, figures out. Every rank calls it with its own rows.

    rewards ──baseline of the group (or none)──┐
    rows ──plan──▶ micro-batches ──measure──▶ p, reference, V, masks ──▶ GAE ──whiten over all ranks──▶ A, R
                                                                                                        │
                              for each epoch, for each minibatch: backward per micro-batch, one step ◀──┘

Proximal logprobs, values, masks and advantages are computed once and stay fixed for the iteration. The ranks meet in the
moments of the whitening, the denominators, inside DeepSpeed, and in the sums of the report; every decision to drop a step or
to leave steps out is taken from reduced values.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from prefixrl.common.algorithm import AlgorithmConfig
from prefixrl.common.config import RunConfig
from prefixrl.common.errors import TrainingFault
from prefixrl.learner.advantages import moments, whiten
from prefixrl.learner.batch import IterationData, Piece, Sample, pad, weightless
from prefixrl.learner.distributed import sum_over_ranks
from prefixrl.learner.model import Models
from prefixrl.learner.objectives import (
    Objective,
    denominators,
    estimate,
    resolve,
    row_rewards,
    value_mask,
)
from prefixrl.learner.plan import MicroBatch, plan_iteration
from prefixrl.learner.ppo import (
    PolicyTerms,
    Sums,
    ValueTerms,
    kept_tokens,
    policy_loss,
    units,
    value_loss,
)
from prefixrl.learner.report import Course, IterationMetrics, StepSums, Whitening, report

PAD_ID = 0
"""Any id serves: padded positions are outside every mask, and no position after them counts."""


def train_iteration(
    models: Models, data: IterationData, config: RunConfig, total_steps: int
) -> IterationMetrics:
    """Train the actor, and the critic where there is one, on one iteration's rows. A collective over the learner's ranks.

    Args:
        models: changed in place.
        data: the same on every rank but for `samples`.
        total_steps: optimiser steps of the whole run, for the learning rate.

    Raises:
        TrainingFault: a token is older than `max_staleness` allows, or from the future; or a reward or what was measured is
            not finite.
        ValueError: a row of this rank is missing or has other lengths than announced.
    """
    algorithm = config.algorithm
    objective = resolve(algorithm, config.max_sampled_tokens)
    _check_rows(data, algorithm.max_staleness)
    minibatches = plan_iteration(
        data.lengths,
        data.seed,
        models.world_size,
        algorithm.minibatches,
        config.learner.micro_batch_tokens,
    )
    measured = [
        [_measure(models, data, rows, algorithm) for rows in minibatch[models.rank]]
        for minibatch in minibatches
    ]
    whitening, pieces = _with_advantages(measured, data, objective)
    planned = pieces * algorithm.ppo_epochs
    normalisers = _normalisers(pieces, objective) * algorithm.ppo_epochs
    steps: list[StepSums] = []
    for own, normaliser in zip(planned, normalisers, strict=True):
        is_frozen = models.optimizer_steps < algorithm.critic_warmup_steps
        steps.append(_optimise(models, own, objective, normaliser, is_frozen, total_steps))
        if algorithm.kl_limit is not None and _kl(steps[-1]) > algorithm.kl_limit:
            break
    left_out = len(planned) - len(steps)
    models.optimizer_steps += left_out
    course = Course(whitening, objective.policy.granularity, left_out)
    return report(data, [piece for own in pieces for piece in own], steps, course)


def _check_rows(data: IterationData, max_staleness: int) -> None:
    for row, sample in data.samples.items():
        for version in (sample.version, int(sample.versions.max())):
            age = data.iteration - version
            if not 0 <= age <= max_staleness:
                raise TrainingFault(
                    f"iteration {data.iteration} was given row {row} (group {data.groups[row]}) of version {version}, "
                    f"{age} versions old; algorithm.max_staleness allows 0 to {max_staleness}"
                )
    for row, reward in enumerate(data.rewards):
        if not math.isfinite(reward):
            raise TrainingFault(
                f"iteration {data.iteration} was given row {row} (group {data.groups[row]}) with reward {reward}; rewards "
                "are finite numbers"
            )


@torch.no_grad()
def _measure(
    models: Models, data: IterationData, rows: MicroBatch, algorithm: AlgorithmConfig
) -> Piece:
    """Proximal and reference logprobs, values and masks of one micro-batch, by the very forward that will be trained."""
    batch = (pad([_sample(data, row) for row in rows], PAD_ID) if rows else weightless(PAD_ID)).to(
        models.device
    )
    nothing = torch.zeros_like(batch.behaviour)
    proximal, values = models.forward_actor(batch)[0], models.forward_critic(batch)
    return Piece(
        rows=rows,
        batch=batch,
        kept=kept_tokens(
            proximal,
            batch.behaviour,
            batch.mask,
            algorithm.mask_token_band,
            algorithm.mask_sequence_band,
        ),
        proximal=proximal,
        reference=models.forward_reference(batch),
        old_values=nothing if values is None else values,
        advantages=nothing,
        returns=nothing,
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


def _with_advantages(
    pieces: Sequence[Sequence[Piece]], data: IterationData, objective: Objective
) -> tuple[Whitening, list[list[Piece]]]:
    """Advantages per row, then whitening with the moments of all that counts in the iteration, all ranks."""
    rewards = row_rewards(objective, data.rewards, data.groups)
    raw = [[_estimate(piece, rewards, objective) for piece in own] for own in pieces]
    reduced = sum_over_ranks(
        torch.stack([_facts(piece, objective) for own in raw for piece in own]).sum(dim=0)
    )
    *sums, bad_logprobs = reduced.tolist()
    if bad_logprobs or not torch.isfinite(reduced).all():
        raise TrainingFault(
            f"iteration {data.iteration}: {'logprobs' if bad_logprobs else 'advantages'} are not finite, so the weights of "
            "the policy, critic or reference are not either; resume from an older checkpoint with a smaller learning rate"
        )
    if objective.whiten_floor is None:
        return Whitening(tuple(sums), False), raw
    is_floored = False
    done: list[list[Piece]] = []
    for own in raw:
        done.append([])
        for piece in own:
            advantages, is_floored = whiten(
                piece.advantages, piece.batch.mask, reduced[:3], objective.whiten_floor
            )
            done[-1].append(replace(piece, advantages=advantages))
    return Whitening(tuple(sums), is_floored), done


def _estimate(piece: Piece, rewards: Sequence[float], objective: Objective) -> Piece:
    own = torch.zeros_like(piece.batch.rewards)
    if piece.rows:
        own = own.new_tensor([rewards[row] for row in piece.rows])
    return estimate(objective, piece, own)


def _facts(piece: Piece, objective: Objective) -> Tensor:
    """The moments of the advantages that count, and how many proximal logprobs are not finite: shape (4,)."""
    bad = (~torch.isfinite(piece.proximal[piece.batch.mask])).sum()
    counted = units(piece.kept, objective.policy.granularity)
    return torch.cat([moments(piece.advantages, counted), bad[None].double()])


def _normalisers(
    pieces: Sequence[Sequence[Piece]], objective: Objective
) -> list[tuple[float, float]]:
    """The global denominators of each minibatch's policy and value loss."""
    counts = torch.stack(
        [
            torch.stack([denominators(objective, piece) for piece in own]).sum(dim=0)
            for own in pieces
        ]
    )
    return [(policy, value) for policy, value in sum_over_ranks(counts).tolist()]


def _optimise(
    models: Models,
    own: Sequence[Piece],
    objective: Objective,
    normalisers: tuple[float, float],
    is_frozen: bool,
    total_steps: int,
) -> StepSums:
    """All micro-batches of one minibatch, then one step of each model; the actor's only if it may learn and has a token."""
    policy_normaliser, value_normaliser = normalisers
    is_actor_trained = policy_normaliser > 0.0 and not is_frozen
    totals: Sums = {}
    for index, piece in enumerate(own):
        is_last = index == len(own) - 1
        with torch.set_grad_enabled(is_actor_trained):
            loss, sums = policy_loss(
                _policy_terms(models, piece), objective.policy, max(policy_normaliser, 1.0)
            )
        if is_actor_trained:
            models.actor.backward(loss, is_last)
        sums |= {"policy_loss": loss.detach().double()}
        sums |= _backward_critic(models, piece, objective, value_normaliser, is_last)
        for name, value in sums.items():
            totals[name] = totals[name] + value if name in totals else value
    step = models.optimizer_steps
    models.optimizer_steps += 1
    return StepSums(
        totals,
        models.actor.step(step, total_steps) if is_actor_trained else None,
        models.critic.step(step, total_steps) if models.critic else None,
    )


def _policy_terms(models: Models, piece: Piece) -> PolicyTerms:
    logprobs, entropy = models.forward_actor(piece.batch)
    return PolicyTerms(
        logprobs=logprobs,
        entropy=entropy,
        proximal=piece.proximal,
        behaviour=piece.batch.behaviour,
        reference=piece.reference,
        advantages=piece.advantages,
        mask=piece.kept,
    )


def _backward_critic(
    models: Models, piece: Piece, objective: Objective, normaliser: float, is_last: bool
) -> Sums:
    values = models.forward_critic(piece.batch)
    if models.critic is None or values is None:
        return {}
    asked = value_mask(objective, piece.batch.mask)
    loss, sums = value_loss(
        ValueTerms(values, piece.old_values, piece.returns, asked),
        objective.value_clip,
        objective.policy.aggregation,
        normaliser,
    )
    models.critic.backward(loss, is_last)
    return sums | {"value_loss": loss.detach().double()}


def _kl(step: StepSums) -> float:
    """KL(p || theta) per token of one optimiser step, over all ranks."""
    total, tokens = sum_over_ranks(
        torch.stack([step.sums["approx_kl"], step.sums["tokens"]])
    ).tolist()
    return float(total / max(tokens, 1.0))
