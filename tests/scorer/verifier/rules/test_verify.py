"""Both paths of grading, each against the pitfalls that were measured on math-verify."""

import gc
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixrl.scorer.verifier.routing import ask_verifier
from prefixrl.scorer.verifier.rules import exact
from prefixrl.scorer.verifier.rules import verify as verifying
from prefixrl.scorer.verifier.rules.arithmetic import read_rational
from prefixrl.scorer.verifier.rules.guards import has_numbers_side_by_side
from prefixrl.scorer.verifier.rules.looks import normal_form

FRACTIONS = st.fractions(min_value=-(10**6), max_value=10**6, max_denominator=10**4)


def settled(gold: str, answer: str) -> bool | None:
    return exact.settle_exactly(gold, answer).is_right


@pytest.mark.parametrize(
    "answer", [r"\frac 1 2", r"\frac1 2", r"\dfrac 1 2", r"\frac 12", r"\frac{1} 2", r"\frac 1{2}"]
)
def test_a_fraction_needs_no_braces(answer: str) -> None:
    assert settled("0.5", answer) is True
    assert settled("3.5", f"3 {answer}") is True
    assert settled("-0.5", f"-{answer}") is True


def test_a_power_of_ten_after_a_space_is_no_second_number() -> None:
    assert settled("1500", "1.5 10^3") is not False
    assert settled("12", "2 10") is False


@pytest.mark.parametrize(
    "answer",
    [
        "3 1/2",
        "3~1/2",
        r"3\frac12",
        r"3 \frac{1}{2}",
        r"3\frac1{2}",
        "3 {1}/{2}",
        "{7}/2",
        r"\frac7{2}",
    ],
)
def test_a_mixed_number_or_a_fraction_in_braces_is_no_pair_of_numbers(answer: str) -> None:
    assert settled("3.5", answer) is not False
    assert not has_numbers_side_by_side(normal_form(answer))


@pytest.mark.parametrize(
    "answer", ["x^2{3}", "x_1{2}", r"\log2{8}", "x^{2}{3}", r"\sqrt[3]{2}", "x_{1}{2}"]
)
def test_a_number_that_belongs_to_what_stands_before_it_is_beside_none(answer: str) -> None:
    assert not has_numbers_side_by_side(normal_form(answer))


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        pytest.param(r"\ln x+1", r"1+\ln x", id="a sum in another order"),
        pytest.param("10", r"10\%", id="percent"),
        pytest.param("3 4", "34", id="a space in a number"),
        pytest.param("1, 200", "1200", id="a space behind a comma"),
        pytest.param("(1,200)", "1200", id="a pair or thousands"),
        pytest.param("1,200", "200", id="thousands or a list"),
        pytest.param("1", "1/0", id="a division by zero"),
        pytest.param(r"\sqrt{2}", "1.414214", id="a decimal of a root"),
    ],
)
def test_what_no_exact_path_can_tell_is_left_to_sympy(gold: str, answer: str) -> None:
    assert settled(gold, answer) is None


@given(FRACTIONS, FRACTIONS)
def test_two_fractions_are_equal_exactly_when_python_says_so(a: Fraction, b: Fraction) -> None:
    latex = rf"\frac{{{b.numerator}}}{{{b.denominator}}}"
    assert settled(f"{a.numerator}/{a.denominator}", latex) is (a == b)
    assert settled(latex, f"{b.numerator * 3}/{b.denominator * 3}") is True


@given(
    st.decimals(
        allow_nan=False, allow_infinity=False, places=6, min_value=-(10**9), max_value=10**9
    )
)
def test_a_decimal_equals_itself_however_it_is_written(number: Decimal) -> None:
    plain = f"{number:f}"
    assert settled(plain, f"{number:.9f}") is True
    assert settled(plain, f"{number + Decimal('1e-9'):.9f}") is False
    if number >= 1000:
        assert settled(plain, f"{number:,.6f}") is True


