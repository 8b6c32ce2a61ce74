"""The limits of an endpoint, divided among scorers: true minutes, in simulated time."""

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from prefixrl.common.wire.messages.worker import RequestDemand, Usage
from prefixrl.common.worker.allowance import Allowance, RateLimits
from prefixrl.common.worker.permits import Permits

MOST_TOKENS = 4000
TICK_S = 0.005
DELAY_S = 0.01
"""Time of a grant on its way."""
Event = tuple[float, int]
"""A time, and requests or tokens."""


@dataclass
class Scorer:
    """A scorer with so many rows that want a request at once, for ever."""

    rows: int
    dies_s: float = float("inf")
    permits: Permits = field(default_factory=lambda: Permits(1.0))
    open_rows: list[Event] = field(default_factory=list)
    sent_s: list[float] = field(default_factory=list)
    sent_tokens: list[Event] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    next_beat_s: float = 0.0


def simulate(
    limits: RateLimits, scorers: Sequence[Scorer], until_s: float, tokens: Callable[[], int]
) -> list[Event]:
    """Run scorers against an endpoint; return the tokens of every request at its end."""
    draws, allowance, ended = random.Random(7), Allowance(limits), list[Event]()
    for scorer in scorers:
        scorer.next_beat_s = draws.random()
    for tick in range(round(until_s / TICK_S)):
        now_s = tick * TICK_S
        for name, scorer in enumerate(scorers):
            if now_s >= scorer.dies_s:
                if now_s >= scorer.dies_s + 10.0:
                    allowance.forget_holder(name)
                continue
            while scorer.open_rows and scorer.open_rows[0][0] <= now_s:
                ended.append(heapq.heappop(scorer.open_rows))
                scorer.usage = Usage(
                    requests=scorer.usage.requests + 1,
                    completion_tokens=scorer.usage.completion_tokens + ended[-1][1],
                )
            scorer.permits.waiting = scorer.rows - len(scorer.open_rows)
            while scorer.permits.waiting and not scorer.permits.take_permit(now_s):
                end_s, count = now_s + draws.uniform(0.5, 3.0), tokens()
                heapq.heappush(scorer.open_rows, (end_s, count))
                scorer.sent_s.append(now_s)
                scorer.sent_tokens.append((now_s, count))
                scorer.permits.waiting -= 1
            if now_s >= scorer.next_beat_s:
                scorer.next_beat_s += 1.0
                demand = scorer.permits.demand(now_s)
                grant = allowance.grant(name, demand, scorer.usage, now_s)
                scorer.permits.add(grant, now_s + DELAY_S)
    return ended


def most_in_a_minute(events: Sequence[Event]) -> int:
    """The slow way: every minute that ends with an event."""
    return max(
        sum(count for at_s, count in events if end_s - 60.0 < at_s <= end_s) for end_s, _ in events
    )


def per_minute(events: Sequence[Event], from_s: float, until_s: float) -> float:
    counted = sum(count for at_s, count in events if from_s <= at_s < until_s)
    return 60.0 * counted / (until_s - from_s)


def sent(scorers: Sequence[Scorer]) -> list[Event]:
    return sorted((at_s, 1) for scorer in scorers for at_s in scorer.sent_s)


def limits(requests: int | None = None, tokens: int | None = None) -> RateLimits:
    return RateLimits(requests, tokens, MOST_TOKENS)


@pytest.mark.parametrize("rows", [(64,), (64, 8), (64, 64, 64)])
def test_no_minute_has_more_requests_than_the_limit_and_nearly_all_are_used(
    rows: tuple[int, ...],
) -> None:
    scorers = [Scorer(count) for count in rows]
    simulate(limits(requests=300), scorers, 240.0, lambda: 500)
    assert most_in_a_minute(sent(scorers)) <= 1.02 * 300
    assert per_minute(sent(scorers), 60.0, 240.0) >= 0.98 * 300


