r"""Comparison of an answer with the gold answer: exact where possible, else by math-verify."""

import re
import time
from collections.abc import Iterable
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate

import msgspec

from prefixrl.common.prompts.extract import MAX_ANSWER_CHARS
from prefixrl.common.wire.messages.groups import Fault, VerdictStatus
from prefixrl.scorer.verifier.rules import guards, symbols
from prefixrl.scorer.verifier.rules.arithmetic import Rational, are_equal, read_rational
from prefixrl.scorer.verifier.rules.equations import Claim, claims
from prefixrl.scorer.verifier.rules.looks import TABLES, normalise, tidied
from prefixrl.scorer.verifier.rules.relations import as_sets
from prefixrl.scorer.verifier.rules.time_limit import time_limit
from prefixrl.scorer.verifier.rules.units import without_unit
from prefixrl.scorer.verifier.rules.words import (
    choice_of,
    is_choice,
    is_same_moment,
    loose_text,
    words_of,
)


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
    parts: dict[str, float] = {}
    """Numbers that a user's function gave besides the reward, by name."""


class UnparsableAnswerError(ValueError):
    """The answer is not a mathematical expression and not literally the gold answer."""


class GoldError(ValueError):
    """The gold answer is not a mathematical expression that math-verify reads."""


def judge_exactly(gold: str, extracted: str) -> Judgement | None:
    """Return the verdict if it needs no sympy, else None."""
    is_right = settle_exactly(gold, extracted)
    if is_right is None:
        return None
    status: VerdictStatus = "parse_fail" if not is_right and is_refused(extracted) else "ok"
    return Judgement(float(is_right), status, extracted[:MAX_ANSWER_CHARS])


_ROUNDED = re.compile(r"-?\d*\.\d{6,}")
_IN_BASE = re.compile(r"\(?(?=[0-9A-F.]*\d)[0-9A-F.]+\)?_\w+")


def settle_exactly(gold: str, answer: str) -> bool | None:
    """Return True if the answer is the gold answer, None if strings and numbers cannot decide.

    Refused answers (`is_refused`) are wrong unless literally the gold answer. Numbers in a base other than ten and the
    letters of multiple choice are compared as written. Unequal numbers are wrong, however small the difference.
    """
    if len(answer) > MAX_ANSWER_CHARS:
        return answer.strip() == gold.strip()
    want, got = normalise(gold), normalise(answer)
    if want == got:
        return bool(got)
    if is_refused(answer) or _IN_BASE.fullmatch(want):
        return False
    if (plain := _settle_plainly(tidied(gold), tidied(answer))) is not None:
        return plain
    parts = _claims(gold, answer)
    if parts != [Claim(tidied(gold), tidied(answer))]:
        return _all(map(_settle, parts))
    return _settle_values(_value(gold, gold), _value(answer, gold))


def _claims(gold: str, answer: str) -> list[Claim]:
    """Return all that must hold if the answer is right; for a wrong form, what never does."""
    both = as_sets(tidied(gold), tidied(answer))
    return (claims(*both) if both else None) or [Claim("0", "1")]


def _all(verdicts: Iterable[bool | None]) -> bool | None:
    known = list(verdicts)
    return False if False in known else None if None in known else True


def _value(text: str, gold: str) -> str:
    return without_unit(tidied(text), gold, is_gold=text == gold)


def _settle_plainly(gold: str, answer: str) -> bool | None:
    """Compare words, choices, dates and single letters, which are no expressions."""
    if is_choice(gold) and (choice := choice_of(answer)) is not None:
        return choice == choice_of(gold)
    if (words := words_of(gold)) is not None:
        return words == words_of(answer)
    if len(normalise(gold)) == len(normalise(answer)) == 1 and normalise(gold).isalpha():
        return False
    return is_same_moment(gold, answer)


def _settle_values(gold: str, answer: str) -> bool | None:
    want, got = normalise(gold), normalise(answer)
    if want == got:
        return bool(got)
    if loose_text(gold, answer) or (guards.free_letters(answer) and not guards.free_letters(gold)):
        return False
    want_number = read_rational(want)
    is_number = want_number is not None and want_number.is_evaluated
    # A decimal of many places stands for an exact value, which may be given instead.
    is_rounded = _ROUNDED.fullmatch(want) is not None
    if guards.leaves_undone(want, got, is_number and not is_rounded) or guards.differs_in_kind(
        want, got, is_number
    ):
        return False
    if read_rational(got) is None and guards.lists_more(want, got):
        return False
    if guards.has_numbers_side_by_side(got):
        return False
    if want_number is not None:
        return _is_number(want_number, got)
    wanted, given = guards.tuple_elements(want), guards.tuple_elements(got)
    if not wanted or not given:
        return are_equal(want, got)
    if len(wanted) != len(given) or (want[0], want[-1]) != (got[0], got[-1]):
        return False
    return _all(map(settle_exactly, wanted, given))


