"""Process rewards of an implicit model against numbers worked out by hand, and slow twins written as in the paper."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from prefixrl.learner.training import implicit_reward as implicit
from prefixrl.learner.training.advantages import gae, group_advantages

Rows = list[list[float]]
Q: Rows = [[0.4, -0.2, 0.6], [-1.0, 0.2], [0.3]]
OUTCOMES = [1.0, 0.0, 1.0]
BETA = 0.05


def padded(rows: Rows) -> tuple[Tensor, Tensor]:
    width = max(map(len, rows))
    values = torch.tensor(
        [[*row, *[9.0] * (width - len(row))] for row in rows], dtype=torch.float64
    )
    mask = torch.tensor([[True] * len(row) + [False] * (width - len(row)) for row in rows])
    return values, mask


def unpadded(values: Tensor, mask: Tensor) -> Rows:
    return [row[kept].tolist() for row, kept in zip(values, mask, strict=True)]


def close(found: Rows, expected: Rows) -> bool:
    return all(
        row == pytest.approx(other, abs=1e-4) for row, other in zip(found, expected, strict=True)
    )


def normalised() -> tuple[Tensor, Tensor]:
    values, mask = padded(Q)
    rewards, counted = implicit.process_rewards(values, mask, BETA, "token")
    return rewards / (implicit.largest_return(rewards, counted) + implicit.NORM_FLOOR), counted


def returns(form: Any, gamma: float) -> Rows:
    rewards, mask = normalised()
    result = implicit.row_baselines(implicit.row_means(rewards, mask).tolist(), [0, 0, 0], form)
    offsets, scales = torch.tensor(result).T[..., None]
    less = torch.where(mask, (rewards - offsets) * scales, 0.0)
    return unpadded(gae(less, torch.zeros_like(less), mask, gamma, 1.0)[0], mask)


def test_the_loss_is_the_mean_cross_entropy_of_the_outcomes() -> None:
    values, mask = padded(Q)
    loss = implicit.outcome_loss(values, mask, torch.tensor(OUTCOMES), BETA, 3.0)
    assert loss.item() == pytest.approx(0.677457, abs=1e-6)


def test_rewards_are_divided_by_the_largest_return() -> None:
    values, mask = padded(Q)
    rewards, counted = implicit.process_rewards(values, mask, BETA, "token")
    assert implicit.largest_return(rewards, counted).item() == pytest.approx(0.8 * BETA)
    actual, _ = normalised()
    assert close(unpadded(actual, mask), [[0.5, -0.25, 0.75], [-1.25, 0.25], [0.375]])
    assert implicit.row_means(actual, mask).tolist() == pytest.approx(
        [0.33333, -0.5, 0.375], abs=1e-4
    )


@pytest.mark.parametrize(
    ("form", "gamma", "expected"),
    [
        pytest.param(
            "paper", 1.0, ([1.1875, 0.625, 0.8125], [-1.7083, -0.1042], [0.4583]), id="paper"
        ),
        pytest.param(
            "code", 1.0, ([1.1875, 0.5417, 1.0208], [-1.7083, 0.2708], [0.4583]), id="code"
        ),
        pytest.param(
            "paper",
            0.9,
            ([1.0519, 0.5437, 0.8125], [-1.6979, -0.1042], [0.4583]),
            id="paper with a discount",
        ),
    ],
)
def test_process_returns_are_those_worked_out_by_hand(
    form: str, gamma: float, expected: Rows
) -> None:
    assert close(returns(form, gamma), expected)


def test_with_the_outcome_the_advantage_is_the_sum_of_both() -> None:
    outcome = group_advantages(OUTCOMES, [0, 0, 0], "leave_one_out", None)
    assert outcome == pytest.approx([0.5, -1.0, 0.5])
    total = [
        [each + mine for each in row]
        for row, mine in zip(returns("paper", 1.0), outcome, strict=True)
    ]
    assert close(total, [[1.6875, 1.1250, 1.3125], [-2.7083, -1.1042], [0.9583]])


values = st.floats(-3.0, 3.0, allow_nan=False).map(lambda x: round(x, 3))


@st.composite
def grouped(draw: st.DrawFn) -> tuple[Rows, list[int]]:
    rows = draw(st.lists(st.lists(values, min_size=1, max_size=5), min_size=1, max_size=9))
    return rows, draw(st.lists(st.integers(0, 2), min_size=len(rows), max_size=len(rows)))


def less_baseline(
    reward: float, mine: list[float], others: list[float], form: str, floor: float
) -> float:
    if form == "none":
        return reward
    if not others:
        return 0.0
    count, mean = len(mine), sum(mine) / len(mine)
    if form == "paper":
        return reward - sum(others) / len(others)
    if form == "code":
        return count / (count - 1) * (reward - mean)
    if form == "mean":
        return reward - mean
    deviation = math.sqrt(sum((mu - mean) ** 2 for mu in mine) / (count - 1))
    return (reward - mean) / (deviation + floor) if deviation else 0.0


@given(
    grouped(),
    st.sampled_from(["paper", "code", "mean", "zscore", "none"]),
    st.sampled_from(["token", "whole"]),
)
def test_baselines_are_those_of_loops_over_rows_and_tokens(
    given_rows: Any, form: Any, granularity: Any
) -> None:
    rows, groups = given_rows
    log_ratio, mask = padded(rows)
    rewards, counted = implicit.process_rewards(log_ratio, mask, BETA, granularity)
    actual = implicit.row_baselines(
        implicit.row_means(rewards, counted).tolist(), groups, form, 0.5
    )
    scored = [
        [BETA * sum(row)] if granularity == "whole" else [BETA * each for each in row]
        for row in rows
    ]
    mus = [sum(row) / len(row) for row in scored]
    for index, row in enumerate(scored):
        mine = [mu for mu, group in zip(mus, groups, strict=True) if group == groups[index]]
        others = [mu for j, mu in enumerate(mus) if groups[j] == groups[index] and j != index]
        twin = [less_baseline(each, mine, others, form, 0.5) for each in row]
        own = rewards[index][counted[index]].tolist()
        assert [
            (each - actual[index].offset) * actual[index].scale for each in own
        ] == pytest.approx(twin, abs=1e-9)


@given(grouped())
def test_the_code_form_adds_a_term_that_sums_to_zero_over_each_row(given_rows: Any) -> None:
    rows, groups = given_rows
    rewards, mask = padded(rows)
    means = implicit.row_means(rewards, mask).tolist()
    paper, code = (implicit.row_baselines(means, groups, form) for form in ("paper", "code"))
    for index, row in enumerate(rows):
        count = groups.count(groups[index])
        if count == 1:
            continue
        for each in row:
            extra = (each - code[index].offset) * code[index].scale - (each - paper[index].offset)
            assert extra == pytest.approx((each - means[index]) / (count - 1), abs=1e-9)


@given(grouped(), st.data())
def test_loss_and_pairwise_accuracy_are_those_of_loops(
    given_rows: Any, data: st.DataObject
) -> None:
    rows, groups = given_rows
    outcomes = data.draw(
        st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=len(rows), max_size=len(rows))
    )
    log_ratio, mask = padded(rows)
    loss = implicit.outcome_loss(log_ratio, mask, torch.tensor(outcomes), BETA, len(rows))
    scores = [BETA * sum(row) for row in rows]
    sigmas = [1 / (1 + math.exp(-score)) for score in scores]
    twin = -sum(
        o * math.log(s) + (1 - o) * math.log(1 - s) for o, s in zip(outcomes, sigmas, strict=True)
    ) / len(rows)
    assert loss.item() == pytest.approx(twin, abs=1e-9)
    shares = []
    for group in sorted(set(groups)):
        own = [(outcomes[i], scores[i]) for i in range(len(rows)) if groups[i] == group]
        pairs = [(a, b) for i, a in enumerate(own) for b in own[:i] if a[0] != b[0]]
        weights = [abs(a[0] - b[0]) for a, b in pairs]
        right = [0.5 if a[1] == b[1] else float((a[0] > b[0]) == (a[1] > b[1])) for a, b in pairs]
        if pairs:
            shares.append(sum(w * r for w, r in zip(weights, right, strict=True)) / sum(weights))
    actual = implicit.pairwise_accuracy(scores, outcomes, groups)
    assert actual == (pytest.approx(sum(shares) / len(shares)) if shares else None)


def test_groups_that_are_all_right_or_all_wrong_do_not_count_in_the_pairwise_accuracy() -> None:
    ranked, uniform = ([0.9, 0.1], [1.0, 0.0]), ([0.2, 0.7, 0.3, 0.4], [1.0, 1.0, 0.0, 0.0])
    scores, outcomes = ranked[0] + uniform[0], ranked[1] + uniform[1]
    assert implicit.pairwise_accuracy(scores, outcomes, [0, 0, 1, 1, 2, 2]) == 1.0
    assert implicit.pairwise_accuracy(*uniform, [1, 1, 2, 2]) is None


def test_a_confident_wrong_row_still_has_a_gradient() -> None:
    log_ratio = torch.tensor([[4000.0]], requires_grad=True)
    implicit.outcome_loss(
        log_ratio, torch.tensor([[True]]), torch.tensor([0.0]), BETA, 1.0
    ).backward()
    assert log_ratio.grad is not None and log_ratio.grad.item() == pytest.approx(BETA)


def test_rows_without_tokens_count_for_nothing() -> None:
    log_ratio, mask = torch.tensor([[1.0], [2.0]]), torch.tensor([[True], [False]])
    alone = implicit.outcome_loss(log_ratio[:1], mask[:1], torch.tensor([1.0]), BETA, 1.0)
    assert torch.equal(
        implicit.outcome_loss(log_ratio, mask, torch.tensor([1.0, 1.0]), BETA, 1.0), alone
    )
    assert implicit.row_means(log_ratio, mask).tolist() == [1.0, 0.0]
    assert implicit.largest_return(log_ratio, mask).item() == 1.0
