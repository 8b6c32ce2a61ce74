"""Admission, just in time: what is begun, and what lead and cap learn; the two traps are tested by name."""

import math
from collections.abc import Mapping
from fractions import Fraction

import pytest

from prefixrl.common.config.algorithm import AdmissionRule
from prefixrl.learner.broker.groups.admission import (
    KEPT,
    LEAST_CAP,
    LEAST_SHRINKAGE,
    MOST_SHRINKAGE,
    RECENT_ITERATIONS,
    RECOVERY,
    REGAINED,
    Admission,
    ItemTimes,
    Supply,
)
from prefixrl.learner.broker.groups.ledger import Ledger
from prefixrl.learner.broker.groups.states import LedgerLimits
from prefixrl.learner.broker.groups.window import Choice, Window
from support.broker.ledger_steps import sample, score
from support.broker.ledger_world import Places

B, S = 32, 4
BATCH_IN_TRAINING = {"batched": B}


def admission(
    rule: AdmissionRule = "just_in_time", over_sampling: Fraction = Fraction(1), item: int = 8
) -> Admission:
    return Admission(Window(B, S, over_sampling), rule, 0.8, item)


def begun(
    rule: Admission, states: Mapping[str, int], version: int = 5, completed: int = 5, item: int = 8
) -> int:
    """Groups that may be begun one item after the other while nothing comes in."""
    counts = {"sampling": 0, **states}
    started = 0
    while started < 1000 and (size := rule.size(item, version, completed, counts)):
        counts["sampling"] += size
        started += size
    return started


def test_one_batch_is_begun_while_the_one_before_is_trained() -> None:
    assert begun(admission(), BATCH_IN_TRAINING) == B
    assert begun(admission(), BATCH_IN_TRAINING | {"scored": 24}) == 8
    assert begun(admission(), BATCH_IN_TRAINING | {"scored": B}) == 0


def test_as_early_as_allowed_takes_whatever_the_window_allows() -> None:
    early = admission("as_early_as_allowed")
    early.finish_iteration(1.0, 0.0, {}, 0.0)
    assert early.size(8, 5, 5, BATCH_IN_TRAINING | {"scored": 100}) == 8


def test_without_a_window_both_rules_are_the_same() -> None:
    rule = Admission(Window(B, 0), "just_in_time", 0.8, 8)
    assert rule.finish_iteration(1.0, 1.0, {}, 0.0) is None
    assert rule.size(8, 0, 0, {"scored": B - 1}) == 8
    assert rule.may_resample(0, 3)


def test_a_rollout_that_has_not_the_newest_version_begins_a_batch_less() -> None:
    rule = admission()
    rule.lead = 1.5 * B
    assert begun(rule, BATCH_IN_TRAINING, version=5, completed=5) == 1.5 * B
    assert begun(rule, BATCH_IN_TRAINING | {"scored": 8}, version=4, completed=5) == 8


def test_the_lead_is_a_batch_and_the_most_that_was_under_way_in_the_newest_iterations() -> None:
    rule = admission()
    for under_way in (3, 7, 0):
        rule.finish_iteration(10.0, 0.0, {"scoring": under_way, "scored": 40}, None)
    assert rule.lead == B + math.ceil(KEPT**3 * 7)
    for _ in range(RECENT_ITERATIONS):
        rule.finish_iteration(10.0, 0.0, {"sampling": 1, "sampled": 1}, None)
    assert rule.lead == B + math.ceil(KEPT ** (3 + RECENT_ITERATIONS) * 2)


@pytest.mark.parametrize(
    ("iteration_s", "waited_s", "over_sampling", "scoring", "lead"),
    [
        (10.0, 2.0, 1.0, 8, B + 10),  # as many as at five fourths of the throughput
        (10.0, 0.0, 1.5, 12, B + 8),  # as many as are left of over-sampled ones
        (10.0, 9.9, 1.0, 500, B * (S + 1)),
        (0.0, 100.0, 1.0, 9, B),
        (100.0, 100.0, 1.0, 9, B),
    ],
)
def test_groups_under_way_count_as_what_they_are_worth(
    iteration_s: float, waited_s: float, over_sampling: float, scoring: int, lead: float
) -> None:
    rule = admission(over_sampling=Fraction(over_sampling))
    rule.finish_iteration(iteration_s, waited_s, {"scoring": scoring}, None)
    assert (rule.lead, rule.waited_s) == (lead, waited_s)


def test_the_lead_shrinks_where_the_learner_does_not_wait_and_a_wait_gives_it_back_by_its_length() -> (
    None
):
    rule, most = Admission(Window(B, 50), "just_in_time"), 0.0
    waits = (0.0, KEPT), (0.1, KEPT**2), (0.2, KEPT**2 + 0.02 * REGAINED), (2.5, 1.0), (0.0, KEPT)
    for waited_s, kept in waits:  # of iterations of 10 s, so 0.1 is still a short one
        rule.finish_iteration(10.0, waited_s, {"scoring": 800}, None)
        most = max(most, 800 * 10.0 / (10.0 - waited_s))
        assert rule.lead == B + math.ceil(min(1.0, kept) * most)


def test_no_more_waits_for_scorers_than_their_slots_need() -> None:
    rule = admission()
    rule.lead = float(B * (S + 1))
    rule.supply, rule.times = (
        Supply(rollouts=1, scoring_slots=4),
        ItemTimes(sampling_s=1.0, scoring_s=2.0),
    )
    # 4 slots, each with half an item ahead and half of one in sampling, and one rollout: five items of 8.
    assert begun(rule, BATCH_IN_TRAINING) == 5 * 8
    assert begun(rule, BATCH_IN_TRAINING | {"scoring": 32}) == 5 * 8
    assert begun(rule, BATCH_IN_TRAINING | {"sampled": 40}) == 0


