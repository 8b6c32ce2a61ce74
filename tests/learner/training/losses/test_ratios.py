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
    found = ppo.is_past_ratio(moved, torch.zeros_like(moved), mask, advantages, bound)
    for row, size in enumerate(sizes):
        limit = math.log(bound) * (1.0 if size <= 32 else math.sqrt(size / 32))
        pushed = advantages[row, :size] * sum(moved[row, :size].tolist())
        assert found[row, :size].tolist() == (pushed > limit).tolist()


@given(seeds, st.floats(0.0, 0.99), st.floats(1.01, 3.0))
def test_the_masks_keep_what_lies_in_both_bands(seed: int, low: float, high: float) -> None:
    random = np.random.Generator(np.random.PCG64(seed))
    sizes = random.integers(1, 7, random.integers(1, 6)).tolist()
    mask = torch.arange(max(sizes))[None, :] < torch.tensor(sizes)[:, None]
    proximal, behaviour = (torch.from_numpy(random.normal(-2.0, 0.4, mask.shape)) for _ in range(2))
    token, row = (low, high), (low / 2 + 0.5, high / 2 + 0.5)
    for bands in ((None, None), (token, None), (None, row), (token, row)):
        kept = ppo.kept_tokens(proximal, behaviour, mask, *bands)
        for i, size in enumerate(sizes):
            ratios = [
                math.exp(proximal[i, t].item()) / math.exp(behaviour[i, t].item())
                for t in range(size)
            ]
            mean = math.prod(ratios) ** (1 / size)
            row_counts = bands[1] is None or bands[1][0] <= mean <= bands[1][1]
            twin = [
                row_counts and (bands[0] is None or bands[0][0] <= ratio <= bands[0][1])
                for ratio in ratios
            ]
            assert kept[i].tolist() == twin + [False] * (kept.shape[1] - size)


@given(st.lists(st.floats(0.0, 4.0), min_size=0, max_size=12), st.floats(0.01, 2.0))
def test_m2po_leaves_out_the_fewest_tokens_that_bring_the_mean_below_its_bound(
    values: list[float], bound: float
) -> None:
    limit = ppo.second_moment_limit(torch.tensor(values, dtype=torch.float64), bound)
    kept = [value for value in values if value < limit]
    left = sorted(value for value in values if value >= limit)
    assert not kept or sum(kept) / len(kept) <= bound + 1e-12
    if left:  # with all that are as small as the next one it would be above
        next_ = [*kept, *(value for value in left if value == left[0])]
        assert sum(next_) / len(next_) > bound - 1e-12


def test_the_interpolated_proximal_is_the_behaviour_at_age_0_and_nears_the_current_policy_with_age() -> (
    None
):
    theta, mu = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-3.0, -3.0, -3.0])
    found = ppo.interpolated(theta, mu, torch.tensor([0, 1, 9]))
    torch.testing.assert_close(found, torch.tensor([-3.0, -2.0, -1.2]))
