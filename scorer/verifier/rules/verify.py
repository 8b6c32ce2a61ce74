r"""Comparison of an answer with the gold answer: exact where possible, else by math-verify."""

import time
from fractions import Fraction
from functools import lru_cache

import msgspec

from prefixrl.common.prompts.extract import MAX_ANSWER_CHARS
from prefixrl.common.wire.messages.groups import Fault, VerdictStatus
from prefixrl.scorer.verifier.rules import symbols
from prefixrl.scorer.verifier.rules.equations import Claim
from prefixrl.scorer.verifier.rules.exact import (
    claims_of,
    is_refused,
    settle_claim,
    settle_exactly,
    settle_plainly,
    value_of,
)
from prefixrl.scorer.verifier.rules.looks import tidy_text
from prefixrl.scorer.verifier.rules.words import is_same_moment
from prefixrl.scorer.verifier.time_limit import time_limit

SYMPY_RULE = "math-verify"
"""Name of the rule of a verdict that sympy gave."""


class Judgement(msgspec.Struct, frozen=True, tag=True):
    """The verdict on one answer. Read `status` before `reward`."""

    reward: float
    """1.0 right, 0.0 wrong; meaningless where the status is `error`."""
    status: VerdictStatus
    """`ok`: judged. `no_answer`, `parse_fail`, `timeout`: wrong answers, by kind. `error`: nothing
    is known, since the verifier failed twice: a reader excludes the row from its group; it must
    never count as reward 0."""
    extracted: str | None
    """The answer judged, cut to MAX_ANSWER_CHARS; None without an answer; the reason where the status is `error`."""
    fault: Fault = ""
    """The kind of failure where status is `error`."""
    parts: dict[str, float] = {}
    """Numbers that a user's function gave besides the reward, by name."""
    rule: str = ""
    """The name of what decided: a rule of `exact.py`, `math-verify`, `question` (the answer repeats
    it), `code` (the sandbox), `function`, `server`, or another verifier; after a colon the rule for
    a part. "" if nothing was compared: no answer, or no verdict."""


class UnparsableAnswerError(ValueError):
    """The answer is not a mathematical expression and not literally the gold answer."""


class GoldError(ValueError):
    """The gold answer is not a mathematical expression that math-verify reads."""


def judge_exactly(gold: str, extracted: str) -> Judgement | None:
    """Return the verdict if it needs no sympy, else None."""
    decision = settle_exactly(gold, extracted)
    if decision.is_right is None:
        return None
    is_unread = not decision.is_right and is_refused(extracted)
    status: VerdictStatus = "parse_fail" if is_unread else "ok"
    return Judgement(
        float(decision.is_right), status, extracted[:MAX_ANSWER_CHARS], rule=decision.rule
    )


def verify_with_sympy(gold: str, answer: str, timeout_s: float) -> bool:
    r"""Ask math-verify, in the main thread of a process that can be killed.

    The limit uses SIGALRM, which some of sympy's loops ignore. Answers are read as LaTeX only, and
    whole. Raises TimeoutError, GoldError, or UnparsableAnswerError where nothing matched and the
    answer is not an expression.
    """
    deadline = time.monotonic() + timeout_s
    _read_in_time(gold, timeout_s)
    parts = claims_of(gold, answer)
    # The pair itself: the rules have left it open already.
    is_whole = parts == [Claim(tidy_text(gold), tidy_text(answer))]
    with time_limit(deadline - time.monotonic()):
        return all(_holds(part, is_open=is_whole) for part in parts)


def _holds(claim: Claim, is_open: bool) -> bool:
    is_right = None if is_open else settle_claim(claim).is_right
    return _is_equal(claim) if is_right is None else is_right


def is_readable(gold: str, timeout_s: float) -> bool:
    """Return True if the gold answer is words, or an expression that is equal to itself.

    Raises as `verify_with_sympy` does.
    """
    deadline = time.monotonic() + timeout_s
    # "3:00" may be a ratio too, so that by itself it is not settled as a time.
    expressions = [
        claim.gold
        for claim in claims_of(gold, gold)
        if not settle_plainly(claim.gold, claim.gold)
        and not is_same_moment(claim.gold, f"{claim.gold} am")
    ]
    for expression in expressions:
        _read_in_time(expression, deadline - time.monotonic())
    with time_limit(deadline - time.monotonic()):
        return all(map(_is_equal_to_itself, expressions))


def _is_equal_to_itself(gold: str) -> bool:
    # A text is equal to itself always: only an expression shows that the gold answer was read.
    expressions = [reading for reading in _read_gold(gold) if not isinstance(reading, str)]
    if not expressions:
        raise UnparsableAnswerError(gold)
    return any(symbols.are_equal(reading, reading) for reading in expressions)


def _is_equal(claim: Claim) -> bool:
    gold_readings = _read_gold(claim.gold)
    answer_readings = symbols.read_expression(value_of(claim.answer, claim.gold))
    # A side must agree to the digits that the answer gives.
    decimals = claim.gold.partition(".")[2]
    is_rounded = claim.is_side and decimals.isdigit()
    margin = Fraction(1, 2 * 10 ** len(decimals)) if is_rounded else Fraction(0)
    for gold in gold_readings:
        for answer in answer_readings:
            if symbols.are_equal(gold, answer, margin):
                return True
    if all(isinstance(reading, str) for reading in answer_readings):
        raise UnparsableAnswerError(claim.answer)
    return False


def _read_in_time(gold: str, timeout_s: float) -> None:
    try:
        with time_limit(timeout_s):
            _read_gold(gold)
    except TimeoutError as error:
        raise GoldError(f"gold answer {gold!r:.200} cannot be parsed: {error}") from error


@lru_cache(maxsize=1024)
def _read_gold(gold: str) -> tuple[object, ...]:
    """Parse a gold answer, once: at most an expression and its text; raises GoldError."""
    try:
        readings = symbols.read_expression(value_of(gold, gold))
    except Exception as error:
        raise GoldError(f"gold answer {gold!r:.200} cannot be parsed: {error}") from error
    if not readings:
        raise GoldError(f"gold answer {gold!r:.200} cannot be parsed")
    return readings
