"""The figures of one iteration. `report` adds up over ranks; the rest is pure."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from prefixrl.common.run.documents import AgeDrift
from prefixrl.learner.models.batch import IterationData, PreparedMicroBatch
from prefixrl.learner.models.distributed import sum_over_ranks
from prefixrl.learner.models.trained_model import StepReport
from prefixrl.learner.training import ppo
from prefixrl.learner.training.plan import by_group

Report = dict[str, float]

ADVANTAGE_EDGES = tuple(edge / 2 for edge in range(-8, 9))
AGE_EDGES = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)


class Histogram(NamedTuple):
    """`counts[i]` values lay in (edges[i-1], edges[i]]; the first and last bins are open."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]


class IterationMetrics(NamedTuple):
    """Everything `train_iteration` returns; equal on every rank."""

    means: Report
    """Finite figures only, since JSON knows no others; `*_steps_dropped` says why one is missing."""
    histograms: dict[str, Histogram]
    """`advantage` (as trained, per sampled token), `log_importance` (log p/mu, per ratio),
    `log_ratio` (log of theta/p, or theta/mu with correction = "behaviour", per ratio and optimiser step), `age`
    (versions, per row: that of its oldest token), `token_age` (versions, per sampled token)."""
    row_advantages: tuple[float, ...]
    """Mean advantage of each row as trained, in training order."""
    steps: tuple[Report, ...]
    """Per optimiser step: losses, gradient norms before clipping, and whether each step was applied (1 or 0)."""
    ages: tuple[AgeDrift, ...]
    """Distance of the engine's policy from the learner's, for every age that was trained."""


class StepSums(NamedTuple):
    """One optimiser step on this rank: sums to be added over ranks, reports already global."""

    sums: ppo.Sums
    logprobs: Sequence[Tensor]
    """The current policy's, of each micro-batch."""
    actor: StepReport | None
    """None when the actor did not learn in this step."""
    critic: StepReport | None
    """None without a critic."""


class IterationFacts(NamedTuple):
    """Facts of one iteration besides the sums of its steps."""

    moments: Sequence[float]
    """Moments of the advantages before whitening."""
    is_floored: bool
    """The floor on their deviation took effect."""
    ratio: ppo.Ratio
    bound_ratio: float
    steps_left_out: int
    """Optimiser steps not taken because the KL had passed its limit."""
    max_staleness: int
    forward_tokens: int
    """Tokens of one forward over all rows, on all ranks: a prompt counts once for each line."""
    padded_tokens: int
    """The same with padding."""
    reward_model: Report
    """Figures of the reward model; empty without one."""


@torch.no_grad()
def report(
    data: IterationData,
    micro_batches: Sequence[PreparedMicroBatch],
    steps: Sequence[StepSums],
    facts: IterationFacts,
) -> IterationMetrics:
    """Add up what the ranks counted and return it as figures, equal on every rank."""
    scalars, bins = _over_ranks(steps)
    totals = {name: sum(sums[name] for sums in scalars) for name in scalars[0]}
    reports = tuple(_step_report(sums, step) for sums, step in zip(scalars, steps, strict=True))
    row_advantages = _row_advantages(data, micro_batches)
    figures = means(totals, facts.moments)
    figures |= reward_figures(data.rewards, data.groups)
    figures |= noise_figures(micro_batches, facts.bound_ratio)
    oldest, newest = _row_ages(micro_batches)
    figures["crossed_rows_fraction"] = _crossed(oldest, newest)
    figures |= _step_figures(reports, steps)
    drift = _drift(micro_batches, facts.max_staleness)
    figures |= ppo.drift_figures(drift) | facts.reward_model
    figures |= {
        "rows": float(len(data.lengths)),
        "tokens": float(sum(sampled for _, sampled in data.lengths)),
        "forward_tokens": float(facts.forward_tokens),
        "padded_tokens": float(facts.padded_tokens),
        "zero_advantage_rows_fraction": row_advantages.count(0.0) / len(row_advantages),
        "whitening_floor_hit": float(facts.is_floored),
        "steps_left_out": float(facts.steps_left_out),
    }
    # JSON has no NaN: a figure that could not be measured is left out.
    figures = {name: figure for name, figure in figures.items() if math.isfinite(figure)}
    histograms = _histograms(micro_batches, oldest, facts.ratio)
    histograms["log_ratio"] = histogram(ppo.LOG_RATIO_EDGES, bins)
    return IterationMetrics(figures, histograms, row_advantages, reports, ppo.drift_by_age(drift))


