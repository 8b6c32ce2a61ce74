"""Rewards, GAE and whitening against slow twins that loop over rows and tokens as the paper writes them."""

import math
from random import Random
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from prefixrl.learner.training.advantages import (
    advantages_by_parts,
    gae,
    group_advantages,
    moments,
    token_rewards,
    whiten,
)

seeds = st.integers(0, 2**31 - 1)
shares = st.floats(0.0, 1.0)


def ragged(seed: int, junk: float = 1e30) -> tuple[list[int], Tensor, Tensor, Tensor]:
    """Row lengths, mask, and two random tensors with junk under the padding."""
    random = np.random.Generator(np.random.PCG64(seed))
    sizes = random.integers(1, 8, random.integers(1, 6)).tolist()
    mask = torch.arange(max(sizes))[None, :] < torch.tensor(sizes)[:, None]
    draws = torch.from_numpy(random.normal(size=(2, *mask.shape)))
    return sizes, mask, draws[0].masked_fill(~mask, junk), draws[1].masked_fill(~mask, math.nan)


@given(seeds, shares, shares)
def test_gae_is_the_sum_of_discounted_deltas(seed: int, gamma: float, lambda_: float) -> None:
    sizes, mask, rewards, values = ragged(seed)
    advantages, returns = gae(rewards, values, mask, gamma, lambda_)
    for row, size in enumerate(sizes):
        v = [*values[row, :size].tolist(), 0.0]
        deltas = [rewards[row, t].item() + gamma * v[t + 1] - v[t] for t in range(size)]
        for t in range(size):
            twin = sum((gamma * lambda_) ** (s - t) * deltas[s] for s in range(t, size))
            assert math.isclose(advantages[row, t].item(), twin, abs_tol=1e-9)
            assert math.isclose(returns[row, t].item(), twin + v[t], abs_tol=1e-9)
        assert not advantages[row, size:].any() and not returns[row, size:].any()


def test_gae_by_hand_with_gamma_1_and_lambda_half() -> None:
    advantages, returns = gae(
        torch.tensor([[0.0, 1.0]]),
        torch.tensor([[0.5, 0.25]]),
        torch.ones(1, 2, dtype=torch.bool),
        1.0,
        0.5,
    )
    assert advantages.tolist() == [[-0.25 + 0.5 * 0.75, 0.75]]
    assert returns.tolist() == [[0.625, 1.0]]


def test_with_lambda_and_gamma_1_every_token_of_a_row_returns_its_verdict() -> None:
    mask = torch.tensor([[True, True, True], [True, False, False]])
    rewards = token_rewards(torch.tensor([1.0, 0.0]), mask)
    _, returns = gae(rewards, torch.tensor([[0.3, -0.2, 0.9], [0.4, 7.0, 7.0]]), mask, 1.0, 1.0)
    torch.testing.assert_close(returns, torch.tensor([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]))


@given(seeds)
def test_the_verdict_stands_at_the_last_sampled_token_and_the_penalty_at_every_one(
    seed: int,
) -> None:
    sizes, mask, verdicts, penalty = ragged(seed)
    per_row = verdicts[:, 0]
    rewards = token_rewards(per_row, mask, penalty)
    for row, size in enumerate(sizes):
        for t in range(mask.shape[1]):
            verdict = per_row[row].item() if t == size - 1 else 0.0
            twin = verdict - penalty[row, t].item() if t < size else 0.0
            assert rewards[row, t].item() == twin


def test_a_verdict_of_0_is_a_reward_and_not_a_missing_one() -> None:
    mask = torch.ones(2, 1, dtype=torch.bool)
    assert token_rewards(torch.tensor([0.0, 1.0]), mask).tolist() == [[0.0], [1.0]]


