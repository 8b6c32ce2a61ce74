"""Equality modulo a prime, against floating-point numbers as the slow twin."""

import math

from hypothesis import given
from hypothesis import strategies as st

from prefixrl.scorer.verifier.rules.arithmetic import _SMALL, PRIME, _root, are_equal

PLACES = (0.7310585, 1.8923117, -2.3321901)
TREES = st.recursive(
    st.one_of(
        st.integers(1, 30).map(lambda n: (str(n), str(n))),
        st.sampled_from([("x", "x"), (r"\pi ", "PI")]),
        st.integers(1, 90).map(lambda n: (rf"\sqrt{{{n}}}", f"math.sqrt({n})")),
    ),
    lambda part: st.one_of(
        st.tuples(part, st.sampled_from("+-*"), part).map(
            lambda t: (f"({t[0][0]}{t[1]}{t[2][0]})", f"({t[0][1]}{t[1]}{t[2][1]})")
        ),
        st.tuples(part, part).map(
            lambda t: (rf"\frac{{{t[0][0]}}}{{{t[1][0]}}}", f"({t[0][1]}/{t[1][1]})")
        ),
        st.tuples(part, st.integers(0, 3)).map(
            lambda t: (f"({t[0][0]})^{t[1]}", f"({t[0][1]})**{t[1]}")
        ),
    ),
    max_leaves=6,
)


def number(code: str, x: float) -> float:
    return float(eval(code, {"math": math, "x": x, "PI": math.pi}))  # noqa: S307 - of our own making


@given(TREES, TREES)
def test_two_expressions_are_equal_exactly_when_their_numbers_are(
    a: tuple[str, str], b: tuple[str, str]
) -> None:
    actual = are_equal(a[0].replace(" ", ""), b[0].replace(" ", ""))
    if actual is None:
        return
    try:
        pairs = [(number(a[1], x), number(b[1], x)) for x in PLACES]
    except (ZeroDivisionError, OverflowError):
        return
    assert actual is all(math.isclose(*pair, rel_tol=1e-9, abs_tol=1e-9) for pair in pairs)


@given(TREES)
def test_an_expression_equals_itself_rewritten(a: tuple[str, str]) -> None:
    text = a[0].replace(" ", "")
    assert are_equal(text, f"({text})+3-3") in (True, None)
    assert are_equal(text, f"({text})+1") in (False, None)


def test_every_root_is_one() -> None:
    assert len(_SMALL) == 25
    assert all(_root(q) ** 2 % PRIME == q for q in _SMALL)


def test_what_may_be_a_constant_a_word_or_too_large_is_not_read() -> None:
    long = "(" * 30 + "x" + ")" * 30
    for text in (
        "2i",
        "e^x",
        "even",
        r"\sqrt{101}",
        r"\sqrt{x}",
        "x^{999}",
        "x^x",
        r"\sqrt[3]{2}",
        long,
    ):
        assert are_equal(text, f"{text}+0") is None, text