@pytest.mark.parametrize("scorer_count", [1, 4])
def test_a_limit_of_a_few_requests_is_kept_to_the_request(scorer_count: int) -> None:
    scorers = [Scorer(8) for _ in range(scorer_count)]
    simulate(limits(requests=20), scorers, 360.0, lambda: 500)
    assert most_in_a_minute(sent(scorers)) == 20
    assert per_minute(sent(scorers), 60.0, 360.0) >= 0.97 * 20  # 98 of 100 in five minutes
    assert max(len(each.sent_s) for each in scorers) <= 3 + min(
        len(each.sent_s) for each in scorers
    )


@pytest.mark.parametrize("usual_tokens", [(500, 500), (200, 800)])
def test_no_minute_has_more_tokens_than_the_limit_and_nearly_all_are_used(
    usual_tokens: tuple[int, int],
) -> None:
    draws = random.Random(3)
    scorers = [Scorer(64), Scorer(16)]
    ended = simulate(limits(tokens=200_000), scorers, 240.0, lambda: draws.randint(*usual_tokens))
    assert most_in_a_minute(ended) <= 1.02 * 200_000
    assert per_minute(ended, 60.0, 240.0) >= 0.975 * 200_000


@pytest.mark.parametrize("rows", [(64,), (64, 16), (8, 8, 8, 8)])
@pytest.mark.parametrize("usual_tokens", [(1500, 1500), (2500, 2500), (500, 3500)])
def test_large_requests_keep_the_limit_as_the_endpoint_gets_them_and_nearly_use_it(
    usual_tokens: tuple[int, int], rows: tuple[int, ...]
) -> None:
    draws = random.Random(3)
    scorers = [Scorer(count) for count in rows]
    ended = simulate(limits(tokens=200_000), scorers, 240.0, lambda: draws.randint(*usual_tokens))
    sent_tokens = sorted(event for scorer in scorers for event in scorer.sent_tokens)
    assert most_in_a_minute(sent_tokens) <= 1.02 * 200_000
    assert per_minute(ended, 60.0, 240.0) >= 0.92 * 200_000
    counts = [len(scorer.sent_s) / scorer.rows for scorer in scorers]
    assert max(counts) <= 1.1 * min(counts), "the smallest scorer has its share"


def test_scorers_share_by_the_rows_that_wait() -> None:
    scorers = [Scorer(48), Scorer(24), Scorer(12), Scorer(1)]
    simulate(limits(requests=300), scorers, 240.0, lambda: 500)
    counts = [len(each.sent_s) for each in scorers]
    total = sum(counts)
    for scorer, count in zip(scorers, counts, strict=True):
        # A permit is a request: the share of one row is coarse.
        rel = 0.12 if scorer.rows > 1 else 0.5
        assert count == pytest.approx(total * scorer.rows / 85, rel=rel)


def test_the_share_of_a_scorer_that_dies_returns_to_the_others() -> None:
    scorers = [Scorer(64), Scorer(64, dies_s=100.0)]
    simulate(limits(requests=300), scorers, 240.0, lambda: 500)
    events = sent(scorers)
    assert most_in_a_minute(events) <= 1.02 * 300
    assert per_minute(events, 120.0, 240.0) >= 0.98 * 300
    assert per_minute(events, 100.0, 115.0) >= 0.75 * 300  # before it counts as dead, too


def test_more_waiting_rows_than_the_limit_allows_are_told_as_time() -> None:
    allowance = Allowance(limits(requests=60, tokens=None))
    assert allowance.least_s(59) == pytest.approx(60.0, rel=0.02)
    assert Allowance(limits()).least_s(1000) == 0.0
    # Before any request has ended, each counts as the longest.
    assert Allowance(limits(tokens=400_000)).least_s(98) == pytest.approx(60.0, rel=0.02)


