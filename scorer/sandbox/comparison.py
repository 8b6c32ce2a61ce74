"""Comparison of what a program printed or returned with what is expected. Pure.

Whole numbers and strings of digits are met exactly, so that no almost right program is right;
floats up to rounding.
"""

import json
import math
import re
from contextlib import suppress
from fractions import Fraction
from functools import partial
from itertools import product
from typing import Any

RELATIVE = 1e-9
"""Default rounding of a float, as a share of the number."""
TINY, OF_WHOLE = Fraction(1, 10**12), Fraction(1, 10**6)
"""Least rounding, and most rounding of a whole number. Fractions: a number with hundreds of digits is not a float."""
MOST_CHARS = 400
"""Longest text that is read as a number."""

_WHOLE = re.compile(r"-?(?:0|[1-9]\d*)", re.ASCII)
_FLOAT = re.compile(r"[+-]?(?:\d+\.\d*|\.\d+|\d+(?=e))(?:e[+-]?\d+)?", re.ASCII | re.IGNORECASE)


def is_rounded(text: str, number: Fraction, relative: float = RELATIVE) -> bool:
    """Return True if a text writes a number as a float, up to rounding."""
    if (
        len(text) > MOST_CHARS
        or not _FLOAT.fullmatch(text)
        or not math.isfinite(near := float(text))
    ):
        return False
    return _is_near(Fraction(near), number, relative)


def _is_near(got: Fraction, number: Fraction, relative: float) -> bool:
    # Contests name an absolute or relative difference.
    slack = max(
        Fraction(str(relative)) * abs(number),
        Fraction(str(relative)) if relative > RELATIVE else TINY,
    )
    return abs(got - number) <= (min(slack, OF_WHOLE) if number.denominator == 1 else slack)


def is_printed(stdout: str, expected: Any, relative: float = RELATIVE) -> bool:
    """Return True if equal line by line, or word by word up to the rounding of floats."""
    expected_text = "\n".join(map(str, expected)) if isinstance(expected, list) else str(expected)
    lines, expected_lines = (
        [line.strip() for line in text.strip().splitlines()] for text in (stdout, expected_text)
    )
    if lines == expected_lines:
        return True
    words = " ".join(lines).split()
    expected_words = " ".join(expected_lines).split()
    is_as_long = len(lines) == len(expected_lines) and len(words) == len(expected_words)
    return is_as_long and all(map(partial(_is_word, relative), words, expected_words))


def _is_word(relative: float, got: str, want: str) -> bool:
    if got == want or len(want) > MOST_CHARS:
        return got == want
    if _WHOLE.fullmatch(want):
        return is_rounded(got, Fraction(int(want)), relative)
    if not _FLOAT.fullmatch(want) or not math.isfinite(float(want)):
        return False
    return is_rounded(f"{got}." if _WHOLE.fullmatch(got) else got, Fraction(float(want)), relative)


def is_returned(stdout: str, expected: Any, relative: float = RELATIVE) -> bool:
    """Return True if the JSON of a value is the expected one, or what its text says in JSON."""
    choices = [expected]
    if isinstance(expected, str):
        with suppress(ValueError, RecursionError):
            choices.append(json.loads(expected))
    try:
        got = json.loads(stdout)
        # Some sets wrap each output in a list of one.
        return str(got) == expected or any(
            _is_equal(relative, *pair) for pair in product((got, [got]), choices)
        )
    except (ValueError, RecursionError):  # a program may print brackets within brackets without end
        return False


def _is_equal(relative: float, got: Any, want: Any) -> bool:
    if isinstance(got, list) and isinstance(want, list):
        return len(got) == len(want) and all(map(partial(_is_equal, relative), got, want))
    if isinstance(got, dict) and isinstance(want, dict):
        return got.keys() == want.keys() and all(
            _is_equal(relative, got[key], want[key]) for key in want
        )
    if isinstance(got, bool) is not isinstance(want, bool):
        return False  # True is not 1, though Python finds them equal
    floats = [number for number in (got, want) if isinstance(number, float)]
    if (
        floats
        and all(map(math.isfinite, floats))
        and isinstance(got, int | float)
        and isinstance(want, int | float)
    ):
        return _is_near(Fraction(got), Fraction(want), relative)
    return bool(got == want)
