"""What one iteration did, in figures.

`report` adds up over ranks what each of them counted; everything below it is pure.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from prefixrl.learner.batch import IterationData, Piece
from prefixrl.learner.distributed import sum_over_ranks
from prefixrl.learner.ppo import (
    LOG_RATIO_EDGES,
    Granularity,
    Sums,
    bin_counts,
    log_ratios,
    units,
)
from prefixrl.learner.trainee import StepReport

Report = dict[str, float]

ADVANTAGE_EDGES = tuple(edge / 2 for edge in range(-8, 9))
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
    """`advantage` (as trained, per sampled token), `log_importance` (log p/mu, per ratio, masked ones included),
    `log_ratio` (log of theta/p, or theta/mu with correction = "behaviour", per ratio and optimiser step), `age`
    (versions, per row: that of its oldest token), `token_age` (versions, per sampled token)."""
    row_advantages: tuple[float, ...]
    """Mean advantage of each row as trained, in training order."""
    steps: tuple[Report, ...]
    """Per optimiser step: losses, gradient norms before clipping, and whether each step was applied (1 or 0)."""


@dataclass(frozen=True)
class Whitening:
    """How the advantages were whitened: their moments before it, and whether the floor on the deviation took effect."""

    moments: tuple[float, ...]
    is_floored: bool


@dataclass(frozen=True)
class StepSums:
    """One optimiser step as this rank saw it: sums still to be added over ranks, reports already global."""

    sums: Sums
    actor: StepReport | None
    """None when the actor was not to learn in this step."""
    critic: StepReport | None
    """None without a critic."""


@dataclass(frozen=True)
class Course:
    """How the iteration went, besides its sums."""

    whitening: Whitening
    granularity: Granularity
    steps_left_out: int
    """Optimiser steps not taken because the KL had passed its limit."""


@torch.no_grad()
def report(
    data: IterationData,
    pieces: Sequence[Piece],
    steps: Sequence[StepSums],
    course: Course,
) -> IterationMetrics:
    """Add up what the ranks counted and put it into figures, the same on every rank."""
    scalars, bins = _over_ranks(steps)
    totals = {name: sum(sums[name] for sums in scalars) for name in scalars[0]}
    reports = tuple(_step_report(sums, step) for sums, step in zip(scalars, steps, strict=True))
    row_advantages = _row_advantages(data, pieces)
    figures = means(totals, course.whitening.moments)
    figures |= reward_figures(data.rewards, data.groups) | mask_figures(pieces)
    figures["crossed_rows_fraction"] = _crossed(data, pieces)
    figures |= _step_figures(reports, steps)
    figures |= {
        "rows": float(len(data.lengths)),
        "tokens": float(sum(sampled for _, sampled in data.lengths)),
        "zero_advantage_rows_fraction": sum(each == 0.0 for each in row_advantages)
        / len(row_advantages),
        "whitening_floor_hit": float(course.whitening.is_floored),
        "steps_left_out": float(course.steps_left_out),
    }
    figures = {name: figure for name, figure in figures.items() if math.isfinite(figure)}
    histograms = _histograms(data, pieces, course.granularity)
    histograms["log_ratio"] = histogram(LOG_RATIO_EDGES, bins)
    return IterationMetrics(figures, histograms, row_advantages, reports)


def _over_ranks(steps: Sequence[StepSums]) -> tuple[list[Report], Tensor]:
    """Each step's sums, and the bins of all steps together, added over ranks."""
    names = [name for name in steps[0].sums if name != "log_ratio_bins"]
    scalars = sum_over_ranks(
        torch.stack([torch.stack([step.sums[name] for name in names]) for step in steps])
    )
    bins = sum_over_ranks(torch.stack([step.sums["log_ratio_bins"] for step in steps]).sum(dim=0))
    return [dict(zip(names, row, strict=True)) for row in scalars.tolist()], bins


def _step_report(sums: Report, step: StepSums) -> Report:
    made: Report = {}
    for model, loss, told in (
        ("actor", "policy_loss", step.actor),
        ("critic", "value_loss", step.critic),
    ):
        if loss in sums:
            made[loss] = sums[loss]
        if told is not None:
            made[f"{model}_grad_norm"] = told.grad_norm
            made[f"{model}_applied"] = float(told.is_applied)
    return made


def _step_figures(reports: Sequence[Report], steps: Sequence[StepSums]) -> Report:
    """Means over the applied steps of each model, and how many of its steps were not."""
    figures: Report = {"actor_steps_frozen": float(sum(step.actor is None for step in steps))}
    for model, loss in (("actor", "policy_loss"), ("critic", "value_loss")):
        taken = [each for each in reports if f"{model}_applied" in each]
        applied = [each for each in taken if each[f"{model}_applied"]]
        if taken:
            figures[f"{model}_steps_dropped"] = float(len(taken) - len(applied))
        for name in (loss, f"{model}_grad_norm"):
            if applied:
                figures[name] = sum(each[name] for each in applied) / len(applied)
    return figures


