"""The best of several answers: votes, and scores of steps."""

import pytest

from prefixrl.deploy.serve.choosing import Votes, most_frequent


@pytest.mark.parametrize(
    ("ballots", "best"),
    [
        pytest.param([0, 1, 1], 1, id="the most frequent"),
        pytest.param([2, 1, 1, 2], 0, id="the earliest of equals"),
        pytest.param([None, None, 3], 2, id="a text without an answer has no vote"),
        pytest.param([None, None], 0, id="no answer at all"),
    ],
)
def test_the_first_text_with_the_most_frequent_answer_wins(
    ballots: list[int | None], best: int
) -> None:
    assert most_frequent(ballots) == best


def test_equal_answers_vote_together_however_they_are_written() -> None:
    answers = [r"\boxed{2}", "none", r"it is \boxed{1/2}", r"so \boxed{0.5}"]
    assert Votes(5).best_index("What is 1 - 1/2?", answers) == 2