@given(seeds, st.integers(1, 4))
def test_whitening_with_moments_added_over_parts_is_the_textbook_formula(
    seed: int, parts: int
) -> None:
    _, mask, x, _ = ragged(seed)
    together = torch.stack(
        [moments(a, b) for a, b in zip(x.chunk(parts), mask.chunk(parts), strict=True)]
    ).sum(dim=0)
    whitened, is_floored = whiten(x, mask, together, floor=1e-6)
    valid = x[mask].tolist()
    mean = sum(valid) / len(valid)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in valid) / len(valid))
    assert is_floored == (deviation < 1e-6)
    if not is_floored:
        twin = torch.tensor([(value - mean) / deviation for value in valid], dtype=x.dtype)
        torch.testing.assert_close(whitened[mask], twin, rtol=1e-6, atol=1e-6)
    assert not whitened[~mask].any()


def test_equal_advantages_do_not_become_noise_of_size_one() -> None:
    x = torch.full((3, 4), 0.7) + 1e-7 * torch.arange(12.0).reshape(3, 4)
    mask = torch.ones(3, 4, dtype=torch.bool)
    whitened, is_floored = whiten(x, mask, moments(x, mask), floor=1e-4)
    assert is_floored
    assert whitened.abs().max() < 0.02


def test_with_lambda_1_every_token_of_one_action_returns_the_same() -> None:
    mask = torch.ones(1, 5, dtype=torch.bool)
    rewards = token_rewards(torch.tensor([0.3 + 0.95 * 0.7]), mask)
    _, returns = gae(rewards, torch.randn(1, 5, dtype=torch.float64), mask, 1.0, 1.0)
    assert returns.tolist()[0] == pytest.approx([0.965] * 5)


grouped = st.lists(
    st.tuples(st.integers(0, 4), st.sampled_from([0.0, 0.0, 1.0, 0.25, 0.7])), min_size=1
)


@given(grouped)
def test_rloo_compares_with_the_mean_of_the_others(rows: list[tuple[int, float]]) -> None:
    groups, rewards = [group for group, _ in rows], [reward for _, reward in rows]
    actual = group_advantages(rewards, groups, "leave_one_out", None)
    for i, (group, reward) in enumerate(rows):
        others = [r for j, (g, r) in enumerate(rows) if g == group and j != i]
        twin = reward - sum(others) / len(others) if others else 0.0
        assert actual[i] == pytest.approx(twin, abs=1e-12)


@given(grouped)
def test_the_mean_baseline_is_the_mean_of_the_group(rows: list[tuple[int, float]]) -> None:
    groups, rewards = [group for group, _ in rows], [reward for _, reward in rows]
    actual = group_advantages(rewards, groups, "mean", None)
    for i, (group, reward) in enumerate(rows):
        members = [r for g, r in rows if g == group]
        assert actual[i] == pytest.approx(reward - sum(members) / len(members), abs=1e-12)


@given(grouped)
def test_grpo_standardises_within_the_group(rows: list[tuple[int, float]]) -> None:
    groups, rewards = [group for group, _ in rows], [reward for _, reward in rows]
    actual = group_advantages(rewards, groups, "mean", 1e-6)
    for i, (group, reward) in enumerate(rows):
        members = np.array([r for g, r in rows if g == group])
        spread = members.std(ddof=1) if len(members) > 1 else 0.0
        twin = (reward - members.mean()) / (spread + 1e-6) if spread > 1e-9 else 0.0
        assert actual[i] == pytest.approx(twin, abs=1e-9)


@given(grouped, st.randoms(use_true_random=False), st.floats(-3.0, 3.0))
def test_order_and_a_shift_of_all_rewards_change_no_advantage(
    rows: list[tuple[int, float]], random: Random, shift: float
) -> None:
    order = list(range(len(rows)))
    random.shuffle(order)
    for baseline, floor in (("mean", None), ("mean", 1e-6), ("leave_one_out", None)):
        plain = group_advantages([r for _, r in rows], [g for g, _ in rows], baseline, floor)
        moved = group_advantages(
            [rows[i][1] + shift for i in order], [rows[i][0] for i in order], baseline, floor
        )
        assert moved == pytest.approx([plain[i] for i in order], abs=1e-6)


