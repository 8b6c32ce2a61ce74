"""Several boxes in one sentence: one list for a gold answer that is a list, never for one value."""

import pytest

from prefixrl.scorer.verifier.exchange import Choices
from prefixrl.scorer.verifier.routing import ForChild, ask_verifier
from prefixrl.scorer.verifier.rules.boxes import is_list, joined_answer
from prefixrl.scorer.verifier.rules.verify import Judgement
from support.tables import table


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


@table(__file__)
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
        found = [
            ask_verifier(text, gold, "", "none", 5, choices=Choices(True)) for gold in ("3", "7")
        ]
        assert sum(isinstance(each, Judgement) and each.reward == 1.0 for each in found) == 1