def test_what_the_next_iteration_lacks_is_begun_however_long_the_queue_before_the_scorers() -> None:
    rule = admission()
    rule.supply, rule.times = (
        Supply(rollouts=1, scoring_slots=1),
        ItemTimes(sampling_s=0.1, scoring_s=2.0),
    )
    assert begun(rule, {}) == B


def test_over_sampling_multiplies_the_lead_of_groups_that_are_not_judged() -> None:
    rule = admission(over_sampling=Fraction(3, 2))
    assert begun(rule, BATCH_IN_TRAINING) == 48
    assert begun(rule, BATCH_IN_TRAINING | {"scored": 16}) == 24


def test_the_cap_shrinks_while_old_samples_are_worth_too_little_and_recovers() -> None:
    rule = admission()
    assert rule.finish_iteration(1.0, 0.0, {}, 0.1) == "tightened"
    assert rule.cap == MOST_SHRINKAGE * B, "of what is begun ahead, not of what might be"
    narrow = rule.cap
    assert rule.finish_iteration(1.0, 0.0, {}, 0.1) is None
    assert rule.cap == narrow, "what is trained now was begun before the cap was changed"
    changes = [rule.finish_iteration(1.0, 0.0, {}, 0.95) for _ in range(100)]
    assert changes.count("restored") == 1 and set(changes) == {"restored", None}
    assert rule.cap == B * S


@pytest.mark.parametrize(
    ("old_ess", "factor"),
    [(0.0, MOST_SHRINKAGE), (0.8**1.25, 0.8), (0.799, LEAST_SHRINKAGE), (1e-300, MOST_SHRINKAGE)],
)
def test_the_cap_shrinks_to_the_age_at_which_old_samples_are_worth_enough(
    old_ess: float, factor: float
) -> None:
    rule = admission()
    rule.finish_iteration(1.0, 0.0, {}, old_ess)
    assert rule.cap == pytest.approx(factor * B)


def test_the_cap_ends_at_nothing_and_probes_again() -> None:
    rule = admission()
    seen = [rule.cap]
    while rule.cap:
        rule.finish_iteration(1.0, 0.5, {}, 0.1)
        seen.append(rule.cap)
    assert (
        seen == sorted(seen, reverse=True) and min(each for each in seen if each) >= LEAST_CAP * B
    )
    assert rule.lead == B
    for _ in range(10):
        rule.finish_iteration(1.0, 0.0, {}, None)
    assert 0 < rule.cap <= 10 * RECOVERY * B


@pytest.mark.parametrize(
    ("min_ess", "old_ess"),
    [(0.8, None), (0.8, float("nan")), (0.8, 0.8), (0.8, 1.0), (0.8, 3.0), (0.0, 0.0)],
)
def test_a_cap_that_nothing_speaks_against_stays_wide(
    min_ess: float, old_ess: float | None
) -> None:
    rule = Admission(Window(B, S), "just_in_time", min_ess, 8)
    assert rule.finish_iteration(1.0, 0.0, {}, old_ess) is None
    assert rule.cap == B * S


def test_at_a_cap_of_nothing_the_run_is_synchronous() -> None:
    rule = admission()
    rule.cap, rule.lead = 0.0, float(B)
    assert begun(rule, {}) == B
    assert begun(rule, {"scored": 5, "scoring": 10}) == B - 15
    assert begun(rule, BATCH_IN_TRAINING) == 0
    assert begun(rule, {}, version=4) == 0 and not rule.may_resample(4, 5), (
        "only the newest version is sampled"
    )
    assert rule.may_resample(5, 5)


def test_a_cap_between_lets_whole_items_begin_in_training() -> None:
    rule = admission()
    rule.cap, rule.lead = 20.0, B + 20.0
    assert begun(rule, BATCH_IN_TRAINING) == 16


def ledger(batch_groups: int, item: int, staleness: int = 2) -> Ledger:
    window = Window(batch_groups, staleness)
    return Ledger(
        window,
        LedgerLimits(item, 2, 2),
        Places(100),
        None,
        Admission(window, "just_in_time", 0.8, item),
    )


def test_trap_one_nothing_is_refused_when_nothing_is_under_way() -> None:
    books = ledger(batch_groups=3, item=3)
    first = sample(books)
    assert first[:3] == [0, 1, 2]
    for seq in first:
        score(books, seq, 1.0)
    assert isinstance(books.batch(0), Choice)
    late = books.start_sampling(0)
    assert late is not None
    books.trained(0)
    # Two of three are scored, so that a whole item is more than the lead, and the rollout keeps an old version.
    for seq in late.seqs[:2]:
        score(books, seq, 1.0)
    books.end(late.seqs[2], "failed", "for the test")
    assert books.admission.lead == 3 and books.states() == {"scored": 2}
    assert books.start_sampling(0) is not None, "the learner would wait for ever"


def test_trap_two_groups_that_wait_to_be_sampled_again_hold_no_place() -> None:
    books = ledger(batch_groups=4, item=2)
    items = [books.start_sampling(0), books.start_sampling(0)]
    assert books.start_sampling(0) is None, "one batch is under way"
    for item in items:
        assert item is not None
        books.give_back(item, died=True)
    assert books.states() == {"queued": 4}
    again = [books.start_sampling(0), books.start_sampling(0)]
    assert again == items, "they would keep each other out"


def test_a_lost_group_is_sampled_again_however_short_lead_and_cap_have_become() -> None:
    books = ledger(batch_groups=4, item=4)
    first = books.start_sampling(0)
    assert first is not None
    books.admission.cap, books.admission.lead = 0.0, 4.0
    books.give_back(first, died=True)
    assert books.start_sampling(0) == first
