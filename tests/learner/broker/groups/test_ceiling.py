"""The end of a run by its cost."""

import pytest

from prefixrl.common.run.status import UsageTotal
from prefixrl.learner.broker.groups.ceiling import LEAST_REQUESTS, CostCeiling

TEXTS, BATCH = 4, 8
"""Completions of a group, groups of a batch."""


def used(requests: int, cost: float | None) -> UsageTotal:
    counts = {"prompt_tokens": 0, "completion_tokens": 0, "retries": 0, "limited_s": 0.0}
    return UsageTotal(requests=requests, cost=cost, **counts)


def ceiling(most_cost: float) -> CostCeiling:
    return CostCeiling(most_cost, TEXTS, BATCH)


def test_before_the_usual_cost_is_known_at_most_one_batch_is_under_way() -> None:
    rule = ceiling(10.0)
    assert rule.new_groups(0) == BATCH
    rule.note_usage(None)
    rule.note_usage(used(LEAST_REQUESTS - 1, 0.001))  # trials of a token each
    assert rule.new_groups(BATCH * TEXTS) == 0 and rule.new_groups(3 * TEXTS) == BATCH - 3
    assert rule.reason == ""


@pytest.mark.parametrize("open_texts", [0, 10, 39])
def test_groups_are_begun_while_all_that_is_under_way_fits_with_them(open_texts: int) -> None:
    rule = ceiling(10.0)
    rule.note_usage(used(100, 5.0))  # 0.05 each: room for 100 more
    # The slow way: one group after the other.
    fitting = 0
    while 5.0 + 0.05 * (open_texts + TEXTS * (fitting + 1)) <= 10.0:
        fitting += 1
    assert rule.new_groups(open_texts) == fitting > 0


def test_a_ceiling_that_is_reached_stays_reached_and_says_why() -> None:
    rule = ceiling(10.0)
    rule.note_usage(used(100, 5.0))
    assert rule.new_groups(98) == 0
    assert rule.new_groups(0) == 0
    assert "scorer.openai.most_cost = 10 is reached: 5 is spent, 4.9 is expected" in rule.reason


def test_a_run_that_has_spent_it_already_begins_nothing() -> None:
    rule = ceiling(10.0)
    rule.note_usage(used(3, 10.5))
    assert rule.new_groups(0) == 0 and rule.reason


def test_an_evaluation_that_does_not_fit_is_objected_to_with_its_cost() -> None:
    rule = ceiling(10.0)
    assert rule.objection(10_000, 0) == ""  # nothing is known of its cost
    rule.note_usage(used(100, 5.0))
    assert rule.objection(60, 40) == ""
    assert "would cost 10.05 with it" in rule.objection(61, 40)


def test_work_is_given_up_only_where_it_exceeds_the_ceiling_by_more_than_a_batch() -> None:
    rule = ceiling(10.0)
    rule.note_usage(used(100, 5.0))
    assert rule.excess(100 + BATCH * TEXTS) == ""
    assert rule.excess(101 + BATCH * TEXTS)


def test_a_cost_without_a_counted_request_is_no_fault() -> None:
    rule = ceiling(10.0)
    rule.note_usage(used(0, 20.0))
    assert rule.new_groups(0) == 0 and rule.reason
