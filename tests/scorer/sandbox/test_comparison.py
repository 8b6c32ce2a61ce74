"""Whole numbers and strings of digits that a program gives are met exactly, floats up to rounding."""

import json
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixrl.scorer.sandbox.comparison import is_printed, is_returned, is_rounded


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        ("3", "3"),
        ("3\n", " 3 "),
        ("3.0", "3"),
        ("2.9999999999999996", "3"),
        ("1e18", "1000000000000000000"),
        ("2", "2.0"),
        ("0.30000000000000004", "0.3"),
        ("1e-13", "0.0"),
        ("1 2\n3", "1 2.0\n3"),
        ("0.5", ".5"),
        ("é", "é"),
        ("4", 4),
        ("1\n2", ["1", "2"]),
        ("1000", "1e3"),
    ],
)
def test_what_is_right(printed: str, expected: object) -> None:
    assert is_printed(printed, expected)


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        pytest.param("2000000001", "2000000000", id="the last digit"),
        pytest.param("2000000001.0", "2000000000", id="a float of an integer"),
        pytest.param("1234567890123", "1234567890000", id="rounded"),
        pytest.param("12345678901234567891", "12345678901234567890", id="beyond 64 bits"),
        pytest.param(
            "101010101010101010101010101010111111111111111111111111111111",
            "101010101010101010101010101010000000000000000000000000000000",
            id="beyond floats",
        ),
        pytest.param("11", "0011", id="zeros in front"),
        pytest.param("0011", "11", id="missing zeros in front"),
        pytest.param("12", "1,2", id="a comma"),
        pytest.param("5", "$5", id="a currency sign"),
        pytest.param("inf", "Infinity", id="inf"),
        pytest.param("nan", "nan.", id="nan with a point"),
        pytest.param("1e999", "1e998", id="overflow"),
        pytest.param("1 2", "1\n2", id="a line for a space"),
        pytest.param("1", "1 2", id="a word is missing"),
        pytest.param("2.00001", "2.0", id="a fifth decimal"),
        pytest.param("3.0000001e9", "3000000000", id="an exponent for an integer"),
        pytest.param("1_000", "1000", id="underscores"),
        pytest.param("٣", "3", id="another script's digit"),
        pytest.param("", "0", id="nothing"),
    ],
)
def test_what_is_wrong(printed: str, expected: object) -> None:
    assert not is_printed(printed, expected)


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (3, 3),
        (3, [3]),
        (3, "3"),
        (True, "true"),
        (None, "null"),
        (2.0, "2.00000"),
        ("", ""),
        ("[abc", "[abc"),
        ("{}", "{}"),
        ({}, "{}"),
        ([0.1 + 0.2, [1]], [0.3, [1.0]]),
        ([1, 2], "[1, 2]"),
        ('"', '"'),
        ("a", '"a"'),
        (True, "True"),
    ],
)
def test_a_returned_value_is_met_as_it_is_or_as_json_in_a_text(
    returned: object, expected: object
) -> None:
    assert is_returned(json.dumps(returned), expected)


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (2000000001, 2000000000),
        (2000000001.0, 2000000000),
        ([1, 2], [1]),
        ([1], [1, 2]),
        (0, ""),
        (None, 0),
        (float("nan"), 1),
        (float("inf"), 2),
        ("1", 1),
        (True, 1),
        (1, True),
        ([True], [1]),
        ({"a": 0}, {"a": False}),
    ],
)
def test_another_value_is_wrong(returned: object, expected: object) -> None:
    assert not is_returned(json.dumps(returned), expected)


def test_a_chosen_tolerance_is_relative_and_absolute_and_leaves_whole_numbers_exact() -> None:
    for printed, expected in (
        ("2.5000004", "2.5"),
        ("0.0000004", "0.0"),
        ("1000000100.5", "1000000000.5"),
    ):
        assert is_printed(printed, expected, 1e-6) and not is_printed(printed, expected)
    assert is_returned("[0.333333]", [0.3333334], 1e-6) and not is_returned(
        "[0.333333]", [0.3333334]
    )
    assert not is_printed("1000001", "1000000", 1e-6) and not is_printed("2.50001", "2.5", 1e-6)


def test_numbers_beyond_all_floats_are_no_fault() -> None:
    huge = "7" * 350
    assert not is_printed("1.0", huge) and not is_printed(huge, "1.0") and is_printed(huge, huge)
    assert (
        not is_returned(huge, 1.0)
        and not is_returned("1.0", int(huge))
        and is_returned(huge, int(huge))
    )
    assert not is_rounded("1.0", Fraction(2**30_000)) and not is_rounded(
        "1.0", Fraction(1, 2**30_000) + 2
    )


@given(st.integers(-(10**30), 10**30), st.integers(-(10**30), 10**30))
def test_whole_numbers_are_right_only_if_they_are_equal(printed: int, expected: int) -> None:
    assert is_printed(str(printed), str(expected)) == (printed == expected)
    assert is_returned(str(printed), expected) == (printed == expected)


@given(st.floats(-1e15, 1e15), st.floats(-1e15, 1e15))
def test_floats_are_right_up_to_nine_digits(printed: float, expected: float) -> None:
    """Slow twin: in fractions, nothing is rounded."""
    got, want = Fraction(printed), Fraction(expected)
    slack = max(Fraction(1, 10**9) * abs(want), Fraction(1, 10**12))
    if want.denominator == 1:
        slack = min(slack, Fraction(1, 10**6))
    if abs(abs(got - want) - slack) > slack / 10**6:
        assert is_rounded(f"{printed:.20e}", want) == (abs(got - want) < slack)


@given(st.text(max_size=30), st.text(max_size=30))
def test_no_text_is_a_fault(printed: str, expected: str) -> None:
    is_printed(printed, expected)
    is_returned(printed, expected)
    assert is_printed(printed, printed)