def test_leave_one_out_of_two_right_and_one_wrong() -> None:
    rewards, groups = [1.0, 0.0, 1.0], [7, 7, 7]
    loo = group_advantages(rewards, groups, "leave_one_out", None)
    assert loo == pytest.approx([0.5, -1.0, 0.5])
    mean = group_advantages(rewards, groups, "mean", None)
    assert loo == pytest.approx([1.5 * each for each in mean])  # K / (K - 1)


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("floor", [None, 1e-6])
@pytest.mark.parametrize("rewards", [[0.1], [0.1] * 3, [0.0] * 4, [1.0] * 7])
def test_a_group_of_one_and_a_group_of_equals_teach_exactly_nothing(
    rewards: list[float], floor: float | None, baseline: Literal["mean", "leave_one_out"]
) -> None:
    assert not any(group_advantages(rewards, [3] * len(rewards), baseline, floor))


# --- parts of a reward, each standardised by itself -------------------------------------------------


def gdpo(
    parts: dict[str, list[float]], weights: dict[str, float], groups: list[int], eps: float
) -> list[float]:
    """GDPO, sections 3 and 3.1: normalise each reward within its group, sum with weights, normalise over the batch."""

    def std(values: list[float]) -> float:
        mean = sum(values) / len(values)
        return math.sqrt(sum((value - mean) ** 2 for value in values) / max(1, len(values) - 1))

    a_sum = []
    for j, i in enumerate(groups):
        total = 0.0
        for n, w_n in weights.items():
            of_group = [r for r, group in zip(parts[n], groups, strict=True) if group == i]
            mean = sum(of_group) / len(of_group)
            total += w_n * (parts[n][j] - mean) / (std(of_group) + eps)
        a_sum.append(total)
    batch_mean = sum(a_sum) / len(a_sum)
    return [(a - batch_mean) / (std(a_sum) + eps) for a in a_sum]


@given(seeds)
def test_parts_are_standardised_each_in_its_group_then_their_sum_over_the_iteration(
    seed: int,
) -> None:
    random = Random(seed)
    groups = sorted(random.randrange(4) for _ in range(random.randint(2, 16)))
    random.shuffle(groups)
    parts = {
        "right": [float(random.random() < 0.5) for _ in groups],
        "length": [random.uniform(-100, 100) for _ in groups],
        "unweighted": [random.random() for _ in groups],
    }
    weights = {"right": random.uniform(0.1, 1.0), "length": random.uniform(0.1, 1.0)}
    actual = advantages_by_parts(parts, weights, groups, 1e-6)
    assert actual == pytest.approx(gdpo(parts, weights, groups, 1e-6), abs=1e-6)


def test_two_parts_that_differ_count_twice_as_much_as_one_and_a_large_scale_counts_no_more() -> (
    None
):
    # The paper's example: rewards (0, 1) and (0, 2) of two rows are one advantage under GRPO.
    parts = {"right": [0.0, 0.0, 0.0, 1.0], "form": [0.0, 1.0, 0.0, 1.0]}
    summed = [right + form for right, form in zip(parts["right"], parts["form"], strict=True)]
    grpo = group_advantages(summed, [0, 0, 1, 1], "mean", 1e-6)
    assert grpo[1] == pytest.approx(grpo[3], rel=1e-5)
    by_parts = advantages_by_parts(parts, {"right": 1.0, "form": 1.0}, [0, 0, 1, 1], 1e-6)
    assert by_parts[3] == pytest.approx(2 * by_parts[1], rel=1e-5)
    scaled = parts | {"form": [1000 * each for each in parts["form"]]}
    again = advantages_by_parts(scaled, {"right": 1.0, "form": 1.0}, [0, 0, 1, 1], 1e-6)
    assert again == pytest.approx(by_parts, rel=1e-5)


def test_parts_that_nothing_can_be_learned_from_are_exactly_0_and_huge_ones_stay_finite() -> None:
    assert advantages_by_parts({"a": [0.1] * 6}, {"a": 0.3}, [0, 0, 0, 1, 1, 1], 1e-6) == [0.0] * 6
    assert advantages_by_parts({}, {"a": 1.0}, [0, 0], 1e-6) == [0.0, 0.0]
    huge = advantages_by_parts({"a": [1e308, -1e308, 1.0]}, {"a": 1.0}, [0, 0, 0], 1e-6)
    assert all(map(math.isfinite, huge)) and huge[0] > huge[2] > huge[1]
