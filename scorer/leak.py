"""Gold answers within prefixes: advice that tells the answer teaches the target nothing. Pure."""

import re
from fractions import Fraction

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:/\d+)?")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
LEAST_LETTERS = 2
"""A word of fewer letters stands in almost every text: a single letter counts only as it is written, alone."""


def holds_gold(text: str, gold: str) -> bool:
    """Return True if a text has the gold answer as a number or as whole words.

    A number is compared by its value, so that 1,200 and 1200.0 are the same. Other answers are
    compared without regard to case and spaces, and must not be a part of a longer word.
    """
    gold = " ".join(gold.split())
    if not gold:
        return False
    if (value := _value(gold)) is not None:
        return value in map(_value, _NUMBER.findall(_THOUSANDS.sub("", text)))
    is_letter = len(gold) < LEAST_LETTERS
    words = " ".join(text.split())
    flags = re.NOFLAG if is_letter else re.IGNORECASE
    return re.search(rf"(?<!\w){re.escape(gold)}(?!\w)", words, flags) is not None


def _value(number: str) -> Fraction | None:
    try:
        return Fraction(_THOUSANDS.sub("", number).strip("$ "))
    except (ValueError, ZeroDivisionError):
        return None
