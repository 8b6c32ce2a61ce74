"""Figures from sums."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from prefixrl.learner.models import distributed
from prefixrl.learner.models.batch import PaddedRows, PreparedMicroBatch, Sample, filler_row, pad
from prefixrl.learner.training import ppo, speed
from prefixrl.learner.training.figures import _crossed, _row_ages, histogram, means, reward_figures


def sums_of(importance: list[float], returns: list[float], values: list[float]) -> dict[str, float]:
    error = [r - v for r, v in zip(returns, values, strict=True)]
    zeros = (
        "clipped",
        "rows_left_out",
        "bounded",
        "approx_kl",
        "entropy",
        "ratio",
        "importance_capped",
        "behaviour_gap",
        "value_clipped",
    )
    return dict.fromkeys(zeros, 0.0) | {
        "tokens": float(len(importance)),
        "rows": float(len(importance)),
        "units": float(len(importance)),
        "weights": float(len(importance)),
        "value_tokens": float(len(importance)),
        "importance": sum(importance),
        "importance_squared": sum(x * x for x in importance),
        "value": sum(values),
        "return": sum(returns),
        "return_squared": sum(x * x for x in returns),
        "value_error": sum(error),
        "value_error_squared": sum(x * x for x in error),
    }


def test_equal_weights_keep_the_whole_sample_and_one_heavy_weight_keeps_one_of_it() -> None:
    flat = means(sums_of([1.0] * 4, [0.0] * 4, [0.0] * 4), (0.0, 4.0, 4.0))
    assert flat["importance_ess_fraction"] == pytest.approx(1.0)
    heavy = means(sums_of([8.0, 0.0, 0.0, 0.0], [0.0] * 4, [0.0] * 4), (0.0, 4.0, 4.0))
    assert heavy["importance_ess_fraction"] == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("values", "explained"),
    [([0.0, 1.0, 0.0, 1.0], 1.0), ([0.5] * 4, 0.0), ([1.0, 0.0, 1.0, 0.0], -3.0)],
)
def test_explained_variance_is_1_for_a_perfect_critic_and_0_for_a_constant(
    values: list[float], explained: float
) -> None:
    figures = means(sums_of([1.0] * 4, [0.0, 1.0, 0.0, 1.0], values), (2.0, 5.0, 4.0))
    assert figures["explained_variance"] == pytest.approx(explained)
    assert figures["advantage"] == 0.5
    assert figures["advantage_deviation"] == pytest.approx(1.0)


def test_equal_returns_have_no_variance_to_explain() -> None:
    figures = means(sums_of([1.0], [1.0], [0.5]), (0.0, 0.0, 1.0))
    assert figures["explained_variance"] == 0.0


def test_a_value_on_an_edge_is_in_the_bin_below_and_all_values_are_counted() -> None:
    edges = (0.0, 1.0)
    counts = ppo.bin_counts(torch.tensor([-9.0, 0.0, 0.5, 1.0, 3.0]), edges)
    assert histogram(edges, counts).counts == (2, 2, 1)


def test_without_a_critic_there_are_no_figures_of_values() -> None:
    sums = sums_of([1.0], [1.0], [0.5])
    del sums["value_tokens"]
    assert not {"value", "return", "explained_variance"} & set(means(sums, (0.0, 0.0, 1.0)))


def test_ratios_are_averaged_over_ratios_and_logprobs_over_tokens() -> None:
    sums = sums_of([2.0, 2.0], [0.0] * 2, [0.0] * 2) | {"tokens": 8.0, "entropy": 4.0}
    figures = means(sums, (0.0, 0.0, 1.0))
    assert (figures["importance"], figures["entropy"]) == (2.0, 0.5)


def test_groups_that_all_passed_or_all_failed_are_uniform() -> None:
    figures = reward_figures([1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.5, 0.5], [0, 0, 1, 1, 2, 2, 3, 4])
    assert figures == pytest.approx(
        {
            "reward": 0.5,
            "reward_std": math.sqrt(6 * 0.25 / 8),
            "uniform_groups_fraction": 4 / 5,
            "all_right_groups_fraction": 1 / 5,
            "all_wrong_groups_fraction": 1 / 5,
            "groups_of_one_fraction": 2 / 5,
        }
    )


def prepared(batch: PaddedRows, iteration: int) -> PreparedMicroBatch:
    nothing = torch.zeros_like(batch.behaviour)
    ages = torch.where(batch.mask, iteration - batch.versions, 0)
    return PreparedMicroBatch((), batch, nothing, None, nothing, nothing, nothing, ages)


def test_a_row_is_as_old_as_its_oldest_token_and_a_filler_is_no_row() -> None:
    token = np.ones(1, np.int32)
    rows = [
        Sample(
            token,
            np.ones(len(of), np.int32),
            np.zeros(len(of), np.float32),
            0.0,
            0,
            np.array(of, np.int32),
        )
        for of in ([2, 3, 5], [4, 4], [5])
    ]
    oldest, newest = _row_ages([prepared(pad(rows, 0), 5), prepared(filler_row(0), 5)])
    assert oldest.tolist() == [3, 1, 0]
    assert newest.tolist() == [0, 1, 0]
    distributed.start("cpu", 0, 1)
    assert _crossed(oldest, newest) == pytest.approx(1 / 3), "one row has tokens of several ages"


def test_a_rank_tells_its_speed_and_on_cuda_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    distributed.start("cpu", 0, 1)
    own = {"rank": 0, "is_shared": True, "device": torch.device("cpu"), "critic": None}
    models: Any = SimpleNamespace(**own, actor=SimpleNamespace(weights=10**12))
    work = (((((0, 1),), ()),), ((((2,),), ()),)), [(4, 3), (4, 2), (5, 1)], 0.5
    assert speed.rank_figures(models, *work) == {"tokens_per_s/0": (4 + 3 + 2 + 5 + 1) / 0.5}
    models.device = torch.device("cuda")
    for name, size in (("max_memory_allocated", 3 << 30), ("max_memory_reserved", 4 << 30)):
        monkeypatch.setattr(torch.cuda, name, lambda _, size=size: size)
    assert list(speed.own_figures(models, *work).values()) == [30.0, 180.0, 3.0, 4.0]