def _drift(micro_batches: Sequence[PreparedMicroBatch], max_staleness: int) -> Tensor:
    """Return the sums of `drift_sums` over all rows. A collective."""
    sums = [
        ppo.drift_sums(
            each.proximal, each.batch.behaviour, each.batch.mask, each.ages, max_staleness
        )
        for each in micro_batches
    ]
    return sum_over_ranks(torch.stack(sums).sum(dim=0))


def _over_ranks(steps: Sequence[StepSums]) -> tuple[list[Report], Tensor]:
    """Return each step's sums, and the bins of all steps together, added over ranks."""
    names = [name for name in steps[0].sums if name != "log_ratio_bins"]
    scalars = sum_over_ranks(
        torch.stack([torch.stack([step.sums[name] for name in names]) for step in steps])
    )
    bins = sum_over_ranks(torch.stack([step.sums["log_ratio_bins"] for step in steps]).sum(dim=0))
    return [dict(zip(names, row, strict=True)) for row in scalars.tolist()], bins


def _step_report(sums: Report, step: StepSums) -> Report:
    losses = ("policy_loss", "value_loss")
    figures_of_step: Report = {name: sums[name] for name in losses if name in sums}
    for model, step_report in (("actor", step.actor), ("critic", step.critic)):
        if step_report is not None:
            figures_of_step |= model_report(model, step_report)
    return figures_of_step


def model_report(model: str, step: StepReport) -> Report:
    """Return the figures of one step of a model."""
    return {
        f"{model}_grad_norm": step.grad_norm,
        f"{model}_lr": step.lr,
        f"{model}_applied": float(step.is_applied),
    }


def _step_figures(reports: Sequence[Report], steps: Sequence[StepSums]) -> Report:
    """Return the figures of each model, and the number of steps in which the actor did not learn."""
    figures: Report = {"actor_steps_frozen": float(sum(step.actor is None for step in steps))}
    figures |= model_figures("actor", "policy_loss", reports)
    return figures | model_figures("critic", "value_loss", reports)


def model_figures(model: str, loss: str, reports: Sequence[Report]) -> Report:
    """Return means over the applied steps of a model, its learning rate, and its dropped steps; empty without steps."""
    steps = [report for report in reports if f"{model}_applied" in report]
    if not steps:
        return {}
    applied = [report for report in steps if report[f"{model}_applied"]]
    figures = {
        f"{model}_steps_dropped": float(len(steps) - len(applied)),
        f"{model}_lr": steps[-1][f"{model}_lr"],
    }
    for name in (loss, f"{model}_grad_norm") if applied else ():
        figures[name] = sum(report[name] for report in applied) / len(applied)
    return figures


def noise_figures(micro_batches: Sequence[PreparedMicroBatch], bound_ratio: float) -> Report:
    """Return the share of tokens in rows of age 0, which p wrote, that are past the bound already. A collective."""
    if math.isinf(bound_ratio):
        return {}
    counts = []
    for micro_batch in micro_batches:
        mask = micro_batch.batch.mask & (micro_batch.ages.amax(dim=1, keepdim=True) == 0)
        past = ppo.is_past_ratio(
            micro_batch.proximal,
            micro_batch.batch.behaviour,
            mask,
            micro_batch.advantages,
            bound_ratio,
        )
        counts.append(torch.stack([(past & mask).sum(), mask.sum()]))
    past_tokens, tokens = sum_over_ranks(torch.stack(counts).sum(dim=0)).tolist()
    return {"bounded_by_noise_fraction": past_tokens / tokens} if tokens else {}


def _crossed(oldest: Tensor, newest: Tensor) -> float:
    """Return the share of rows with tokens of more than one version. A collective."""
    counts = torch.stack([(newest < oldest).sum(), newest.new_tensor(newest.numel())])
    crossed, rows = sum_over_ranks(counts).tolist()
    return float(crossed / max(rows, 1))


def _row_ages(micro_batches: Sequence[PreparedMicroBatch]) -> tuple[Tensor, Tensor]:
    """Return the ages of the oldest and of the newest token of each row: int64, (rows,)."""
    oldest, newest = [], []
    for micro_batch in micro_batches:
        mask = micro_batch.batch.mask
        is_row = mask.any(dim=1)  # a filler has no token
        oldest.append(micro_batch.ages.masked_fill(~mask, -1).amax(dim=1)[is_row])
        newest.append(
            micro_batch.ages.masked_fill(~mask, torch.iinfo(torch.int64).max).amin(dim=1)[is_row]
        )
    return torch.cat(oldest), torch.cat(newest)