def mask_figures(pieces: Sequence[Piece]) -> Report:
    """Share of sampled tokens, and of rows as a whole, that the masks keep out of the policy loss. A collective."""
    counts = [
        torch.stack(
            [
                piece.batch.mask.sum(),
                piece.kept.sum(),
                piece.batch.mask.any(dim=1).sum(),
                piece.kept.any(dim=1).sum(),
            ]
        )
        for piece in pieces
    ]
    tokens, kept, rows, kept_rows = sum_over_ranks(torch.stack(counts).sum(dim=0)).tolist()
    return {
        "masked_tokens_fraction": 1.0 - kept / max(tokens, 1),
        "masked_rows_fraction": 1.0 - kept_rows / max(rows, 1),
    }


def _crossed(data: IterationData, pieces: Sequence[Piece]) -> float:
    """Share of the rows with tokens of more than one version. A collective."""
    samples = [data.samples[row] for piece in pieces for row in piece.rows]
    crossed = sum(sample.version < sample.versions.max() for sample in samples)
    counts = torch.tensor([crossed, len(samples)], device=pieces[0].batch.mask.device).double()
    crossed_rows, rows = sum_over_ranks(counts).tolist()
    return float(crossed_rows / max(rows, 1))


def _histograms(
    data: IterationData, pieces: Sequence[Piece], granularity: Granularity
) -> dict[str, Histogram]:
    samples = [data.samples[row] for piece in pieces for row in piece.rows]
    ages = [data.iteration - sample.version for sample in samples]
    of_tokens = [data.iteration - sample.versions for sample in samples]
    device = pieces[0].batch.mask.device
    importance = [
        log_ratios(piece.proximal, piece.batch.behaviour, piece.batch.mask, granularity)[
            units(piece.batch.mask, granularity)
        ]
        for piece in pieces
    ]
    values = {
        "advantage": (
            ADVANTAGE_EDGES,
            torch.cat([piece.advantages[piece.batch.mask] for piece in pieces]),
        ),
        "log_importance": (LOG_RATIO_EDGES, torch.cat(importance)),
        "age": (AGE_EDGES, torch.tensor(ages, device=device)),
        "token_age": (
            AGE_EDGES,
            torch.from_numpy(np.concatenate([np.zeros(0, np.int32), *of_tokens])).to(device),
        ),
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


def histogram(edges: Sequence[float], counts: Tensor) -> Histogram:
    """Summed counts with their edges."""
    return Histogram(tuple(edges), tuple(int(count) for count in counts.tolist()))


def means(sums: Report, moments: Sequence[float]) -> Report:
    """Figures of the iteration from the sums of its optimiser steps.

    Args:
        sums: of `ppo.policy_loss` and `ppo.value_loss`, over micro-batches, ranks and optimiser steps.
        moments: sum, sum of squares and count of the advantages before whitening.
    """
    tokens, ratios = max(sums["tokens"], 1.0), max(sums["units"], 1.0)
    total, squares, count = moments
    advantage = total / max(count, 1.0)
    figures = {
        "clip_fraction": sums["clipped"] / ratios,
        "approx_kl": sums["approx_kl"] / tokens,
        "entropy": sums["entropy"] / tokens,
        "ratio": sums["ratio"] / ratios,
        "importance": sums["importance"] / ratios,
        "importance_capped_fraction": sums["importance_capped"] / ratios,
        "importance_ess_fraction": sums["importance"] ** 2
        / max(sums["importance_squared"] * ratios, 1e-300),
        "behaviour_gap": sums["behaviour_gap"] / tokens,
        "advantage": advantage,
        "advantage_deviation": max(squares / max(count, 1.0) - advantage**2, 0.0) ** 0.5,
    }
    if "reference_kl" in sums:
        figures["reference_kl"] = sums["reference_kl"] / tokens
    if "value_tokens" in sums:
        values = max(sums["value_tokens"], 1.0)
        figures |= {
            "value_clip_fraction": sums["value_clipped"] / values,
            "value": sums["value"] / values,
            "return": sums["return"] / values,
            "explained_variance": _explained_variance(sums, values),
        }
    return figures


def reward_figures(rewards: Sequence[float], groups: Sequence[int]) -> Report:
    """Moments of the rewards, and the shares of groups whose rows all got the same (they teach a group baseline nothing)."""
    by_group: dict[int, list[float]] = {}
    for reward, group in zip(rewards, groups, strict=True):
        by_group.setdefault(group, []).append(reward)
    mean = sum(rewards) / len(rewards)

    def share(which: Callable[[list[float]], bool]) -> float:
        return sum(which(seen) for seen in by_group.values()) / len(by_group)

    return {
        "reward": mean,
        "reward_std": math.sqrt(sum((each - mean) ** 2 for each in rewards) / len(rewards)),
        "uniform_groups_fraction": share(lambda seen: min(seen) == max(seen)),
        "all_right_groups_fraction": share(lambda seen: min(seen) >= 1.0),
        "all_wrong_groups_fraction": share(lambda seen: max(seen) <= 0.0),
        "groups_of_one_fraction": share(lambda seen: len(seen) == 1),
    }


def _explained_variance(sums: Report, tokens: float) -> float:
    """1 - Var(R - V) / Var(R); 0 where all returns are equal."""
    of_returns = sums["return_squared"] / tokens - (sums["return"] / tokens) ** 2
    of_errors = sums["value_error_squared"] / tokens - (sums["value_error"] / tokens) ** 2
    return 1.0 - of_errors / of_returns if of_returns > 1e-12 else 0.0
