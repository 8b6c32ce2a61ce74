"""Differences of arms on the same problems: against slow twins, and by how often their intervals hold the truth."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixrl.common.evaluation.accuracy import agresti_min, difference, sign_test

SHARES = st.sampled_from([0.0, 0.25, 0.5, 1.0])


@given(st.integers(0, 9), st.integers(0, 9))
def test_the_chance_is_the_share_of_coin_tosses_that_are_at_least_as_unequal(
    better: int, worse: int
) -> None:
    tosses = (
        [sum(toss) for toss in itertools.product((0, 1), repeat=better + worse)]
        if better + worse <= 12
        else None
    )
    if tosses is None:
        heads = [k for k in range(better + worse + 1) for _ in range(math.comb(better + worse, k))]
        tosses = heads
    unequal = [abs(2 * heads - better - worse) >= abs(better - worse) for heads in tosses]
    assert sign_test(better, worse) == pytest.approx(sum(unequal) / len(unequal))


@given(st.dictionaries(st.integers(0, 9).map(str), st.tuples(SHARES, SHARES), min_size=1))
def test_a_difference_is_counted_problem_by_problem(
    rewards: dict[str, tuple[float, float]],
) -> None:
    one, other = ({name: pair[at] for name, pair in rewards.items()} for at in (0, 1))
    actual = difference(one | {"only one": 1.0}, other | {"only other": 0.0})
    assert actual is not None and actual.problems == len(rewards)
    assert actual.mean == pytest.approx(sum(a - b for a, b in rewards.values()) / len(rewards))
    assert (actual.better, actual.worse) == tuple(
        sum(sign * (a - b) > 0 for a, b in rewards.values()) for sign in (1, -1)
    )
    back = difference(other, one)
    assert (
        back is not None
        and back.mean == pytest.approx(-actual.mean)
        and back.chance == actual.chance
    )
    assert actual.ci95[0] < actual.ci95[1] and actual.ci95[0] >= -1 and actual.ci95[1] <= 1


def test_arms_without_a_common_problem_have_no_difference() -> None:
    assert difference({"a": 1.0}, {"b": 1.0}) is None
    assert difference({}, {}) is None


@pytest.mark.parametrize(
    ("gain", "loss", "problems"),
    [(0.15, 0.05, 100), (0.02, 0.02, 60), (0.3, 0.0, 40), (0.0, 0.0, 50), (0.08, 0.02, 200)],
)
def test_the_paired_interval_holds_the_truth_19_times_in_20(
    gain: float, loss: float, problems: int
) -> None:
    generator = np.random.default_rng(0)
    better, worse, _ = generator.multinomial(problems, [gain, loss, 1 - gain - loss], size=2000).T
    ends = [agresti_min(int(b), int(w), problems) for b, w in zip(better, worse, strict=True)]
    covered = sum(low <= gain - loss <= high for low, high in ends) / len(ends)
    assert covered >= 0.925


@pytest.mark.nightly
def test_the_paired_bootstrap_holds_the_truth_19_times_in_20_and_pairing_narrows_it() -> None:
    generator = np.random.default_rng(1)
    covered, widths = 0, []
    for _ in range(200):
        hard = generator.beta(0.4, 0.6, 120)
        one, other = (generator.binomial(4, np.clip(hard + gain, 0, 1)) / 4 for gain in (0.0, 0.0))
        actual = difference(dict(enumerate_names(one)), dict(enumerate_names(other)))
        assert actual is not None
        covered += actual.ci95[0] <= 0.0 <= actual.ci95[1]
        widths.append(actual.ci95[1] - actual.ci95[0])
    assert 0.9 <= covered / 200 <= 0.99
    # Two means of 120 problems with this spread, taken for independent: 3.92 sqrt(2 var / 120).
    apart = 3.92 * math.sqrt(
        2 * float(np.var(generator.binomial(4, generator.beta(0.4, 0.6, 9999)) / 4)) / 120
    )
    assert max(widths) < apart


def enumerate_names(
    values: np.ndarray[tuple[int], np.dtype[np.float64]],
) -> list[tuple[str, float]]:
    return [(str(index), float(value)) for index, value in enumerate(values)]
