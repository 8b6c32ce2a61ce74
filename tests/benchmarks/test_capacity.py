"""The model of a running system: cases counted by hand, a slow twin around the real ledger, and what always holds."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.capacity.outlook import foresee, limit_of
from benchmarks.capacity.simulation import Simulation
from benchmarks.capacity.system import BrokerCosts, Foreseen, RowTimes, System, WeightsPath, Workers
from benchmarks.timed_run import TimedRun, Timing
from prefixrl.learner.broker.server import GATHER_S
from support.broker.ledger_world import Shape, World

FREE = BrokerCosts(group_s=0.0, turn_s=0.0)


def workers(count: int, seats: int, row_s: float, sigma: float = 0.0) -> Workers:
    return Workers(count=count, seats=seats, row=RowTimes(mean_s=row_s, sigma=sigma))


ROLLOUTS, SCORERS = workers(2, 16, 0.1), workers(2, 8, 0.1)


def system(
    batch_groups: int = 16,
    rows: int = 1,
    staleness: int = 2,
    rollouts: Workers = ROLLOUTS,
    scorers: Workers = SCORERS,
    learner_s: float = 0.1,
    broker: BrokerCosts = FREE,
) -> System:
    return System(
        batch_groups=batch_groups,
        rows_per_group=rows,
        max_staleness=staleness,
        rollouts=rollouts,
        scorers=scorers,
        learner_s=learner_s,
        broker=broker,
    )


def run(given_system: System, iterations: int = 60, seed: int = 0) -> Foreseen:
    return Simulation(given_system, seed).run(iterations)


def test_a_synchronous_run_takes_the_sum_of_its_parts() -> None:
    one = system(1, 1, 0, workers(1, 1, 1.0), workers(1, 1, 2.0), learner_s=3.0)
    # A turn for the end of an iteration, the offer of weights, their installation, the prefix, the verdict.
    result = run(one)
    assert result.iteration_s == pytest.approx(1.0 + 2.0 + 3.0 + 5 * GATHER_S)
    assert result.mean_age == 0.0 and result.max_age == 0
    assert result.busy["scorer"] == pytest.approx(2.0 / result.iteration_s)
    assert result.busy["learner"] == pytest.approx(3.0 / result.iteration_s)
    assert result.waited == pytest.approx(1 - (3.0 + GATHER_S) / result.iteration_s, abs=1e-3)


def test_a_publication_and_its_way_are_parts_of_a_synchronous_iteration() -> None:
    one = system(1, 1, 0, workers(1, 1, 1.0), workers(1, 1, 2.0), learner_s=3.0)
    way = WeightsPath(
        pulled_bytes=8.0, hosts=2, server_bytes_per_s=4.0, writing_s=0.5, install_s=0.25
    )
    result = run(replace(one, publish_s=0.125, weights=way))
    # 2 hosts x 8 bytes at 4 bytes/s; what is announced comes in a turn of its own.
    assert result.iteration_s == pytest.approx(6.0 + 0.125 + 0.5 + 4.0 + 0.25 + 5 * GATHER_S)


PACES: dict[str, tuple[System, Callable[[Foreseen], float], float]] = {
    "learner": (system(learner_s=5.0), lambda found: 1 / found.iteration_s, 1 / (5.0 + GATHER_S)),
    "scorer": (
        system(64, 2, scorers=workers(4, 8, 1.0)),
        lambda found: found.groups_per_s,
        4 * 8 / (2 * 1.0),
    ),
    # While a version is on its way, rollouts begin what the one before allows; a pull brings what was newest at its
    # start. So two pulls advance the run by S + 1 iterations.
    "weights": (
        replace(
            system(staleness=1), weights=WeightsPath(pulled_bytes=100.0, server_bytes_per_s=1.0)
        ),
        lambda found: 1 / found.iteration_s,
        1 / 100.0,
    ),
    "broker": (
        system(64, broker=BrokerCosts(group_s=0.1, turn_s=0.0)),
        lambda found: found.groups_per_s,
        10.0,
    ),
}


@pytest.mark.parametrize("part", PACES)
def test_the_part_that_is_always_busy_sets_the_pace(part: str) -> None:
    slow, rate, expected = PACES[part]
    result = run(slow)
    assert rate(result) == pytest.approx(expected, rel=0.02)
    assert result.busy[part] == pytest.approx(1.0, abs=0.02)
    assert limit_of(slow) == part


def test_busy_rollouts_set_the_pace() -> None:
    slow = system(64, 2, rollouts=workers(2, 4, 1.0), scorers=workers(4, 8, 0.1))
    result = run(slow)
    # They also finish what they have before each installation.
    assert 0.85 * 4.0 < result.groups_per_s <= 4.0
    assert limit_of(slow) == "rollout"


@pytest.mark.parametrize("is_just_in_time", [True, False])
@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize(("scoring_s", "training_s"), [(9.0, 6.0), (1.0, 6.0), (30.0, 6.0)])
def test_the_model_agrees_with_a_run_of_the_real_ledger(
    staleness: int, is_just_in_time: bool, scoring_s: float, training_s: float
) -> None:
    shape = Shape(
        batch_groups=8,
        max_staleness=staleness,
        groups_per_item=1,
        iterations=40,
        places=None,
        admission="just_in_time" if is_just_in_time else "as_early_as_allowed",
    )
    timing = Timing(
        rollouts=2, scorers=8, slots=2, sampling_slots=8, sampling_s=2.0, scoring_s=scoring_s
    )
    timing = replace(timing, training_s=training_s)
    twin = TimedRun(World(shape), timing).run()
    like = system(
        8, 1, staleness, workers(2, 8, 2.0), workers(8, 2, scoring_s), learner_s=training_s
    )
    ours = run(replace(like, is_just_in_time=is_just_in_time), 40)
    first, last = 13, 40 - staleness - 2
    twin_s = (twin.trained_s[last] - twin.trained_s[first]) / (last - first)
    ages = [age for each in twin.ages[first:last] for age in each.elements()]
    assert ours.iteration_s == pytest.approx(twin_s, rel=0.05)
    assert ours.mean_age == pytest.approx(sum(ages) / len(ages), abs=0.35)


SYSTEMS = st.builds(
    system,
    batch_groups=st.integers(1, 24),
    rows=st.integers(1, 4),
    staleness=st.integers(0, 4),
    rollouts=st.builds(workers, st.integers(1, 3), st.integers(1, 8), st.floats(0.01, 2.0)),
    scorers=st.builds(
        workers, st.integers(1, 5), st.integers(1, 8), st.floats(0.01, 2.0), st.floats(0.0, 1.2)
    ),
    learner_s=st.floats(0.01, 5.0),
    broker=st.builds(BrokerCosts, group_s=st.floats(0.0, 0.02), turn_s=st.floats(0.0, 0.01)),
)
LINKS = st.builds(WeightsPath, pulled_bytes=st.floats(0.0, 20.0), server_bytes_per_s=st.just(1.0))


@pytest.mark.nightly
@given(SYSTEMS, LINKS, st.booleans(), st.booleans())
@settings(max_examples=30, deadline=None)
def test_no_age_passes_the_window_and_no_group_is_lost(
    any_system: System, link: WeightsPath, drains: bool, is_just_in_time: bool
) -> None:
    given_system = replace(any_system, weights=link, drains=drains, is_just_in_time=is_just_in_time)
    result = run(given_system, 12)
    assert result.max_age <= given_system.max_staleness
    assert result.begun == result.trained + result.live
    assert result.live <= given_system.batch_groups * (given_system.max_staleness + 1)
    assert all(0.0 <= share <= 1.0 for share in result.busy.values())
    assert result == run(given_system, 12)


@pytest.mark.nightly
def test_a_coarser_system_has_the_same_rates() -> None:
    row = RowTimes(
        mean_s=2.0, sigma=0.7, limit_s=6.0
    )  # without a limit, more rows have a longer longest one
    scorers = Workers(count=4, seats=256, row=row)
    fine = system(
        512, 8, scorers=scorers, rollouts=workers(2, 256, 0.2), learner_s=6.0, broker=BrokerCosts()
    )
    coarse = fine.coarser(1024)
    assert coarse.batch_groups == 128
    once, twice = foresee(fine), foresee(coarse, 3)
    assert twice.iteration_s == pytest.approx(once.iteration_s, rel=0.05)
    assert twice.busy["scorer"] == pytest.approx(once.busy["scorer"], abs=0.05)