def _histograms(
    micro_batches: Sequence[PreparedMicroBatch], oldest: Tensor, ratio: ppo.Ratio
) -> dict[str, Histogram]:
    pairs = [(each, each.batch.mask) for each in micro_batches]
    importance = [
        ppo.log_ratios(each.proximal, each.batch.behaviour, mask, ratio)[ppo.units(mask, ratio)]
        for each, mask in pairs
    ]
    values = {
        "advantage": (ADVANTAGE_EDGES, torch.cat([each.advantages[mask] for each, mask in pairs])),
        "log_importance": (ppo.LOG_RATIO_EDGES, torch.cat(importance)),
        "age": (AGE_EDGES, oldest),
        "token_age": (AGE_EDGES, torch.cat([each.ages[mask] for each, mask in pairs])),
    }
    return {
        name: histogram(edges, sum_over_ranks(ppo.bin_counts(seen, edges)))
        for name, (edges, seen) in values.items()
    }


def _row_advantages(
    data: IterationData, micro_batches: Sequence[PreparedMicroBatch]
) -> tuple[float, ...]:
    rows = torch.zeros(
        len(data.lengths), dtype=torch.float64, device=micro_batches[0].batch.mask.device
    )
    for micro_batch in micro_batches:
        if micro_batch.rows:
            per_row = micro_batch.advantages.double().sum(dim=1) / micro_batch.batch.mask.sum(dim=1)
            rows[list(micro_batch.rows)] = per_row
    return tuple(sum_over_ranks(rows).tolist())


def histogram(edges: Sequence[float], counts: Tensor) -> Histogram:
    """Make a histogram of summed counts and their edges."""
    return Histogram(tuple(edges), tuple(int(count) for count in counts.tolist()))


def means(sums: Report, moments: Sequence[float]) -> Report:
    """Return the iteration's figures from the sums of its optimiser steps.

    Args:
        sums: of `ppo.policy_loss` and `ppo.value_loss`, over micro-batches, ranks and optimiser steps.
        moments: sum, sum of squares and count of the advantages before whitening.
    """
    tokens, ratios, weights = (max(sums[name], 1.0) for name in ("tokens", "units", "weights"))
    total, squares, count = moments
    advantage = total / max(count, 1.0)
    figures = {
        "clip_fraction": sums["clipped"] / ratios,
        "bounded_fraction": sums["bounded"] / tokens,
        "outlier_rows_fraction": sums["rows_left_out"] / max(sums["rows"], 1.0),
        "approx_kl": sums["approx_kl"] / tokens,
        "entropy": sums["entropy"] / tokens,
        "ratio": sums["ratio"] / ratios,
        "importance": sums["importance"] / weights,
        "importance_capped_fraction": sums["importance_capped"] / weights,
        # Kish's effective sample size, as a fraction of the number of weights.
        "importance_ess_fraction": sums["importance"] ** 2
        / max(sums["importance_squared"] * weights, 1e-300),
        "behaviour_gap": sums["behaviour_gap"] / tokens,
        "advantage": advantage,
        "advantage_deviation": max(squares / max(count, 1.0) - advantage**2, 0.0) ** 0.5,
    }
    if "reference_kl" in sums:
        figures["reference_kl"] = sums["reference_kl"] / max(sums["reference_weights"], 1e-300)
    figures |= {name: total / tokens for name, total in sums.items() if name.startswith("loss/")}
    if "value_tokens" in sums:
        values = max(sums["value_tokens"], 1.0)
        of_returns = sums["return_squared"] / values - (sums["return"] / values) ** 2
        of_errors = sums["value_error_squared"] / values - (sums["value_error"] / values) ** 2
        figures |= {
            "value_clip_fraction": sums["value_clipped"] / values,
            "value": sums["value"] / values,
            "return": sums["return"] / values,
            # 0 where all returns are equal.
            "explained_variance": 1.0 - of_errors / of_returns if of_returns > 1e-12 else 0.0,
        }
    return figures


def reward_figures(rewards: Sequence[float], groups: Sequence[int]) -> Report:
    """Return moments of the rewards, and shares of groups that teach a group baseline nothing."""
    of_groups = by_group(rewards, groups).values()
    mean = sum(rewards) / len(rewards)

    def share_of_groups(which: Callable[[list[float]], bool]) -> float:
        return sum(map(which, of_groups)) / len(of_groups)

    return {
        "reward": mean,
        "reward_std": math.sqrt(sum((each - mean) ** 2 for each in rewards) / len(rewards)),
        "uniform_groups_fraction": share_of_groups(lambda seen: min(seen) == max(seen)),
        "all_right_groups_fraction": share_of_groups(lambda seen: min(seen) >= 1.0),
        "all_wrong_groups_fraction": share_of_groups(lambda seen: max(seen) <= 0.0),
        "groups_of_one_fraction": share_of_groups(lambda seen: len(seen) == 1),
    }
