"""Work and seconds of an iteration against a count by hand."""

from dataclasses import replace

import pytest

from prefixrl.learner.check.time import IterationWork, engine_s, learner_s, summed_rate
from prefixrl.learner.models.trained_model import lr_at

RECIPE = IterationWork(
    rows=4096, prompt_tokens=200, sampled_tokens=32, prompts=4096, epochs=1, has_critic=True, has_reference=True,
    is_measured=True, is_checkpointed=False,
)  # fmt: skip


def test_forwards_are_counted_pass_by_pass() -> None:
    # Measured: proximal, reference, values. Trained: actor and critic, forward and a backward of two.
    assert RECIPE.forwards == 3 + 2 * 3
    assert replace(RECIPE, is_checkpointed=True).forwards == 3 + 2 * 4
    assert replace(RECIPE, epochs=2, has_critic=False, has_reference=False, is_measured=False).forwards == 2 * 3


def test_seconds_are_operations_by_speed() -> None:
    assert RECIPE.tokens == 4096 * 232
    assert replace(RECIPE, prompts=512).tokens == 512 * 200 + 4096 * 32
    expected = 2 * 1.31e9 * 4096 * 232 * 9 / (445e12 * 2)
    assert abs(learner_s(RECIPE, 1_310_000_000, 2, 445.0) - expected) < 1e-9
    assert engine_s(2_457_600, 6, 9200.0) == 2_457_600 / 55_200


@pytest.mark.parametrize("steps", [1, 2, 3, 100, 1389])
@pytest.mark.parametrize("warmup_ratio", [0.0, 0.03, 0.5, 1.0])
@pytest.mark.parametrize("min_ratio", [0.0, 0.1, 1.0])
def test_the_summed_rate_is_that_of_the_schedule_step_by_step(
    steps: int, warmup_ratio: float, min_ratio: float
) -> None:
    slow = sum(lr_at(step, steps, 2e-4, warmup_ratio, min_ratio) for step in range(steps))
    assert summed_rate(2e-4, steps, warmup_ratio, min_ratio) == pytest.approx(slow)
