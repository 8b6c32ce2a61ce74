r"""Is an answer the gold answer? Exactly where arithmetic can tell, else with math-verify.

    settle_exactly      pure and bounded: strings and rational numbers; None where it cannot tell
    verify_with_sympy   anything else; may cost seconds or gigabytes: for child processes only

Two kinds of answers that math-verify takes for right are wrong here: numbers that agree only
because both are tiny (1/2004! and 1/2006!, which it rounds to zero), and the question given back as
the answer (`2+2` for 4).
"""

import logging
import re
from typing import Literal

import msgspec

from prefixrl.scorer.extract import MAX_ANSWER_CHARS
from prefixrl.scorer.rationals import read_rational

log = logging.getLogger(__name__)

Status = Literal["ok", "no_answer", "parse_fail", "timeout", "error"]


class Verdict(msgspec.Struct, frozen=True):
    """What became of one answer. Read `status` before `reward`."""

    reward: float
    """1.0 right, 0.0 wrong. Says nothing where status is `error`."""
    status: Status
    """`ok`: judged. `no_answer`, `parse_fail`, `timeout`: wrong answers, counted by kind.
    `error`: the verifier failed, twice, so nothing is known: a reader excludes the row from its
    group; it must never count as reward 0."""
    extracted: str | None
    """The answer judged, cut to MAX_ANSWER_CHARS; None where there was none."""


class UnparsableAnswerError(ValueError):
    """The answer is no mathematical expression and not literally the gold answer."""


def judge_exactly(gold: str, extracted: str | None) -> Verdict | None:
    """The verdict where no sympy is needed for it, None where it is."""
    if extracted is None:
        return Verdict(0.0, "no_answer", None)
    is_right = settle_exactly(gold, extracted)
    if is_right is None:
        return None
    status: Status = "parse_fail" if not is_right and refusal(extracted) else "ok"
    return Verdict(float(is_right), status, extracted[:MAX_ANSWER_CHARS])


# --- the exact path -------------------------------------------------------------------------------

_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
_WRAPPER = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox)\{([^{}]*)\}")
_REWRITES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:left|right)(?![a-zA-Z])|\\[!,;:]|\\displaystyle(?![a-zA-Z])|\\\$", ""),
        (r"\^(?:\\circ|\{\\circ\})", ""),
        (r"\{,\}", ","),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"~|\\ ", " "),
        # Two spaces mean something and are kept, as "~": "3 4" is not 34, "1, 200" is not 1,200.
        (r"(?<=\d)\s+(?=\d)|(?<=\d,)\s+(?=\d{3}(?!\d))", "~"),
        (r"\s+", ""),
        (r"\\frac(\d)", r"\\frac{\1}"),
        (r"(\\frac\{[^{}]*\})(\d)", r"\1{\2}"),
        (r"_\{(\w+)\}", r"_\1"),
    )
)
_IN_BASE = re.compile(r"\(?(?=[0-9A-F.]*\d)[0-9A-F.]+\)?_\w+")
_CHOICE = re.compile(r"\(?([A-J])(?:[).:].*)?", re.DOTALL)


