"""Drift by age against sums written out."""

import math

import pytest
import torch

from prefixrl.learner.training.ppo import drift_by_age, drift_figures, drift_sums

MASK = torch.tensor([[True, True, False], [True, True, True], [True, False, False]])
AGES = torch.tensor([[0, 0, 9], [2, 1, 1], [2, 9, 9]])
LOGS = torch.tensor([[0.1, -0.1, 50.0], [0.5, 0.2, -0.3], [1.0, 50.0, 50.0]])


def sums() -> torch.Tensor:
    ages = torch.where(MASK, AGES, 0)
    return drift_sums(LOGS, torch.zeros(3, 3), MASK, ages, oldest=3)


def ess(*logs: float) -> float:
    weights = [math.exp(each) for each in logs]
    return sum(weights) ** 2 / (len(weights) * sum(each * each for each in weights))


def test_tokens_count_at_their_own_age_and_rows_at_that_of_their_oldest_token() -> None:
    fresh, one, two = drift_by_age(sums())
    assert [(each.age, each.tokens, each.rows) for each in (fresh, one, two)] == [
        (0, 2, 1),
        (1, 2, 0),
        (2, 2, 2),
    ]
    assert fresh.gap == pytest.approx(0.1)
    assert fresh.ess_fraction == pytest.approx(ess(0.1, -0.1))
    assert one.gap == pytest.approx(0.25)
    assert two.ess_fraction == pytest.approx(ess(0.5, 1.0))
    assert two.row_ess_fraction == pytest.approx(ess(0.4, 1.0))


def test_age_0_shows_the_mismatch_and_the_others_what_staleness_adds() -> None:
    figures = drift_figures(sums())
    assert figures["engine_mismatch_gap"] == pytest.approx(0.1)
    assert figures["old_ess_fraction"] == pytest.approx(ess(0.5, 0.2, -0.3, 1.0))
    assert figures["fresh_ess_fraction"] == pytest.approx(ess(0.1, -0.1))
    assert figures["row_ess_fraction"] == pytest.approx(ess(0.0, 0.4, 1.0))


def test_without_fresh_or_enough_old_samples_their_figures_are_absent() -> None:
    fresh_only = sums()
    fresh_only[1:] = 0.0
    mostly_fresh = sums()
    mostly_fresh[0] *= 10  # 4 of 24 tokens are old
    assert all("old_ess_fraction" not in drift_figures(each) for each in (fresh_only, mostly_fresh))
    assert "old_ess_fraction" in drift_figures(100 * mostly_fresh)  # 400 of 2,400
    old_only = sums()
    old_only[0] = 0.0
    figures = drift_figures(old_only)
    assert not {"engine_mismatch_gap", "fresh_ess_fraction"} & set(figures)
    assert figures["old_ess_fraction"] == pytest.approx(ess(0.5, 0.2, -0.3, 1.0))


def test_a_drift_that_is_no_number_is_left_out() -> None:
    spoilt = sums()
    spoilt[2, 1] = math.nan
    assert [each.age for each in drift_by_age(spoilt)] == [0, 1]
