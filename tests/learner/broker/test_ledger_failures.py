"""When most rows cannot be sampled or judged: a clear end instead of work for nothing."""

import pytest

from ledger_steps import sample, score
from ledger_world import Places
from prefixrl.learner.broker.filtering import FailureShare, Starved
from prefixrl.learner.broker.ledger import FEWEST_FAILURES_SEEN, Ledger, Limits
from prefixrl.learner.broker.window import Choice, Wait, Window


def make(places: int | None, most: float = 0.5) -> Ledger:
    iterations = None if places else 3
    return Ledger(Window(2, 0, iterations=iterations), Limits(1, 2, 0, most), Places(places))


def fail_one(ledger: Ledger) -> None:
    sample(ledger)
    score(ledger, min(group.seq for group in ledger.live()), errors=2)


def test_a_run_in_which_every_row_fails_ends_with_its_causes() -> None:
    ledger = make(None)
    for _ in range(FEWEST_FAILURES_SEEN):
        assert isinstance(ledger.batch(0), Wait)
        fail_one(ledger)
    assert ledger.batch(0) == Starved("failures")
    assert ledger.start_sampling(0) is None, "nothing new is begun"
    assert ledger.counts.causes == {"failed: verifier error on every row": FEWEST_FAILURES_SEEN}
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
        share.note(0.5)
    assert share.is_too_high == ends
    assert ledger.failures.share == 0.5 and ledger.failures.groups == 6


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
    assert (again.failures.share, again.failures.groups) == (1.0, 5)
