"""A clear end when most rows cannot be sampled or judged, instead of work for nothing."""

import pytest

from prefixrl.learner.broker.groups.filtering import (
    TRUNCATED,
    AccuracyFilter,
    FailureShare,
    Starved,
)
from prefixrl.learner.broker.groups.journaled import FEWEST_FAILURES_SEEN
from prefixrl.learner.broker.groups.ledger import Ledger
from prefixrl.learner.broker.groups.states import LedgerLimits
from prefixrl.learner.broker.groups.window import Choice, NotYetChosen, Window
from support.broker.ledger_steps import sample, score
from support.broker.ledger_world import Places


def make(places: int | None, most: float = 0.5) -> Ledger:
    iterations = None if places else 3
    return Ledger(Window(2, 0, iterations=iterations), LedgerLimits(1, 2, 0, most), Places(places))


def fail_one(ledger: Ledger) -> None:
    sample(ledger)
    score(ledger, min(group.seq for group in ledger.live()), errors=2)


def test_a_run_in_which_every_row_fails_ends_with_its_causes() -> None:
    ledger = make(None)
    for _ in range(FEWEST_FAILURES_SEEN):
        assert isinstance(ledger.batch(0), NotYetChosen)
        fail_one(ledger)
    assert ledger.batch(0) == Starved("failures")
    assert ledger.start_sampling(0) is None, "nothing new is begun"
    cause = "failed: verifier error on every row: process died"
    assert ledger.counts.causes == {cause: FEWEST_FAILURES_SEEN}
    ledger.check()


def test_what_is_under_way_may_still_save_the_run() -> None:
    ledger = make(None)
    for _ in range(FEWEST_FAILURES_SEEN - 1):
        fail_one(ledger)
    first, second = sorted({*sample(ledger), *(group.seq for group in ledger.live())})
    score(ledger, first, 1.0, 0.0)
    score(ledger, second, 1.0, 0.0)
    assert ledger.failures.is_too_high
    assert ledger.batch(0) == Choice((first, second))


@pytest.mark.parametrize(("most", "ends"), [(0.4, True), (0.6, False), (1.0, False)])
def test_the_limit_is_on_the_share_of_rows(most: float, ends: bool) -> None:
    ledger = make(None, most)
    for iteration in range(FEWEST_FAILURES_SEEN // 2):
        if iteration == 3:
            break
        for seq in sample(ledger, iteration):
            score(ledger, seq, 1.0, errors=1, version=iteration)
        ledger.batch(iteration)
        ledger.trained(iteration)
    share = FailureShare(6, most)
    for _ in range(6):
        share.count_groups(0.5)
    assert share.is_too_high == ends
    assert ledger.failures.failed_fraction == 0.5 and len(ledger.failures.newest) == 6


def test_only_the_newest_groups_count_however_many_went_before() -> None:
    share, noted = FailureShare(6, 0.4), list[float]()
    for reward in (*[0.0] * 6, *[1.0] * 6, *[0.5] * 6, *[0.0] * 6, 1.0, 0.0):
        share.count_groups(reward)
        noted.append(reward)
        newest = noted[-6:]
        assert share.is_too_high == (len(newest) == 6 and sum(newest) / 6 > 0.4), noted


def test_data_that_are_used_up_before_anything_was_trained_are_no_finished_run() -> None:
    ledger = make(3)
    for _ in range(3):
        fail_one(ledger)
    assert ledger.batch(0) == Starved("data")


def test_the_share_is_the_same_after_a_restart() -> None:
    ledger = make(None)
    for _ in range(5):
        fail_one(ledger)
    again = make(None)
    again.replay(ledger.records, 0)
    assert (again.failures.failed_fraction, len(again.failures.newest)) == (1.0, 5)


def test_a_group_is_failed_for_its_length_only_where_every_row_was_cut() -> None:
    ledger = Ledger(Window(3, 0, iterations=3), LedgerLimits(3, 2, 1, 1.0), Places(None))
    mixed, cut, judged = sample(ledger)
    score(ledger, mixed, errors=7, cut=1)
    assert ledger.newest_error == "why"
    score(ledger, cut, cut=8)
    assert ledger.newest_error == TRUNCATED
    score(ledger, judged, 1.0, 0.0, cut=6)
    assert ledger.counts.causes == {
        "expired: verifier error on every row that was not cut: process died": 1,
        f"failed: {TRUNCATED}": 1,
    }
    assert ledger.counts.row_errors == {"process died": 7}
    assert [ledger.prompt_index(seq) for seq in sample(ledger)] == [0, 3], (
        "the first is tried again"
    )


def test_rows_without_a_verdict_are_counted_by_kind_in_every_group() -> None:
    band = AccuracyFilter(0.5, 0.5, 6, 0.2)

    def fresh() -> Ledger:
        return Ledger(Window(3, 0, iterations=3), LedgerLimits(3, 2, 0, 1.0), Places(None), band)

    ledger = fresh()
    trained, filtered, failed = sample(ledger)
    score(ledger, trained, 1.0, 0.0, errors=1, fault="sandbox refused")
    score(ledger, filtered, 1.0, errors=2, fault="function raised")
    score(ledger, failed, errors=3, fault="sandbox refused")
    assert ledger.counts.row_errors == {"sandbox refused": 4, "function raised": 2}
    assert ledger.counts.causes == {
        "filtered: accuracy 1": 1,
        "failed: verifier error on every row: sandbox refused": 1,
    }
    again = fresh()
    again.replay(ledger.records, 0)
    assert again.counts.row_errors == ledger.counts.row_errors
