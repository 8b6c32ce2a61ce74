"""Votes of answers that are written differently, compared by the verifier in its own process."""

import pytest

from prefixrl.common.evaluation.accuracy import EvaluatedRow, accuracy
from prefixrl.learner.evaluation.majority import with_votes
from support.messages import evaluated


def rows(problem: str, *given: tuple[str, float]) -> list[EvaluatedRow]:
    return [
        evaluated(problem, reward, text, sample=sample)
        for sample, (text, reward) in enumerate(given)
    ]


GIVEN = [
    *rows("half", ("7", 0.0), ("0.5", 1.0), (r"\frac{1}{2}", 1.0), ("7", 0.0), (r"\dfrac12", 1.0)),
    *rows(
        "sum", (r"1+\ln x", 1.0), ("x", 0.0), (r"\ln x + 1", 1.0), ("x", 0.0), (r"\ln(x)+1", 1.0)
    ),
    *rows("words", ("east", 1.0), (r"\text{East}", 1.0), ("west", 0.0), ("west", 0.0), ("", 0.0)),
    *rows("one", ("3", 1.0), ("3", 1.0)),
]


def test_equal_answers_vote_together_however_they_are_written() -> None:
    actual = with_votes(GIVEN, 30)
    votes = {
        name: [row.vote for row in actual if row.prompt_id == name]
        for name in ("half", "sum", "words", "one")
    }
    assert votes == {
        "half": ["7", "0.5", "0.5", "7", "0.5"],
        "sum": [r"1+\ln x", "x", r"1+\ln x", "x", r"1+\ln x"],
        "words": ["east", "east", "west", "west", ""],
        "one": ["3", "3"],
    }
    as_text, as_meant = accuracy(GIVEN), accuracy(actual)
    assert as_text is not None and as_meant is not None
    assert (as_text.majority, as_meant.majority) == (0.25, 1.0)


def test_where_the_verifier_cannot_be_started_answers_are_compared_as_text(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("prefixrl.common.evaluation.equality.sys.executable", "/bin/false")
    actual = with_votes(GIVEN, 30)
    assert [row.vote for row in actual] == [row.extracted for row in GIVEN]
    assert "compared as text" in caplog.text
