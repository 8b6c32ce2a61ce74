"""Several boxes in one sentence: one list for a gold answer that is a list, never for one value."""

import pytest

from prefixrl.scorer.verifier.exchange import Choices
from prefixrl.scorer.verifier.routing import ForChild, ask_verifier
from prefixrl.scorer.verifier.rules.boxes import is_list, joined_answer
from prefixrl.scorer.verifier.rules.verify import Judgement


@pytest.mark.parametrize(
    "gold",
    ["3,7", "3, 7", r"(2,2),(6,2)", r"(2,2)\text{ and }(6,2)", "x=1 or x=2", r"\{1,2\},\{3\}"],
)
def test_what_commas_divide_outside_of_brackets_is_a_list(gold: str) -> None:
    assert is_list(gold)


@pytest.mark.parametrize(
    "gold",
    ["7", "(2,2)", r"\{1,2\}", "[0,1)", "1,234", "1,234,567.5", r"\left(1,2\right)", "sand", ""],
)
def test_one_value_is_no_list(gold: str) -> None:
    assert not is_list(gold)


@pytest.mark.parametrize(
    ("text", "gold", "expected"),
    [
        pytest.param(
            r"so \boxed{(2,2)} and \boxed{(6,2)}.",
            "(2,2),(6,2)",
            "(2,2),(6,2)",
            id="points joined by and",
        ),
        pytest.param(
            r"$\boxed{3}$, $\boxed{5}$, and $\boxed{7}$", "3,5,7", "3,5,7", id="three in formulas"
        ),
        pytest.param(
            r"\[\boxed{3}\text{ or }\boxed{\frac{1}{2}}\]",
            r"\frac12,3",
            r"3,\frac{1}{2}",
            id="or as text",
        ),
        pytest.param(
            r"\boxed{3} is wrong. So \boxed{5}, \boxed{7}", "5,7", "5,7", id="a sentence between"
        ),
        pytest.param(r"\boxed{3} \boxed{7}", "3,7", "7", id="a space between"),
        pytest.param(r"\boxed{3,7}", "3,7", "3,7", id="a list in one box"),
        pytest.param(r"\boxed{3} and \boxed{7}", "7", "7", id="a gold answer of one value"),
        pytest.param(r"\boxed{3} and \boxed{7}", "(3,7)", "7", id="a gold tuple"),
        pytest.param(
            r"<think>\boxed{3} and </think>\boxed{7}", "3,7", "7", id="joined across thinking"
        ),
        pytest.param(r"\boxed{3} and \boxed{7", "3,7", "3", id="the last not closed"),
        pytest.param("none", "3,7", "", id="no box"),
    ],
)
def test_boxes_that_a_word_or_comma_joins_are_one_list(text: str, gold: str, expected: str) -> None:
    assert joined_answer(text, gold) == (expected or None)


def test_a_scorer_reads_them_so_by_choice_alone() -> None:
    text, gold = r"\boxed{3} and \boxed{7}", "7,3"
    last, joined = (
        ask_verifier(text, gold, "", "none", 5, choices=Choices(each)) for each in (False, True)
    )
    # A list has no order, which is sympy's to tell.
    assert isinstance(last, ForChild) and last.extracted == "7"
    assert isinstance(joined, ForChild) and joined.extracted == "3,7"


def test_no_hedge_over_two_boxes_pays_for_one_value() -> None:
    for text in (r"\boxed{3} or \boxed{7}", r"\boxed{7} or \boxed{3}"):
        actual = [
            ask_verifier(text, gold, "", "none", 5, choices=Choices(True)) for gold in ("3", "7")
        ]
        assert sum(isinstance(each, Judgement) and each.reward == 1.0 for each in actual) == 1
