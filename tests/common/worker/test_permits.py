"""The permits of one scorer: when they may be used, and what it lacks."""

import pytest

from prefixrl.common.wire.messages.worker import MOST_REST_S, RequestGrant
from prefixrl.common.worker.permits import Permits


def taken_s(permits: Permits, from_s: float, until_s: float) -> list[float]:
    """The times at which a scorer that always wants a permit gets one."""
    now_s, times = from_s, []
    while now_s < until_s:
        wait_s = permits.take_permit(now_s)
        times += [] if wait_s else [round(now_s, 3)]
        now_s += max(wait_s, 0.001)
    return times


def test_permits_are_used_evenly_over_a_heartbeat_and_the_first_at_once() -> None:
    permits = Permits(1.0)
    permits.add(RequestGrant(permits=4), 10.0)
    # The second may be a tenth of a heartbeat early: that is made up for where a request was late.
    assert taken_s(permits, 10.0, 11.5) == pytest.approx([10.0, 10.25, 10.5, 10.75], abs=0.11)


def test_a_grant_that_came_twice_counts_once() -> None:
    permits = Permits(1.0)
    for _ in range(3):
        permits.add(RequestGrant(permits=2), 10.0)
    assert len(taken_s(permits, 10.0, 11.9)) == 2


def test_permits_that_nobody_took_for_long_are_dropped() -> None:
    permits = Permits(1.0)
    permits.add(RequestGrant(permits=9), 10.0)
    assert taken_s(permits, 12.5, 13.0) == []
    permits.waiting = 2
    demand = permits.demand(13.0)
    assert (demand.received, demand.lacking) == (9, 2)


def test_what_waits_and_what_is_usually_used_is_lacking_less_what_is_there() -> None:
    permits = Permits(1.0)
    permits.add(RequestGrant(permits=10), 0.0)
    assert len(taken_s(permits, 0.0, 0.55)) == 6
    permits.waiting = 7
    assert 7 + 3 - 4 <= permits.demand(0.55).lacking <= 7 + 6 - 4
    permits.waiting = 0
    assert permits.demand(30.0).lacking == 0


def test_a_rest_holds_permits_back_whoever_was_told_of_it() -> None:
    permits = Permits(1.0)
    permits.add(RequestGrant(permits=3, rest_s=0.5), 10.0)
    assert permits.take_permit(10.1) == pytest.approx(0.4)
    assert permits.rest_since_s == 10.0
    permits.own_rest_until_s = 11.0
    assert permits.demand(10.2).rest_s == pytest.approx(0.8)
    assert permits.take_permit(10.6) == pytest.approx(0.4)
    assert permits.take_permit(11.0) == 0.0
    permits.own_rest_until_s = 1e300
    assert permits.demand(11.0).rest_s == MOST_REST_S
    permits.own_rest_until_s = 0.0
    permits.add(RequestGrant(permits=3), 11.1)
    assert permits.demand(11.1).rest_s == 0.0
