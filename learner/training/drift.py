"""The distance of the engine's policy from the learner's, by the age of samples. Pure.

At age 0 both have the same weights: what differs there is the *mismatch* of the two programs. What older samples show
above it is staleness.
"""

import math

import torch
from torch import Tensor

from prefixrl.common.run.documents import AgeDrift
from prefixrl.learner.training.ratios import log_ratios, units

ENOUGH = 0.05
"""Fraction of an iteration's tokens that must be of age 0 for their ESS to be a figure."""
_FIELDS = 7


def drift_sums(proximal: Tensor, behaviour: Tensor, mask: Tensor, ages: Tensor, oldest: int) -> Tensor:
    """Add up by age what `drift_by_age` divides: float64, (oldest + 1, 7).

    Args:
        ages: (rows, tokens), 0 to `oldest`; a row counts as old as its oldest token.
    """
    per_token = log_ratios(proximal, behaviour, mask, "token").double()
    weights = per_token.exp()
    tokens = torch.stack([torch.ones_like(weights), per_token.abs(), weights, weights.square()], dim=-1)
    per_row = log_ratios(proximal, behaviour, mask, "prefix").double().exp()
    rows = torch.stack([torch.ones_like(per_row), per_row, per_row.square()], dim=-1)
    first, row_ages = units(mask, "prefix"), torch.where(mask, ages, 0).max(dim=1, keepdim=True).values.expand_as(ages)
    sums = torch.zeros(oldest + 1, _FIELDS, dtype=torch.float64, device=mask.device)
    sums[:, :4].index_add_(0, ages[mask], tokens[mask])
    sums[:, 4:].index_add_(0, row_ages[first], rows[first])
    return sums


def drift_by_age(sums: Tensor) -> tuple[AgeDrift, ...]:
    """Return the drift of every age that was trained and is finite, youngest first."""
    found = (_drift(age, row) for age, row in enumerate(sums.tolist()) if row[0])
    return tuple(each for each in found if math.isfinite(each.gap + each.ess_fraction + each.row_ess_fraction))


def drift_figures(sums: Tensor) -> dict[str, float]:
    """Return the figures of all ages together.

    `row_ess_fraction`: of whole rows. `engine_mismatch_gap` (age 0) and `old_ess_fraction` (tokens of age 1 and more)
    are there only where such samples are, `fresh_ess_fraction` (age 0) where they are enough to judge by.
    """
    whole, old = _drift(0, sums.sum(dim=0).tolist()), _drift(0, sums[1:].sum(dim=0).tolist())
    fresh = _drift(0, sums[0].tolist())
    figures = {"row_ess_fraction": whole.row_ess_fraction}
    if fresh.tokens:
        figures["engine_mismatch_gap"] = fresh.gap
    if old.tokens:
        figures["old_ess_fraction"] = old.ess_fraction
    if fresh.tokens > ENOUGH * whole.tokens:
        figures["fresh_ess_fraction"] = fresh.ess_fraction
    return figures


def _drift(age: int, row: list[float]) -> AgeDrift:
    tokens, gap, total, squares, rows, row_total, row_squares = row
    return AgeDrift(
        age=age,
        tokens=int(tokens),
        gap=gap / max(tokens, 1.0),
        ess_fraction=total**2 / max(squares * tokens, 1e-300),
        rows=int(rows),
        row_ess_fraction=row_total**2 / max(row_squares * rows, 1e-300),
    )
