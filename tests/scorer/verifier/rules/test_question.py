r"""The question beside the answer: its formulas are no answers, its words may stand behind a value."""

import re
from functools import partial
from itertools import combinations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prefixrl.scorer.verifier.routing import ForChild, ask_verifier
from prefixrl.scorer.verifier.rules.verify import UnparsableAnswerError, verify_with_sympy

QUESTION = (
    r"Let $f(x)=x^2-9$. Simplify $\sqrt{98}$, solve $2x-1\le7$ on $[0,50]$, and find $\frac mn$, if \(0.5\) of the 12 "
    r"red marbles weigh \[\frac{3}{\sqrt{27}}+2k.\] Evaluate (u+4)(u-1)-(u-3)(u+6) as well. Which is even?"
)
EXAMPLES = partial(
    pytest.mark.parametrize, "examples", [15, pytest.param(2_000, marks=pytest.mark.nightly)]
)


def is_right(answer: str, gold: str, question: str = "") -> bool:
    """The verdict on a box, with sympy where it is needed, in this process."""
    result = ask_verifier(rf"\boxed{{{answer}}}", gold, question, "none", 5)
    if not isinstance(result, ForChild):
        return result.reward == 1.0
    try:
        return verify_with_sympy(gold, result.question.answer, 20)
    except UnparsableAnswerError:
        return False


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        pytest.param(r"\sqrt{98}", r"7\sqrt2", id="a root"),
        pytest.param(r"\sqrt{98}\text{ marbles}", r"7\sqrt2", id="a root with a unit"),
        pytest.param(r"a=\sqrt{98}", r"7\sqrt2", id="a root by name"),
        pytest.param("x^2-9", "(x-3)(x+3)", id="a polynomial"),
        pytest.param("f(x)=x^2 - 9", "(x-3)(x+3)", id="a function"),
        pytest.param(r"\dfrac{3}{\sqrt{27}}", r"\frac{\sqrt3}{3}", id="a fraction"),
        pytest.param(r"\frac{3}{\sqrt{27}}+2k", r"2k+\frac{\sqrt3}{3}", id="a sum of the question"),
        pytest.param(r"2x-1\leq 7", r"(-\infty,4]", id="an inequality"),
        pytest.param("[0,50]", r"0\le x\le50", id="an interval"),
        pytest.param("(u+4)(u-1)-(u-3)(u+6)", "14", id="an expression to simplify"),
    ],
)
def test_a_formula_of_the_question_is_no_answer(answer: str, gold: str) -> None:
    assert not is_right(answer, gold, QUESTION)


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        pytest.param(r"\sqrt {98}", r"\sqrt{98}", id="the same with a space"),
        pytest.param("x^2-9", "x^2 - 9", id="the same without spaces"),
        pytest.param("0.5", "0.50", id="a zero at the end"),
        pytest.param("12", "12", id="a number"),
        pytest.param(r"\sqrt{98}=7\sqrt2", r"7\sqrt2", id="both sides of an equation"),
        pytest.param(r"x\le4", r"(-\infty,4]", id="an inequality for an interval"),
        pytest.param(r"\frac{m}{n}=\frac34", r"\frac34", id="an equation for a fraction"),
        pytest.param(r"12\text{ red marbles}", "12", id="a number with a unit"),
        pytest.param("(x-3)(x+3)", "(x-3)(x+3)", id="a factored polynomial"),
        pytest.param(r"\text{even}", "Even", id="a word"),
        pytest.param(r"\frac{1}{\sqrt3}", r"\frac{\sqrt3}{3}", id="a fraction with a root below"),
    ],
)
def test_the_gold_answers_own_text_and_every_other_right_answer_is_right(
    answer: str, gold: str
) -> None:
    assert is_right(answer, gold, QUESTION)


@pytest.mark.parametrize(
    "words", ["or red", "minus one", "red or less", "halves", "blue wugs", "x", "squared"]
)
def test_no_word_that_is_neither_unit_nor_of_the_question_nor_one_that_calculates_stands_behind_a_value(
    words: str,
) -> None:
    assert not is_right(
        rf"12\text{{ {words}}}", "12", "How many red or other ones, squared or in halves?"
    )


@pytest.mark.parametrize(
    ("answer", "is_known"),
    [("A) the red ball", True), ("A: not this one", False), ("A. B is right", False)],
)
def test_text_behind_a_choice_must_be_the_questions(answer: str, is_known: bool) -> None:
    assert (
        is_right(rf"\text{{{answer}}}", "A", "Which? (A) The red ball (B) the blue ball")
        is is_known
    )