@given(
    st.recursive(
        st.integers(0, 99).map(str),
        lambda part: st.one_of(
            st.tuples(part, st.sampled_from("+-*/"), part).map(lambda t: f"({t[0]}{t[1]}{t[2]})"),
            st.tuples(part, st.integers(0, 3)).map(lambda t: f"({t[0]}^{t[1]})"),
        ),
        max_leaves=8,
    )
)
def test_arithmetic_has_the_value_python_gives_it(text: str) -> None:
    number = read_rational(text)
    try:
        expected = _evaluate(text)
    except ZeroDivisionError:
        assert number is None
        return
    assert number is None or number.value == expected


def _evaluate(text: str) -> Fraction:
    """The slow twin: a fully bracketed text, cut at the operator of its outermost bracket."""
    if not text.startswith("("):
        return Fraction(text)
    inner, depth = text[1:-1], 0
    for at, char in enumerate(inner):
        depth += (char == "(") - (char == ")")
        if depth == 0 and char in "+-*/^":
            left, right = _evaluate(inner[:at]), _evaluate(inner[at + 1 :])
            match char:
                case "+":
                    return left + right
                case "-":
                    return left - right
                case "*":
                    return left * right
                case "/":
                    return left / right
                case _:
                    return Fraction(left ** int(right))
    raise AssertionError(text)


@given(st.text("0123456789+-*/^!(){}.,_=$\\fracABx ", max_size=80))
def test_the_exact_path_ends_for_any_text(text: str) -> None:
    assert settled("7", text) in (True, False, None)
    assert settled(text, "7") in (True, False, None)


@pytest.mark.parametrize(
    "answer",
    [
        "9^{9^9}",
        "9^9^9",
        "9^{9^{9}}",
        "(9^9)^9",
        "{9^{9}}^9",
        "9^{387420489}",
        "10000000!",
        "(9!)!",
        "9!!",
        "1" * 65,
        "(" * 51 + "1" + ")" * 51,
        "1+" * 300 + "1",
    ],
)
def test_a_bomb_is_a_parse_failure_and_reaches_no_parser(answer: str) -> None:
    assert exact.is_refused(answer)
    verdict = verifying.judge_exactly("7", answer)
    assert verdict is not None
    assert (verdict.reward, verdict.status) == (0.0, "parse_fail")
    assert len(verdict.extracted or "") <= 512


@pytest.mark.parametrize(
    "answer",
    [
        "x^2+(y+1)^2",
        "e^{x^2}",
        "2^{2024}",
        r"(x^2+1)^2",
        "20!",
        "n!",
        r"\frac{x^{2}}{y^{3}}",
        "1" * 64,
    ],
)
def test_ordinary_answers_are_not_refused(answer: str) -> None:
    assert not exact.is_refused(answer)


def test_a_refused_answer_is_right_when_it_is_literally_the_gold_answer() -> None:
    assert settled("2^{100000}", "2^{100000}") is True
    assert settled("1+" * 300 + "1", "1+" * 300 + "1") is True


def test_no_answer_is_its_own_status() -> None:
    verdict = ask_verifier("seven", "7", "", "none", 5)
    assert isinstance(verdict, verifying.Judgement)
    assert (verdict.reward, verdict.status, verdict.extracted) == (0.0, "no_answer", None)


def test_an_answer_that_is_no_expression_is_named_unparsable() -> None:
    with pytest.raises(verifying.UnparsableAnswerError):
        verifying.verify_with_sympy("7", "8 ### {", 30)


# The alarm may ring inside a destructor, which reports it and goes on.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_running_out_of_time_is_not_a_wrong_answer_in_disguise() -> None:
    gold = r"\int_0^1 x^x dx"
    assert verifying._read_gold(gold), "the first one loads the parser"
    gc.disable()  # nor may it ring inside a callback of hypothesis, which would end pytest
    try:
        with pytest.raises(TimeoutError):
            verifying.verify_with_sympy(gold, r"\int_0^1 x^x \sin(\cos(x^x)) dx", 1)
    finally:
        gc.enable()


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "part",
    ["A", "a_", "a'", "AB+", "f(", "x=", "(1,", "a,b=", r"\text{a}", r"\vec{a}", "ab ", "1="],
)
def test_no_text_keeps_the_reader_of_equations_busy(part: str) -> None:
    for end in ("", "!", "=7", "=!", ")" * 9):
        text = part * (480 // len(part)) + end
        assert settled("7", text) in (True, False, None)
        assert settled(text, "7") in (True, False, None)