def _settle(claim: Claim) -> bool | None:
    """Settle one claim; sides that must only be equal need not be evaluated."""
    if not claim.is_side:
        return settle_exactly(claim.want, claim.got)
    want, got = normalise(_value(claim.want, claim.got)), normalise(_value(claim.got, claim.want))
    return True if want == got else are_equal(want, got)


def _is_number(want: Rational, answer: str) -> bool | None:
    """Compare numbers; an unevaluated one is no answer."""
    got = read_rational(answer)
    if got is None:
        return None
    if want.is_evaluated and not got.is_evaluated:
        return False
    return got.value == want.value or (None if want.is_grouped or got.is_grouped else False)


def is_settled_without_sympy(gold: str) -> bool:
    """Return True if the gold answer is a number or a choice, which the exact path can read."""
    text = normalise(gold)
    return (
        read_rational(text) is not None or _IN_BASE.fullmatch(text) is not None or is_choice(gold)
    )


_MAX_NESTING = 50
_HOSTILE = re.compile(TABLES["hostile"], re.VERBOSE)


def is_refused(answer: str) -> bool:
    """Return True if an answer must not be parsed: short inputs may cost minutes or gigabytes."""
    if len(answer) <= _MAX_NESTING and "^" not in answer and "!" not in answer:
        return False
    depths = accumulate((char in "([{") - (char in ")]}") for char in answer)
    return (
        len(answer) > MAX_ANSWER_CHARS
        or max(depths) > _MAX_NESTING
        or _HOSTILE.search(answer) is not None
    )


def verify_with_sympy(gold: str, answer: str, timeout_s: float) -> bool:
    r"""Ask math-verify, in the main thread of a process that can be killed.

    The limit uses SIGALRM, which some of sympy's loops ignore. Answers are read as LaTeX only, and whole. Raises
    TimeoutError, GoldError, or UnparsableAnswerError where nothing matched and the answer is not an expression.
    """
    deadline = time.monotonic() + timeout_s
    _read_in_time(gold, timeout_s)
    parts = _claims(gold, answer)
    is_whole = parts == [Claim(tidied(gold), tidied(answer))]  # the exact path has left it open
    with time_limit(deadline - time.monotonic()):
        return all(
            _is_equal(part) if is_whole or (known := _settle(part)) is None else known
            for part in parts
        )


def is_readable(gold: str, timeout_s: float) -> bool:
    """Return True if the gold answer is words, or an expression that is equal to itself.

    Raises as `verify_with_sympy` does.
    """
    deadline = time.monotonic() + timeout_s
    parts = [part.want for part in _claims(gold, gold)]
    # "3:00" may be a ratio too, so that by itself it is not settled as a time.
    asked = [
        want
        for want in parts
        if not _settle_plainly(want, want) and not is_same_moment(want, f"{want} am")
    ]
    for want in asked:
        _read_in_time(want, deadline - time.monotonic())
    with time_limit(deadline - time.monotonic()):
        return all(map(_is_itself, asked))


def _is_itself(gold: str) -> bool:
    # A text is equal to itself always: only an expression shows that the gold answer was read.
    expressions = [each for each in _read_gold(gold) if not isinstance(each, str)]
    if not expressions:
        raise UnparsableAnswerError(gold)
    return any(symbols.are_equal(each, each) for each in expressions)


def _is_equal(claim: Claim) -> bool:
    golds, answers = _read_gold(claim.want), symbols.read(_value(claim.got, claim.want))
    places = claim.want.partition(".")[2]
    margin = (
        Fraction(1, 2 * 10 ** len(places)) if claim.is_side and places.isdigit() else Fraction(0)
    )
    if any(symbols.are_equal(want, got, margin) for want in golds for got in answers):
        return True
    if all(isinstance(got, str) for got in answers):
        raise UnparsableAnswerError(claim.got)
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
        readings = symbols.read(_value(gold, gold))
    except Exception as error:
        raise GoldError(f"gold answer {gold!r:.200} cannot be parsed: {error}") from error
    if not readings:
        raise GoldError(f"gold answer {gold!r:.200} cannot be parsed")
    return readings
