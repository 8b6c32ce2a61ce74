r"""Comparison of an answer with the gold answer: exact where possible, else by math-verify.

    settle_exactly      pure and bounded: strings and rational numbers; None where it cannot decide
    verify_with_sympy   anything else; may cost seconds or gigabytes: for child processes only

Some answers that math-verify accepts are wrong here: numbers that agree only because both are tiny (1/2004! and
1/2006!, which it rounds to zero), the question repeated as the answer (`2+2` for 4), a set for a tuple (`guards.py`).
"""

import functools
import re
import time

import msgspec

from prefixrl.common.engines.extract import MAX_ANSWER_CHARS
from prefixrl.common.wire.messages import Fault, VerdictStatus
from prefixrl.scorer.verifier import symbols
from prefixrl.scorer.verifier.guards import differs_in_kind, leaves_undone, sides_of, tuple_elements
from prefixrl.scorer.verifier.rationals import Rational, read_rational
from prefixrl.scorer.verifier.residues import are_equal
from prefixrl.scorer.verifier.time_limit import time_limit


class Judgement(msgspec.Struct, frozen=True):
    """The verdict on one answer. Read `status` before `reward`."""

    reward: float
    """1.0 right, 0.0 wrong; meaningless where the status is `error`."""
    status: VerdictStatus
    """`ok`: judged. `no_answer`, `parse_fail`, `timeout`: wrong answers, by kind. `error`: nothing is known, since the
    verifier failed twice: a reader excludes the row from its group; it must never count as reward 0."""
    extracted: str | None
    """The answer judged, cut to MAX_ANSWER_CHARS; None if there was none; the reason where the status is `error`."""
    fault: Fault = ""
    """The kind of failure where status is `error`."""


class UnparsableAnswerError(ValueError):
    """The answer is not a mathematical expression and not literally the gold answer."""


class GoldError(ValueError):
    """The gold answer is not a mathematical expression that math-verify reads."""


def judge_exactly(gold: str, extracted: str | None) -> Judgement | None:
    """Return the verdict if it needs no sympy, else None."""
    if extracted is None:
        return Judgement(0.0, "no_answer", None)
    is_right = settle_exactly(gold, extracted)
    if is_right is None:
        return None
    status: VerdictStatus = "parse_fail" if not is_right and refusal(extracted) else "ok"
    return Judgement(float(is_right), status, extracted[:MAX_ANSWER_CHARS])


# --- the exact path -------------------------------------------------------------------------------

