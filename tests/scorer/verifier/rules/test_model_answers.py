"""Answers in the forms that are published and that models write: none is lost, none is right for another gold."""

import random
import time

import pytest

from benchmarks.model_answers import USUAL, asked, completion
from prefixrl.scorer.verifier.pool import VerifierPool
from prefixrl.scorer.verifier.rules.verify import Judgement

TIMEOUT_S = 30
PATIENCE_S = 250


def judged(pairs: list[tuple[str, str]]) -> list[Judgement]:
    """Verdicts on texts by their golds."""
    pool, result = VerifierPool(2, TIMEOUT_S), dict[int, Judgement]()
    deadline_s = time.monotonic() + PATIENCE_S
    try:
        for key, (text, gold) in enumerate(pairs):
            pool.submit(key, text, gold)
        while pool.pending:
            assert time.monotonic() < deadline_s, f"{pool.pending} answers are still pending"
            pool.wait(1.0)
            result |= dict(pool.poll())
    finally:
        pool.close()
    return [result[key] for key in range(len(pairs))]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("answers", [224, pytest.param(1_120, marks=pytest.mark.nightly)])
def test_every_right_answer_is_right_in_every_form_and_none_is_right_for_another_gold(
    answers: int,
) -> None:
    rng, cases = random.Random(7), asked(answers)
    assert len(USUAL) >= 25 and len({gold for _, gold, *_ in cases}) > 0.45 * answers
    right = judged([(completion(answer, rng), gold) for _, gold, answer, _ in cases])
    lost = [(case[:3], each) for case, each in zip(cases, right, strict=True) if each.reward != 1.0]
    assert lost == []
    wrong = judged([(completion(other, rng), gold) for _, gold, _, other in cases])
    taken = [(case, each) for case, each in zip(cases, wrong, strict=True) if each.reward]
    assert taken == []
    assert [case for case, each in zip(cases, wrong, strict=True) if each.status == "error"] == []
