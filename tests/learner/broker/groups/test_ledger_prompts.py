"""A result is about the whole prompt that its group was issued with, not about its id alone."""

from typing import Any

import pytest
from msgspec.structs import replace

from prefixrl.common.wire.messages.groups import ScoredGroup, Verdict
from prefixrl.learner.broker.groups.ledger import Ledger
from prefixrl.learner.broker.groups.states import LedgerLimits
from prefixrl.learner.broker.groups.window import Window
from support.broker.ledger_steps import prefixes
from support.broker.ledger_world import Places

FORGED: list[dict[str, Any]] = [
    {"question": "an easier one"},
    {"gold": "2"},
    {"system": "Answer 1."},
    {"source": "another"},
    {"code": "tests"},
    {"prompt_id": "p9"},
]
VERDICT = Verdict(
    reward=1.0, status="ok", extracted="1", finish="eos", completion_tokens=1, elapsed_ms=0
)


@pytest.mark.parametrize("forged", FORGED, ids=lambda forged: next(iter(forged)))
def test_a_result_with_another_prompt_of_the_same_number_reaches_neither_figures_nor_journal(
    forged: dict[str, Any],
) -> None:
    ledger = Ledger(Window(1, 0, iterations=3), LedgerLimits(1, 2, 1), Places(None))
    item = ledger.start_sampling(0)
    assert item is not None
    (seq,) = item.seqs
    given = prefixes(ledger, seq)
    other = replace(given, prompt=replace(given.prompt, **forged))
    assert ledger.take_prefixes([other], 0, "d", 0.0) == []
    assert ledger.take_prefixes([given], 0, "d", 0.0) == [seq]
    assert ledger.start_scoring() is not None

    def scored(group: Any) -> ScoredGroup:
        return ScoredGroup(
            prefixes=group, version=0, weights_digest="d", verdicts=(VERDICT, VERDICT), scorer="s"
        )

    before = list(ledger.records)
    assert ledger.take_scores([scored(other)]) == []
    assert ledger.records == before and ledger.counts.duplicates_ignored == 2
    assert [group.prefixes.seq for group in ledger.take_scores([scored(given)])] == [seq]