_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
_WRAPPER = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox)\{([^{}]*)\}")
_REWRITES = (
    (r"\\(?:left|right)(?![a-zA-Z])|\\[!,;:]|\\displaystyle(?![a-zA-Z])|\\\$", ""),
    (r"\^(?:\\circ|\{\\circ\})", ""),
    (r"\{,\}", ","),
    (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
    (r"\\(?:boxed|fbox)\s*", ""),
    (r"~|\\ ", " "),
    # Two kinds of spaces have a meaning and are kept, as "~": "3 4" is not 34, "1, 200" is not 1,200.
    (r"(?<=\d)\s+(?=\d)|(?<=\d,)\s+(?=\d{3}(?!\d))", "~"),
    (r"\s+", ""),
    (r"\\frac(\d)", r"\\frac{\1}"),
    (r"(\\frac\{[^{}]*\})(\d)", r"\1{\2}"),
    (r"_\{\\text\{(\w+)\}\}", r"_\1"),
    (r"_\{(\w+)\}", r"_\1"),
    (r"\\varnothing(?![a-zA-Z])", r"\\emptyset"),
    (r"\{:\}", ":"),
)
_IN_BASE = re.compile(r"\(?(?=[0-9A-F.]*\d)[0-9A-F.]+\)?_\w+")
_UNIT = re.compile(r"(?<=[\d}])~?\\(?:text|mathrm|mbox)\{~?[a-zA-Z/]+\.?\}(?:\^\d|\^\{\d\})?$")
_NAME = re.compile(r"[a-zA-Z](?:_\w)?")
_CHOICE = re.compile(r"\(?([A-J])(?:[).:].*)?", re.DOTALL)


def settle_exactly(gold: str, answer: str) -> bool | None:
    """Return True if the answer is the gold answer, None if strings and numbers cannot decide.

    Refused answers (see `refusal`) are wrong unless literally the gold answer. Numbers in a base other than ten and the
    letters of multiple choice are compared as written. Unequal numbers are wrong, however small the difference.
    """
    if len(answer) > MAX_ANSWER_CHARS:
        return answer.strip() == gold.strip()
    want, got = normalise(gold), normalise(answer)
    if want == got:
        return bool(got)
    if refusal(answer) is not None or _IN_BASE.fullmatch(want):
        return False
    want_choice, got_choice = _CHOICE.fullmatch(want), _CHOICE.fullmatch(got)
    if want_choice and got_choice and len(want) <= 3:
        return want_choice.group(1) == got_choice.group(1)
    want_number = read_rational(want)
    is_number = want_number is not None and want_number.is_evaluated
    if leaves_undone(want, got, is_number) or differs_in_kind(want, got, is_number):
        return False
    if want_number is not None:
        return _is_number(want_number, got)
    elements = tuple_elements(want), tuple_elements(got)
    if elements[0] and elements[1]:
        return _are_tuples(want, got, *elements)
    return are_equal(want, got)


def _is_number(want: Rational, answer: str) -> bool | None:
    """Compare numbers: all sides of `x=8=7` that are numbers, the last one evaluated."""
    answer = _UNIT.sub("", answer)
    texts = sides_of(answer)
    sides = [read_rational(side) for side in texts]
    if any(side and not side.is_grouped and side.value != want.value for side in sides):
        return None if want.is_grouped else False
    got = sides[-1]
    if got is None:
        return None
    if want.is_evaluated and not got.is_evaluated:
        return False
    is_named = len(texts) == 2 and _NAME.fullmatch(texts[0]) is not None
    is_chain = all(side is not None for side in sides)
    return True if (is_named or is_chain) and got.value == want.value else None


def _are_tuples(want: str, got: str, wanted: list[str], given: list[str]) -> bool | None:
    """Compare element by element; round and square brackets differ."""
    if len(wanted) != len(given) or (want[0], want[-1]) != (got[0], got[-1]):
        return False
    pairs = [settle_exactly(*pair) for pair in zip(wanted, given, strict=True)]
    if all(pairs):
        return True
    return False if False in pairs else None


def normalise(answer: str) -> str:
    """Remove what only changes the looks of an answer: delimiters, spacing, wrappers, styles."""
    text = _undelimited(answer).removesuffix(".")
    wrapped = _WRAPPER.fullmatch(text)
    text = wrapped.group(1).strip() if wrapped else text
    for pattern, replacement in _REWRITES:
        text = re.sub(pattern, replacement, text)
    return text


def is_settled_without_sympy(gold: str) -> bool:
    """Return True if the gold answer is a number or a choice, which the exact path can read."""
    text = normalise(gold)
    return (
        read_rational(text) is not None
        or _IN_BASE.fullmatch(text) is not None
        or (len(text) <= 3 and _CHOICE.fullmatch(text) is not None)
    )


def _undelimited(text: str) -> str:
    text = text.strip()
    for opening, closing in _DELIMITERS:
        inner = text[len(opening) : -len(closing)]
        if text == f"{opening}{inner}{closing}" and "$" not in inner:
            return inner.strip()
    return text


# --- what is never given to a parser --------------------------------------------------------------

_MAX_NESTING = 50
_HOSTILE = (
    (r"\d{65}", "more than 64 digits in a row"),
    (r"\^\s*(?:\d+|\{[^{}a-zA-Z]*\})\s*\^", "a power of a power"),
    (r"\^\s*\{[^{}a-zA-Z]*\^", "a power in an exponent"),
    (r"[({][^(){}a-zA-Z]*\^[^()a-zA-Z]*[)}]\s*\^", "a power of a power"),
    (r"\^\s*[{(]*\s*[+-]?\s*\d{5}", "an exponent of 10000 or more"),
    (r"\d{5}\s*[)}]*\s*!|\d\s*!\s*[)}\s]*!", "a factorial too large"),
)


def refusal(answer: str) -> str | None:
    """Return why an answer is not parsed, or None; short inputs may cost minutes or gigabytes."""
    if len(answer) > MAX_ANSWER_CHARS:
        return f"longer than {MAX_ANSWER_CHARS} characters"
    depth = deepest = 0
    for char in answer:
        depth += (char in "([{") - (char in ")]}")
        deepest = max(deepest, depth)
    if deepest > _MAX_NESTING:
        return f"brackets nested deeper than {_MAX_NESTING}"
    return next((reason for pattern, reason in _HOSTILE if re.search(pattern, answer)), None)


# --- the slow path --------------------------------------------------------------------------------


def verify_with_sympy(gold: str, answer: str, timeout_s: float) -> bool:
    r"""Ask math-verify, in the main thread of a process that can be killed.

    The limit uses SIGALRM, which some of sympy's loops ignore. Answers are read as LaTeX only, and whole. Raises
    TimeoutError, GoldError, or UnparsableAnswerError where nothing matched and the answer is not an expression.
    """
    deadline = time.monotonic() + timeout_s
    golds = gold_readings(gold, timeout_s)
    with time_limit(deadline - time.monotonic()):
        answers = symbols.read(_unboxed(answer))
        if any(symbols.are_equal(want, got) for want in golds for got in answers):
            return True
        if all(isinstance(got, str) for got in answers):
            raise UnparsableAnswerError(answer)
        return False


def bare(gold: str) -> str:
    """Remove delimiting dollars from a gold answer, stray ones included."""
    return re.sub(r"(?<!\\)\$", "", _undelimited(gold))


def _unboxed(text: str) -> str:
    # The command alone: of a box within the box the parser would take the inner one.
    return re.sub(r"\\(?:boxed|fbox)(?![a-zA-Z])", "", text)


@functools.lru_cache(maxsize=1024)
def gold_readings(gold: str, timeout_s: float) -> tuple[object, ...]:
    """Parse a gold answer: at most an expression and its text; raises GoldError."""
    try:
        with time_limit(timeout_s):
            readings = symbols.read(_unboxed(bare(gold)))
    except Exception as error:
        raise GoldError(f"gold answer {gold!r:.200} cannot be parsed: {error}") from error
    if not readings:
        raise GoldError(f"gold answer {gold!r:.200} cannot be parsed")
    return readings
