"""Waits between stages, told by the times passed in."""

from prefixrl.learner.broker.workers.stage_clock import StageClock


def test_a_group_waits_for_a_scorer_and_then_for_its_iteration() -> None:
    clock = StageClock()
    clock.came_in([3, 4], 10.0)
    clock.leased([3], 12.5)
    clock.leased([4], 17.0)
    clock.came_in([4, 3], 20.0)
    assert clock.waits_s(3, 26.0) == (2.5, 6.0)
    assert clock.waits_s(4, 26.0) == (7.0, 6.0)


def test_a_group_that_is_scored_again_counts_its_last_wait() -> None:
    clock = StageClock()
    clock.came_in([1], 0.0)
    clock.leased([1], 5.0)
    clock.leased([1], 9.0)
    assert clock.waits_s(1, 10.0) == (0.0, 0.0)


def test_groups_of_an_earlier_broker_did_not_wait_as_far_as_is_known() -> None:
    assert StageClock().waits_s(7, 100.0) == (0.0, 0.0)


def test_times_of_ended_groups_are_dropped() -> None:
    clock = StageClock()
    clock.came_in(range(5), 0.0)
    clock.leased([0, 1], 1.0)
    clock.forget_all_but({1, 4})
    assert clock.waits_s(0, 9.0) == (0.0, 0.0)
    assert clock.waits_s(1, 9.0) == (1.0, 0.0)
    assert clock.waits_s(4, 9.0) == (0.0, 9.0)