NUMBERS = st.integers(2, 60).map(str)
LEAVES = st.one_of(
    NUMBERS, st.sampled_from(["x", "k", "2x", r"\pi", r"\sqrt2", r"\sqrt{12}", r"\frac{3}{4}"])
)
FORMULAS = st.recursive(
    LEAVES,
    lambda part: st.one_of(
        st.tuples(part, part).map(lambda t: f"({t[0]})+{t[1]}"),
        st.tuples(part, part).map(lambda t: rf"{t[0]}-({t[1]})"),
        st.tuples(part, part).map(lambda t: rf"\frac{{{t[0]}}}{{{t[1]}}}"),
        st.tuples(part, st.integers(2, 3)).map(lambda t: f"({t[0]})^{t[1]}"),
        st.tuples(part, NUMBERS).map(lambda t: rf"{t[0]}\le{t[1]}"),
    ),
    max_leaves=4,
)
WORDS = st.sampled_from(
    ["Find ", "Simplify ", " for all real numbers, where ", " and ", ". Write it as "]
)
WRAPPED = st.sampled_from(["${}$", r"\({}\)", r"\[ {} \]", "$$ {} $$"])


def relaxed(examples: int) -> settings:
    return settings(
        max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )


@pytest.mark.timeout(900)
@EXAMPLES()
def test_boxed_formulas_of_a_question_pay_only_where_they_are_the_gold_answers_text(
    examples: int,
) -> None:
    @relaxed(examples)
    @given(
        st.lists(st.tuples(WORDS, WRAPPED, FORMULAS), min_size=1, max_size=3), FORMULAS, st.data()
    )
    def check(parts: list[tuple[str, str, str]], other: str, data: st.DataObject) -> None:
        question = "".join(word + wrapped.format(formula) for word, wrapped, formula in parts)
        formula = data.draw(st.sampled_from([part[2] for part in parts]))
        # A gold answer that is equal to the formula, or any other one.
        gold = data.draw(
            st.sampled_from([f"{formula}+0", f"0+({formula})", f"({formula})\\cdot1", other])
        )
        if gold not in (formula, f"({formula})") and not re.fullmatch(r"\d+|[a-z]", formula):
            assert not is_right(formula, gold, question), (question, gold)
        assert is_right(formula, formula, question)

    check()


CONSTANTS = [
    "0", "1", "-1", "2", "i", "e", r"\pi", r"\infty", r"-\infty", r"\pm1", r"\pm\infty", "0^0", r"\frac00",
    r"\emptyset", r"\mathbb{R}", "x", "x=x", "0<1", "x<x+1", r"x\le x", r"x\in\mathbb{R}", r"x<\infty", r"\text{yes}",
    "A", "a=b", r"\infty^0", "x:x", "0x", "x^0", r"\{\}", "()", r"x\ne x", r"\sum", r"\text{all}", "1=1", "n", "?",
]  # fmt: skip
GOLDS = [
    "0", "1", "2", "7", r"\frac12", "0.25", r"\sqrt2", r"2\pi", "x+1", "x^2", r"(-\infty,4]", "[0,1)", r"\{1,2\}",
    "3,7", "(1,2)", r"\emptyset", r"\mathbb{R}", "A", "B", r"\text{even}", "12:30", "x=3", "y=2x", r"\pm2", "5i",
    r"\infty", r"\begin{pmatrix}1\\2\end{pmatrix}", r"x>3", "-1",
]  # fmt: skip


@pytest.mark.timeout(600)
@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.nightly)])
def test_no_constant_pays_for_two_gold_answers(step: int) -> None:
    for constant in CONSTANTS[::step]:
        paid = [gold for gold in GOLDS if is_right(constant, gold)]
        assert len(paid) <= 1, (constant, paid)


JOINTS = [
    r"\text{ or }", ",", r",\ ", "=", r"\approx", r"\equiv", r"\ne", "|", r"\\", r"\quad", ";", r"\lor ", r"\cup ",
    r"\pm ", r"\to ", r"\text{ and }", r"\Rightarrow ", r"\text{ versus }", " ", "/", "<", r"\le ",
]  # fmt: skip


@pytest.mark.timeout(900)
@EXAMPLES()
def test_no_box_of_two_values_pays_for_both(examples: int) -> None:
    values = [
        "8",
        "9",
        r"\frac12",
        r"\sqrt3",
        "x+1",
        "(1,2)",
        "A",
        "B",
        "[0,1)",
        r"\text{odd}",
        "0.6",
    ]

    @relaxed(examples)
    @given(st.sampled_from(list(combinations(values, 2))), st.sampled_from(JOINTS), st.booleans())
    def check(pair: tuple[str, str], joint: str, turned: bool) -> None:
        one, other = pair[::-1] if turned else pair
        assert not (is_right(one + joint + other, one) and is_right(one + joint + other, other))

    check()
