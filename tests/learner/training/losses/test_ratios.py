"""Granularity of ratios, masks and limits against slow twins."""

import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from prefixrl.learner.training import ppo

seeds = st.integers(0, 2**31 - 1)


def test_the_ratio_of_a_prefix_is_the_product_of_its_tokens_or_their_geometric_mean() -> None:
    mask = torch.tensor([[True, True, True, True], [True, False, False, False]])
    above = torch.tensor([[0.01, 0.03, 0.02, 0.02], [0.5, 9.0, 9.0, 9.0]])
    below = torch.zeros(2, 4)
    torch.testing.assert_close(
        ppo.log_ratios(above, below, mask, "prefix"),
        torch.tensor([[0.08] * 4, [0.5, 0.0, 0.0, 0.0]]),
    )
    torch.testing.assert_close(
        ppo.log_ratios(above, below, mask, "prefix_mean"),
        torch.tensor([[0.02] * 4, [0.5, 0.0, 0.0, 0.0]]),
    )
    assert ppo.units(mask, "prefix").tolist() == [[True, False, False, False]] * 2
    assert ppo.units(mask, "token").tolist() == mask.tolist()


def test_a_log_ratio_beyond_the_clamp_has_no_gradient() -> None:
    above = torch.tensor([[95.0, -95.0, 1.0]], requires_grad=True)
    logs = ppo.log_ratios(above, torch.zeros(1, 3), torch.ones(1, 3, dtype=torch.bool), "token")
    logs.exp().sum().backward()  # type: ignore[no-untyped-call]
    assert logs.tolist() == [[ppo.LOG_RATIO_LIMIT, -ppo.LOG_RATIO_LIMIT, 1.0]]
    torch.testing.assert_close(above.grad, torch.tensor([[0.0, 0.0, math.e]]))


@given(seeds, st.floats(1.01, 3.0))
def test_the_bound_of_a_row_grows_with_the_root_of_its_tokens_above_32(
    seed: int, bound: float
) -> None:
    random = np.random.Generator(np.random.PCG64(seed))
    sizes = random.integers(1, 400, 6).tolist()
    mask = torch.arange(max(sizes))[None, :] < torch.tensor(sizes)[:, None]
    moved = torch.from_numpy(random.normal(0.0, 0.1, mask.shape))
    advantages = torch.from_numpy(random.choice([-1.0, 0.0, 1.0], mask.shape))
    actual = ppo.is_past_ratio(moved, torch.zeros_like(moved), mask, advantages, bound)
    for row, size in enumerate(sizes):
        limit = math.log(bound) * (1.0 if size <= 32 else math.sqrt(size / 32))
        pushed = advantages[row, :size] * sum(moved[row, :size].tolist())
        assert actual[row, :size].tolist() == (pushed > limit).tolist()
