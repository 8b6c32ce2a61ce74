"""Equal answers: what the verifier says, and what is left where it says nothing in time."""

import pytest

from prefixrl.common.evaluation import equality

ANSWERS = [["0.5", "1/2", "2", "\\frac{1}{2}"], ["x", "y"]]


def test_an_answer_belongs_to_the_first_that_it_equals() -> None:
    assert equality.first_equals(ANSWERS, 5) == [[0, 0, 2, 0], [0, 1]]


def test_a_comparison_that_takes_too_long_leaves_every_answer_to_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(equality, "START_S", 0.01)
    assert equality.first_equals(ANSWERS, 0) == [[0, 1, 2, 3], [0, 1]]
    assert "their comparison took longer than 0.01 s" in caplog.text
