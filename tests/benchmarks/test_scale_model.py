"""The benchmark behind the model's check still runs: its smallest form, with the real broker and workers."""

import pytest

from benchmarks.capacity.outlook import foresee
from benchmarks.scale_model import Case, figures_of, measured, system_of

SMALLEST = Case(
    name="smallest",
    max_staleness=0,
    groups=4,
    rows=2,
    rollouts=1,
    scorers=1,
    prefix_s=0.05,
    completion_s=0.1,
    sigma=0.5,
    limit_s=0.5,
    learner=0.5,
)


@pytest.mark.nightly
def test_a_small_run_is_measured_and_predicted() -> None:
    iterations = 16
    run = measured(SMALLEST, iterations, 0)
    actual = figures_of(SMALLEST, [run], foresee(system_of(SMALLEST, run), 1, iterations))
    assert run.groups_per_s > 0 and run.mean_age == 0.0
    assert len(actual) == 6 and all(each.value >= 0 for each in actual)
