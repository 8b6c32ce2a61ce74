"""One iteration of PPO: B scored groups in, a few optimiser steps, figures out. Every rank calls it with its own rows.

    rows ──plan──▶ micro-batches ──measure──▶ p, reference, V ──▶ GAE ──whiten over all ranks──▶ A, R
                                                                                                  │
                        for each epoch, for each minibatch: backward per micro-batch, one step ◀──┘

Proximal logprobs, values and advantages are computed once and stay fixed for the iteration. The ranks meet in the moments of
the whitening, inside DeepSpeed, and in the sums of the report; every decision to drop a step is taken from reduced values.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from prefixrl.common.config import AlgorithmConfig, RunConfig
from prefixrl.common.errors import TrainingFault
from prefixrl.learner.advantages import gae, moments, token_rewards, whiten
from prefixrl.learner.batch import IterationData, Piece, Sample, pad, weightless
from prefixrl.learner.distributed import sum_over_ranks
from prefixrl.learner.model import Models
from prefixrl.learner.plan import MicroBatch, plan_iteration
from prefixrl.learner.ppo import (
    PolicySettings,
    PolicyTerms,
    Sums,
    ValueTerms,
    kl_estimate,
    policy_loss,
    value_loss,
)
from prefixrl.learner.report import IterationMetrics, StepSums, Whitening, report
from prefixrl.learner.trainee import StepReport

PAD_ID = 0
"""Any id serves: padded positions are outside every mask, and no position after them counts."""


def train_iteration(
    models: Models, data: IterationData, config: RunConfig, total_steps: int
) -> IterationMetrics:
    """Train the actor and the critic on one iteration's rows. A collective over the learner's ranks.

    Args:
        models: changed in place.
        data: the same on every rank but for `samples`.
        total_steps: optimiser steps of the whole run, for the learning rate.

    Raises:
        TrainingFault: a row is older than `max_staleness` allows, or from the future; or what was measured is not finite.
        ValueError: a row of this rank is missing or has other lengths than announced.
    """
    algorithm = config.algorithm
    _check_ages(data, algorithm.max_staleness)
    minibatches = plan_iteration(
        data.lengths,
        data.seed,
        models.world_size,
        algorithm.minibatches,
        config.learner.micro_batch_tokens,
    )
    pieces = [
        [_measure(models, data, rows) for rows in minibatch[models.rank]]
        for minibatch in minibatches
    ]
    whitening, pieces = _with_advantages(pieces, algorithm, data.iteration)
    steps: list[StepSums] = []
    for _ in range(algorithm.ppo_epochs):
        for minibatch, own in zip(minibatches, pieces, strict=True):
            rows = [row for share in minibatch for micro in share for row in micro]
            normaliser = _normaliser(rows, data.lengths, algorithm)
            steps.append(_optimise(models, own, algorithm, normaliser, total_steps))
    return report(data, [piece for own in pieces for piece in own], steps, whitening)


def _check_ages(data: IterationData, max_staleness: int) -> None:
    for row, sample in data.samples.items():
        age = data.iteration - sample.version
        if not 0 <= age <= max_staleness:
            raise TrainingFault(
                f"iteration {data.iteration} was given row {row} (group {data.groups[row]}) of version {sample.version}, "
                f"{age} versions old; algorithm.max_staleness allows 0 to {max_staleness}"
            )


@torch.no_grad()
def _measure(models: Models, data: IterationData, rows: MicroBatch) -> Piece:
    """Proximal and reference logprobs and values of one micro-batch, the very forward that will be trained."""
    batch = (pad([_sample(data, row) for row in rows], PAD_ID) if rows else weightless(PAD_ID)).to(
        models.device
    )
    nothing = torch.zeros_like(batch.behaviour)
    return Piece(
        rows=rows,
        batch=batch,
        proximal=models.forward_actor(batch)[0],
        reference=models.forward_reference(batch),
        old_values=models.forward_critic(batch),
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
    pieces: Sequence[Sequence[Piece]], algorithm: AlgorithmConfig, iteration: int
) -> tuple[Whitening, list[list[Piece]]]:
    """GAE per row, then whitening with the moments of every valid token of the iteration, all ranks."""
    raw = [[_estimate(piece, algorithm) for piece in own] for own in pieces]
    reduced = sum_over_ranks(
        torch.stack(
            [moments(piece.advantages, piece.batch.mask) for own in raw for piece in own]
        ).sum(dim=0)
    )
    if not torch.isfinite(reduced).all():
        raise TrainingFault(
            f"iteration {iteration}: advantages are not finite, so the weights of the policy, critic or reference are not "
            "either; resume from an older checkpoint with a smaller learning rate"
        )
    is_floored = False
    done: list[list[Piece]] = []
    for own in raw:
        done.append([])
        for piece in own:
            advantages, is_floored = whiten(
                piece.advantages, piece.batch.mask, reduced, algorithm.whiten_floor
            )
            done[-1].append(replace(piece, advantages=advantages))
    return Whitening(tuple(reduced.tolist()), is_floored), done


def _estimate(piece: Piece, algorithm: AlgorithmConfig) -> Piece:
    batch, penalty = piece.batch, None
    if piece.reference is not None and algorithm.kl_placement == "reward":
        penalty = algorithm.kl * kl_estimate(
            piece.proximal, piece.reference, algorithm.kl_estimator
        )
    rewards = token_rewards(batch.rewards, batch.mask, penalty)
    advantages, returns = gae(
        rewards, piece.old_values, batch.mask, algorithm.gamma, algorithm.gae_lambda
    )
    return replace(piece, advantages=advantages, returns=returns)


def _normaliser(
    rows: Sequence[int], lengths: Sequence[tuple[int, int]], algorithm: AlgorithmConfig
) -> float:
    """The global denominator of one optimiser step, known to every rank from the lengths alone."""
    if algorithm.aggregation == "sequence":
        return float(len(rows))
    return float(sum(lengths[row][1] for row in rows))


def _optimise(
    models: Models,
    own: Sequence[Piece],
    algorithm: AlgorithmConfig,
    normaliser: float,
    total_steps: int,
) -> StepSums:
    """All micro-batches of one minibatch, then one step of each model."""
    settings = PolicySettings(
        correction=algorithm.correction,
        clip=algorithm.clip,
        importance_cap=algorithm.importance_cap,
        aggregation=algorithm.aggregation,
        entropy=algorithm.entropy,
        kl_in_loss=algorithm.kl if algorithm.kl_placement == "loss" else 0.0,
        kl_estimator=algorithm.kl_estimator,
    )
    totals: Sums = {}
    for index, piece in enumerate(own):
        is_last = index == len(own) - 1
        loss, sums = policy_loss(_policy_terms(models, piece), settings, normaliser)
        models.actor.backward(loss, is_last)
        terms = ValueTerms(
            models.forward_critic(piece.batch), piece.old_values, piece.returns, piece.batch.mask
        )
        critic_loss, value_sums = value_loss(
            terms, algorithm.value_clip, algorithm.aggregation, normaliser
        )
        models.critic.backward(critic_loss, is_last)
        losses = {
            "policy_loss": loss.detach().double(),
            "value_loss": critic_loss.detach().double(),
        }
        for name, value in (sums | value_sums | losses).items():
            totals[name] = totals[name] + value if name in totals else value
    actor, critic = _step(models, total_steps)
    return StepSums(totals, actor, critic)


def _policy_terms(models: Models, piece: Piece) -> PolicyTerms:
    logprobs, entropy = models.forward_actor(piece.batch)
    return PolicyTerms(
        logprobs=logprobs,
        entropy=entropy,
        proximal=piece.proximal,
        behaviour=piece.batch.behaviour,
        reference=piece.reference,
        advantages=piece.advantages,
        mask=piece.batch.mask,
    )


def _step(models: Models, total_steps: int) -> tuple[StepReport, StepReport]:
    step = models.optimizer_steps
    models.optimizer_steps += 1
    return models.actor.step(step, total_steps), models.critic.step(step, total_steps)