def settle_exactly(gold: str, answer: str) -> bool | None:
    """Whether the answer is the gold answer as far as strings and exact numbers tell, else None.

    Refused answers (see `refusal`) are wrong unless literally the gold answer. Numbers in a base
    other than ten and the letters of multiple choice are compared as written. Unequal numbers are
    wrong, however small the difference.
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
    want_number, got_number = read_rational(want), read_rational(got.rpartition("=")[2])
    if want_number is None or got_number is None:
        return None
    if want_number.is_evaluated and not got_number.is_evaluated:
        return False
    if "=" in got:
        return None
    if want_number.value == got_number.value:
        return True
    return None if want_number.is_grouped or got_number.is_grouped else False


def normalise(answer: str) -> str:
    """The answer without what only changes its looks: delimiters, spacing, wrappers, styles."""
    text = _undelimited(answer).removesuffix(".")
    wrapped = _WRAPPER.fullmatch(text)
    text = wrapped.group(1).strip() if wrapped else text
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    return text


def _undelimited(text: str) -> str:
    text = text.strip()
    for opening, closing in _DELIMITERS:
        inner = text[len(opening) : -len(closing)]
        if text == f"{opening}{inner}{closing}" and "$" not in inner:
            return inner.strip()
    return text


# --- what is never given to a parser --------------------------------------------------------------

_MAX_NESTING = 50
_HOSTILE = tuple(
    (re.compile(pattern), reason)
    for pattern, reason in (
        (r"\d{65}", "more than 64 digits in a row"),
        (r"\^\s*(?:\d+|\{[^{}a-zA-Z]*\})\s*\^", "a power of a power"),
        (r"\^\s*\{[^{}a-zA-Z]*\^", "a power in an exponent"),
        (r"[({][^(){}a-zA-Z]*\^[^()a-zA-Z]*[)}]\s*\^", "a power of a power"),
        (r"\^\s*[{(]*\s*[+-]?\s*\d{5}", "an exponent of 10000 or more"),
        (r"\d{5}\s*[)}]*\s*!|\d\s*!\s*[)}\s]*!", "a factorial too large"),
    )
)


def refusal(answer: str) -> str | None:
    """Why an answer is not worth a parser's time, or None.

    Short inputs that would cost minutes or gigabytes are refused by their shape.
    """
    if len(answer) > MAX_ANSWER_CHARS:
        return f"longer than {MAX_ANSWER_CHARS} characters"
    depth = deepest = 0
    for char in answer:
        depth += (char in "([{") - (char in ")]}")
        deepest = max(deepest, depth)
    if deepest > _MAX_NESTING:
        return f"brackets nested deeper than {_MAX_NESTING}"
    return next((reason for pattern, reason in _HOSTILE if pattern.search(answer)), None)


# --- the slow path --------------------------------------------------------------------------------


def verify_with_sympy(gold: str, answer: str, timeout_s: int) -> bool:
    r"""Ask math-verify. For the main thread of a process that can be killed, and nowhere else.

    Its alarms use SIGALRM, and some of sympy's loops never look at them. Only its LaTeX extraction
    is used: the other one evaluates text as Python. The gold answer is delimited, since math-verify
    reads a bare `2\sqrt{3}` as 2.

    Args:
        timeout_s: whole seconds (alarms take no others) for each of: parsing the gold answer,
            parsing the answer, comparing one reading of one with one reading of the other.

    Raises:
        TimeoutError: nothing matched, and one of the steps ran out of time.
        UnparsableAnswerError: nothing matched, and the answer is no expression.
        ValueError: the gold answer cannot be parsed.
    """
    bare_gold = re.sub(r"(?<!\\)\$", "", _undelimited(gold))
    golds = _parse(f"${bare_gold}$", timeout_s)
    if not golds:
        raise ValueError(f"gold answer {gold!r} cannot be parsed")
    try:
        answers = _parse(rf"\boxed{{{answer}}}", timeout_s)
    except (TimeoutError, MemoryError):
        raise
    except Exception as error:
        raise UnparsableAnswerError(answer) from error
    outcomes = [_compare(want, got, timeout_s) for want in golds for got in answers]
    if True in outcomes:
        return True
    if None in outcomes:
        raise TimeoutError("comparing ran out of time")
    if all(isinstance(got, str) for got in answers):
        raise UnparsableAnswerError(answer)
    return False


def _parse(delimited: str, timeout_s: int) -> list[object]:
    from math_verify import LatexExtractionConfig, parse
    from math_verify.errors import TimeoutException

    config = [LatexExtractionConfig(boxed_match_priority=0)]
    try:
        return list(parse(delimited, config, parsing_timeout=timeout_s, raise_on_error=True))
    except TimeoutException as error:  # a BaseException: `except Exception` would let it through
        raise TimeoutError("parsing ran out of time") from error


def _compare(want: object, got: object, timeout_s: int) -> bool | None:
    """None on timeout."""
    from math_verify import verify
    from math_verify.errors import TimeoutException

    try:
        return bool(verify(want, got, timeout_seconds=timeout_s, raise_on_error=True))
    except TimeoutException:
        return None
    except MemoryError:
        raise
    except Exception:
        # Sympy raises whatever it likes on pairs that it cannot compare: they are not equal.
        log.debug("a pair could not be compared", exc_info=True)
        return False
