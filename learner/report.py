"""What one iteration did, in figures.

`report` adds up over ranks what each of them counted; everything below it is pure.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prefixrl.learner.batch import IterationData, Piece
from prefixrl.learner.distributed import sum_over_ranks
from prefixrl.learner.ppo import Sums
from prefixrl.learner.trainee import StepReport

Report = dict[str, float]

ADVANTAGE_EDGES = tuple(edge / 2 for edge in range(-8, 9))
IMPORTANCE_EDGES = tuple(edge / 10 for edge in range(-15, 16))
"""Of log(p/mu)."""
AGE_EDGES = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)


@dataclass(frozen=True)
class Histogram:
    """`counts[i]` values lay in (edges[i-1], edges[i]]; the first and last bins are open."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True)
class IterationMetrics:
    """Everything `train_iteration` hands back; the same on every rank."""

    means: Report
    """Finite figures only: JSON has no word for others, and `*_steps_dropped` tells why one is missing."""
    histograms: dict[str, Histogram]
    """`advantage` (whitened), `log_importance` (log p/mu per token), `age` (versions, per row)."""
    row_advantages: tuple[float, ...]
    """Mean whitened advantage of each row, in training order."""
    steps: tuple[Report, ...]
    """Per optimiser step: both losses, gradient norms before clipping, and whether each step was applied (1 or 0)."""


@dataclass(frozen=True)
class Whitening:
    """How the advantages were whitened: their moments before it, and whether the floor on the deviation took effect."""

    moments: tuple[float, ...]
    is_floored: bool


@dataclass(frozen=True)
class StepSums:
    """One optimiser step as this rank saw it: sums still to be added over ranks, reports already global."""

    sums: Sums
    actor: StepReport
    critic: StepReport


@torch.no_grad()
def report(
    data: IterationData,
    pieces: Sequence[Piece],
    steps: Sequence[StepSums],
    whitening: Whitening,
) -> IterationMetrics:
    """Add up what the ranks counted and put it into figures, the same on every rank."""
    names = list(steps[0].sums)
    per_step = sum_over_ranks(
        torch.stack([torch.stack([step.sums[name] for name in names]) for step in steps])
    )
    step_sums = [dict(zip(names, row, strict=True)) for row in per_step.tolist()]
    totals = {name: sum(sums[name] for sums in step_sums) for name in names}
    reports = tuple(_step_report(sums, step) for sums, step in zip(step_sums, steps, strict=True))
    figures = means(totals, whitening.moments) | reward_figures(data.rewards, data.groups)
    for model, loss in (("actor", "policy_loss"), ("critic", "value_loss")):
        applied = [each for each in reports if each[f"{model}_applied"]]
        figures[f"{model}_steps_dropped"] = float(len(reports) - len(applied))
        for name in (loss, f"{model}_grad_norm"):
            figures[name] = (
                sum(each[name] for each in applied) / len(applied) if applied else math.nan
            )
    figures |= {
        "rows": float(len(data.lengths)),
        "tokens": float(sum(sampled for _, sampled in data.lengths)),
    }
    figures["whitening_floor_hit"] = float(whitening.is_floored)
    figures = {name: figure for name, figure in figures.items() if math.isfinite(figure)}
    return IterationMetrics(
        figures, _histograms(data, pieces), _row_advantages(data, pieces), reports
    )


def _step_report(sums: dict[str, float], step: StepSums) -> dict[str, float]:
    return {
        "policy_loss": sums["policy_loss"],
        "value_loss": sums["value_loss"],
        "actor_grad_norm": step.actor.grad_norm,
        "critic_grad_norm": step.critic.grad_norm,
        "actor_applied": float(step.actor.is_applied),
        "critic_applied": float(step.critic.is_applied),
    }