def test_a_demand_that_is_repeated_before_its_grant_came_is_granted_once() -> None:
    allowance = Allowance(limits(requests=6000))
    demand = RequestDemand(received=0, lacking=5)
    allowance.grant("a", demand, Usage(), 0.0)
    granted = [allowance.grant("a", demand, Usage(), 1.0 + each).permits for each in range(3)]
    assert granted == [5, 5, 5]  # a lost one is repeated


def test_a_new_broker_goes_on_from_what_a_scorer_has() -> None:
    allowance = Allowance(limits(requests=6000))
    grant = allowance.grant("a", RequestDemand(received=70, lacking=3), Usage(requests=69), 5.0)
    assert 70 <= grant.permits <= 73


def test_a_rest_that_the_endpoint_wants_of_one_holds_all_back_and_ends_with_it() -> None:
    allowance = Allowance(limits(requests=6000))
    hungry = RequestDemand(lacking=50)
    allowance.grant("a", hungry, Usage(), 0.0)
    had = allowance.grant("b", hungry, Usage(), 1.0).permits
    resting = RequestDemand(received=0, lacking=50, rest_s=30.0)
    assert allowance.grant("a", resting, Usage(), 2.0).rest_s == 30.0
    held_back = allowance.grant("b", hungry, Usage(), 12.0)
    assert (held_back.permits, held_back.rest_s) == (had, 20.0)
    repeated = allowance.repeated_grant("b", 22.0)
    assert repeated is not None and repeated.rest_s == 10.0
    assert allowance.repeated_grant("unknown", 22.0) is None
    assert allowance.grant("b", hungry, Usage(), 33.0).permits > had
    allowance.grant("a", resting, Usage(), 40.0)
    allowance.forget_holder("a")
    assert allowance.grant("b", hungry, Usage(), 41.0).rest_s == 0.0


def test_without_limits_there_are_no_permits_but_a_rest_is_spread() -> None:
    allowance = Allowance(limits())
    allowance.grant("a", RequestDemand(lacking=9, rest_s=4.0), Usage(), 0.0)
    grant = allowance.grant("b", RequestDemand(lacking=9), Usage(), 1.0)
    assert (grant.permits, grant.rest_s) == (0, 3.0)


def test_an_endpoint_that_counts_nonsense_stops_nobody_for_long() -> None:
    allowance = Allowance(limits(tokens=60_000))
    demand = RequestDemand(lacking=1)
    assert allowance.grant("a", demand, Usage(), 0.0).permits == 1
    absurd = Usage(requests=1, completion_tokens=10**8)
    later = RequestDemand(received=1, lacking=1)
    granted = [allowance.grant("a", later, absurd, float(each)).permits for each in range(1, 60)]
    assert granted[-1] == 2


def test_nonsense_that_a_scorer_brings_to_a_new_broker_stops_nobody_for_long() -> None:
    allowance = Allowance(limits(tokens=60_000))
    absurd = Usage(requests=2, completion_tokens=10**12)
    demand = RequestDemand(received=2, lacking=1)
    granted = [allowance.grant("a", demand, absurd, float(each)).permits for each in range(60)]
    assert allowance.request_tokens <= 4 * MOST_TOKENS
    assert granted[-1] == 3


def test_a_limit_of_requests_holds_before_any_has_ended() -> None:
    allowance = Allowance(limits(requests=60))
    demand = RequestDemand(lacking=9)
    granted = [allowance.grant("a", demand, Usage(), each / 10).permits for each in range(30)]
    assert granted[-1] <= 1 + 3


def test_a_first_permit_that_nobody_uses_stops_nobody_for_ever() -> None:
    allowance = Allowance(limits(tokens=60_000))
    assert allowance.grant("a", RequestDemand(lacking=1), Usage(), 0.0).permits == 1
    idle = RequestDemand(received=1)
    later = [
        allowance.grant("b", RequestDemand(lacking=1), Usage(), float(each)) for each in range(80)
    ]
    assert later[-1].permits == 1
    assert allowance.grant("a", idle, Usage(), 80.0).permits == 1
