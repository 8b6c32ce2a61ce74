r"""The corpus: what must be right and what must be wrong, judged by the pool as in a run.

`answers.jsonl`: a gold answer, an answer (in a box) or a whole text, and whether it is right; `kind` names the pitfall.
"""

import time
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest

from prefixrl.scorer.verifier.pool import VerifierPool
from prefixrl.scorer.verifier.rules.exact import settle_exactly
from prefixrl.scorer.verifier.rules.looks import without_delimiters
from prefixrl.scorer.verifier.rules.verify import Judgement

PATIENCE_S = 250
TIMEOUT_S = 30


class Case(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    kind: str
    gold: str
    right: bool
    answer: str = ""
    text: str = ""
    exact: bool = False
    """True if the verdict needs no sympy."""

    @property
    def written(self) -> str:
        return self.text or (rf"\boxed{{{self.answer}}}" if self.answer else "")


LINES = (Path(__file__).parent / "answers.jsonl").read_text(encoding="utf-8").splitlines()
CASES = [msgspec.json.decode(line, type=Case) for line in LINES]
GOLDS = list(dict.fromkeys(case.gold for case in CASES))
SAME = {
    (r"\frac13", r"0.\overline{3}"),
    ("east", r"\text{east}"),
    ("1e-05", "10^{-5}"),
    ("15.5", "31/2"),
}
"""Neighbours that are equal."""
PITFALLS = {
    "base", "case", "choice", "complex", "date", "derivative", "echo", "equation", "exact path", "extraction",
    "fraction", "gold wrapping", "hedge", "integer", "interval", "junk", "line break", "matrix", "matrix equation",
    "model's form", "no expression", "polynomial", "published form", "relative tolerance", "scientific",
    "second choice", "set", "subscript", "surd", "text", "text after", "tiny numbers", "tuple", "unit",
    "unsolved equation", "value", "word",
}  # fmt: skip


def judged(asked: Iterable[tuple[str, str]]) -> list[Judgement]:
    """Texts and golds."""
    pool, result = VerifierPool(2, TIMEOUT_S), dict[int, Judgement]()
    deadline = time.monotonic() + PATIENCE_S
    try:
        for key, (text, gold) in enumerate(asked):
            pool.submit(key, text, gold)
        while pool.pending:
            assert time.monotonic() < deadline, f"{pool.pending} answers are still pending"
            pool.wait(1.0)
            result |= dict(pool.poll())
    finally:
        pool.close()
    return [result[key] for key in sorted(result)]


def test_the_corpus_covers_every_pitfall_with_right_and_wrong_answers() -> None:
    assert len(CASES) >= 300
    assert {case.kind for case in CASES} == PITFALLS
    assert len({(case.gold, case.written) for case in CASES}) == len(CASES)
    for kind in PITFALLS - {"no expression"}:
        assert {case.right for case in CASES if case.kind == kind} == {True, False}, kind


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_answer_of_the_corpus_is_judged_as_expected() -> None:
    verdicts = judged((case.written, case.gold) for case in CASES)
    wrong = [
        (case, verdict)
        for case, verdict in zip(CASES, verdicts, strict=True)
        if (verdict.reward, verdict.status in ("timeout", "error")) != (float(case.right), False)
    ]
    assert wrong == []


def test_what_strings_and_numbers_decide_needs_no_sympy() -> None:
    exact = [case for case in CASES if case.exact]
    assert len(exact) >= 70
    assert [
        case for case in exact if settle_exactly(case.gold, case.answer).is_right is not case.right
    ] == []


@pytest.mark.timeout(300)
def test_every_gold_answer_verifies_against_itself() -> None:
    verdicts = judged((rf"\boxed{{{without_delimiters(gold)}}}", gold) for gold in GOLDS)
    assert [
        gold for gold, verdict in zip(GOLDS, verdicts, strict=True) if verdict.reward != 1.0
    ] == []


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_no_gold_answer_is_its_neighbours() -> None:
    neighbours = GOLDS[1:] + GOLDS[:1]
    pairs = [
        (rf"\boxed{{{without_delimiters(neighbour)}}}", gold)
        for gold, neighbour in zip(GOLDS, neighbours, strict=True)
    ]
    verdicts = judged(pairs)
    accepted = {
        (gold, neighbour)
        for gold, neighbour, verdict in zip(GOLDS, neighbours, verdicts, strict=True)
        if verdict.reward
    }
    assert accepted <= SAME
