"""The learning rate over a run."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixrl.learner.models.trained_model import lr_at


def test_the_papers_run_warms_up_over_42_of_1380_steps_and_ends_at_a_tenth() -> None:
    rates = [lr_at(step, 1380, 5e-7, 0.03, 0.1) for step in range(1380)]
    assert rates[0] == pytest.approx(5e-7 / 42)
    assert rates[41] == pytest.approx(5e-7)
    assert rates[42 + (1380 - 1 - 42) // 2] == pytest.approx(5e-7 * 0.55, rel=1e-2)
    assert rates[-1] == pytest.approx(5e-8)
    assert lr_at(5000, 1380, 5e-7, 0.03, 0.1) == pytest.approx(5e-8)


@given(st.integers(1, 300), st.floats(0, 1), st.floats(0, 1))
def test_the_rate_rises_to_the_peak_then_falls_to_the_floor(
    total: int, warmup: float, floor: float
) -> None:
    rates = [lr_at(step, total, 1.0, warmup, floor) for step in range(total)]
    top = rates.index(max(rates))
    assert all(0.0 < rate <= 1.0 + 1e-12 for rate in rates) or floor == 0.0
    assert all(a <= b + 1e-12 for a, b in pairwise(rates[: top + 1]))
    assert all(a >= b - 1e-12 for a, b in pairwise(rates[top:]))
    assert min(rates[top:]) >= floor - 1e-12
