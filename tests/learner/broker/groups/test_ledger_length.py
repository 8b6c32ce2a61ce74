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