def _histograms(data: IterationData, pieces: Sequence[Piece]) -> dict[str, Histogram]:
    ages = [data.iteration - data.samples[row].version for piece in pieces for row in piece.rows]
    values = {
        "advantage": (
            ADVANTAGE_EDGES,
            torch.cat([piece.advantages[piece.batch.mask] for piece in pieces]),
        ),
        "log_importance": (
            IMPORTANCE_EDGES,
            torch.cat(
                [(piece.proximal - piece.batch.behaviour)[piece.batch.mask] for piece in pieces]
            ),
        ),
        "age": (AGE_EDGES, torch.tensor(ages, device=pieces[0].batch.mask.device)),
    }
    return {
        name: histogram(edges, sum_over_ranks(bin_counts(seen, edges)))
        for name, (edges, seen) in values.items()
    }


def _row_advantages(data: IterationData, pieces: Sequence[Piece]) -> tuple[float, ...]:
    rows = torch.zeros(len(data.lengths), dtype=torch.float64, device=pieces[0].batch.mask.device)
    for piece in pieces:
        if piece.rows:
            per_row = piece.advantages.double().sum(dim=1) / piece.batch.mask.sum(dim=1)
            rows[list(piece.rows)] = per_row
    return tuple(sum_over_ranks(rows).tolist())


def bin_counts(values: Tensor, edges: Sequence[float]) -> Tensor:
    """Counts per bin as float64, shape (edges + 1,), to be summed over ranks."""
    bins = torch.bucketize(
        values.float(), torch.tensor(edges, device=values.device, dtype=torch.float32)
    )
    return torch.bincount(bins.flatten(), minlength=len(edges) + 1).double()


def histogram(edges: Sequence[float], counts: Tensor) -> Histogram:
    """Summed counts with their edges."""
    return Histogram(tuple(edges), tuple(int(count) for count in counts.tolist()))


def means(sums: Report, moments: Sequence[float]) -> Report:
    """Figures of the iteration from the sums of its optimiser steps.

    Args:
        sums: of `ppo.policy_loss` and `ppo.value_loss`, over micro-batches, ranks and optimiser steps.
        moments: sum, sum of squares and count of the advantages before whitening.
    """
    tokens = max(sums["tokens"], 1.0)
    total, squares, count = moments
    advantage = total / max(count, 1.0)
    figures = {
        "clip_fraction": sums["clipped"] / tokens,
        "approx_kl": sums["approx_kl"] / tokens,
        "entropy": sums["entropy"] / tokens,
        "ratio": sums["ratio"] / tokens,
        "importance": sums["importance"] / tokens,
        "importance_capped_fraction": sums["importance_capped"] / tokens,
        "importance_ess_fraction": sums["importance"] ** 2
        / max(sums["importance_squared"] * tokens, 1e-300),
        "behaviour_gap": sums["behaviour_gap"] / tokens,
        "value_clip_fraction": sums["value_clipped"] / tokens,
        "value": sums["value"] / tokens,
        "return": sums["return"] / tokens,
        "explained_variance": _explained_variance(sums, tokens),
        "advantage": advantage,
        "advantage_deviation": max(squares / max(count, 1.0) - advantage**2, 0.0) ** 0.5,
    }
    if "reference_kl" in sums:
        figures["reference_kl"] = sums["reference_kl"] / tokens
    return figures


def reward_figures(rewards: Sequence[float], groups: Sequence[int]) -> Report:
    """Mean reward, and the share of groups whose rows all got the same (they teach a group baseline nothing)."""
    by_group: dict[int, set[float]] = {}
    for reward, group in zip(rewards, groups, strict=True):
        by_group.setdefault(group, set()).add(reward)
    uniform = sum(len(seen) == 1 for seen in by_group.values())
    return {
        "reward": sum(rewards) / len(rewards),
        "uniform_groups_fraction": uniform / len(by_group),
    }


def _explained_variance(sums: Report, tokens: float) -> float:
    """1 - Var(R - V) / Var(R); 0 where all returns are equal."""
    of_returns = sums["return_squared"] / tokens - (sums["return"] / tokens) ** 2
    of_errors = sums["value_error_squared"] / tokens - (sums["value_error"] / tokens) ** 2
    return 1.0 - of_errors / of_returns if of_returns > 1e-12 else 0.0
