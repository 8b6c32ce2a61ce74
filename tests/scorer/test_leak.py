"""Gold answers that stand in prefixes."""

import pytest

from prefixrl.scorer.leak import holds_gold


@pytest.mark.parametrize(
    ("text", "gold"),
    [
        ("The answer is 12.", "12"),
        ("it costs $1,200 in all", "1200"),
        ("so 12.0 apples", "12"),
        ("try -3", "-3"),
        ("half, that is 1/2", "0.5"),
        (r"the set is \frac{1}{2}", r"\frac{1}{2}"),
        ("It is Paris, I think", "paris"),
        ("choose B", "B"),
        ("in  New\nYork", "new york"),
    ],
)
def test_an_answer_in_the_text_is_a_leak(text: str, gold: str) -> None:
    assert holds_gold(text, gold)


@pytest.mark.parametrize(
    ("text", "gold"),
    [
        ("add all the digits", "4"),
        ("divide 120 by the price", "12"),
        ("12.5 is too much", "12"),
        ("a comparison helps", "Paris"),
        ("a box", "A"),
        ("parish", "Paris"),
        ("anything", ""),
        ("", "3"),
        ("1/0", "3"),
    ],
)
def test_a_text_without_the_answer_is_none(text: str, gold: str) -> None:
    assert not holds_gold(text, gold)
