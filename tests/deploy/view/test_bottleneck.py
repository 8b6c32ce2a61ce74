"""The part that holds a run up, and the number of workers that would keep the learner busy."""

import itertools

import pytest

from prefixrl.deploy.view.bottleneck import FULL_SHARE, bottleneck_words


@pytest.mark.parametrize(
    ("busy", "window", "words"),
    [
        pytest.param(
            {"learner": 0.2, "rollout": 0.1, "scorer": 0.99},
            2,
            "scorer, busy for 99% of the time: up to 11 instead of 2 would keep the learner busy (launch.scorers)",
            id="few scorers",
        ),
        pytest.param(
            {"learner": 0.2, "rollout": 0.95, "scorer": 0.4},
            2,
            "rollout, busy for 95% of the time: up to 6 instead of 1",
            id="few rollouts",
        ),
        pytest.param(
            {"learner": 0.98, "rollout": 0.1, "scorer": 0.2},
            2,
            "learner, busy for 98% of the time: more workers change nothing",
            id="a slow learner",
        ),
        pytest.param(
            {"learner": 0.5, "rollout": 0.3, "scorer": 0.5},
            2,
            "none (the busiest: learner, busy for 50% of the time), so more workers change little",
            id="nobody is busy",
        ),
        pytest.param(
            {"learner": 0.4, "rollout": 0.2, "scorer": 0.4},
            0,
            "with algorithm.max_staleness = 0 the parts take turns",
            id="synchronous",
        ),
    ],
)
def test_the_words_name_the_role_the_count_and_the_key(
    busy: dict[str, float], window: int, words: str
) -> None:
    assert words in bottleneck_words(busy, {"rollout": 1, "scorer": 2}, window)


@pytest.mark.parametrize("busy", [{}, {"scorer": 0.9}, {"learner": 0.9}])
def test_nothing_is_said_before_both_sides_are_measured(busy: dict[str, float]) -> None:
    assert bottleneck_words(busy, {"scorer": 1}, 2) == ""


@pytest.mark.parametrize("learner", [0.03, 0.2, 0.74])
@pytest.mark.parametrize("scorer", [0.77, 1.0])
@pytest.mark.parametrize("count", [1, 7])
def test_the_count_is_the_least_that_keeps_the_learner_busy(
    learner: float, scorer: float, count: int
) -> None:
    enough = next(
        number
        for number in itertools.count(1)
        if count * scorer / number <= FULL_SHARE * learner + 1e-9
    )
    said = bottleneck_words({"learner": learner, "scorer": scorer}, {"scorer": count}, 2)
    assert f"up to {enough} instead of {count} would" in said
