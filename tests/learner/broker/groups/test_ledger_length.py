"""A run that goes on with another length keeps the promise of the window."""

from prefixrl.learner.broker.groups.ledger import Ledger
from prefixrl.learner.broker.groups.states import LedgerLimits
from prefixrl.learner.broker.groups.window import Choice, Window
from support.broker.ledger_steps import sample, score
from support.broker.ledger_world import Places


def ledger_of(places: int) -> Ledger:
    return Ledger(Window(2, 0), LedgerLimits(1, 2, 1), Places(places))


def test_a_short_last_batch_fills_its_iteration_in_a_run_that_is_made_longer() -> None:
    short = ledger_of(places=1)
    (seq,) = sample(short)
    assert score(short, seq, 1.0, 0.0)
    assert short.batch(0) == Choice((seq,))
    longer = ledger_of(places=4)
    longer.replay(short.records, 0)
    assert longer.start_sampling(0) is None, "its group could only be trained an iteration too late"
    assert longer.batch(0) == Choice((seq,))
    longer.trained(0)
    assert len(sample(longer, version=1)) == 2
    longer.check()


def test_a_closed_ledger_trains_what_is_under_way_in_a_small_last_batch_and_is_over() -> None:
    ledger = ledger_of(places=9)
    ledger.most_new = 1
    (seq,) = sample(ledger)
    assert ledger.most_new == 0 and ledger.start_sampling(0) is None
    assert ledger.may_issue and not isinstance(ledger.batch(0), Choice)  # more may be allowed later
    ledger.is_closed = True
    assert not ledger.may_issue
    assert score(ledger, seq, 1.0, 0.0)
    assert ledger.batch(0) == Choice((seq,))
    ledger.trained(0)
    assert ledger.start_sampling(1) is None and ledger.batch(1) is None
    ledger.check()


def test_a_ledger_that_is_closed_before_any_group_is_over_without_a_fault() -> None:
    ledger = ledger_of(places=9)
    ledger.is_closed = True
    assert ledger.start_sampling(0) is None and ledger.batch(0) is None
