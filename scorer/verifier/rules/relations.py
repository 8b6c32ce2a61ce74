r"""Inequalities as the sets that they describe, if a lone symbol stands on one side. Pure.

x<-1\text{ or }x>1    (-\infty,-1)\cup(1,\infty)
2\le x<5              [2,5)
x^2<4, 0<1, x<x+1     no set: not solved, or true for every x
"""

import re
from typing import NamedTuple

from prefixrl.scorer.verifier.rules.guards import GREEK, OR, split_outside_brackets

MARKS = r"(?:_\{[^{}=]*\}|_\\?[A-Za-z0-9]+|\^\{-1\}|\^\{?(?:T|\*|\\prime|\\circ)\}?|')*"
"""Behind a letter: an index, an inverse, a prime and the like."""
SYMBOL = re.compile(rf"(?:[A-Za-z]|{GREEK}){MARKS}")
"""One letter with marks."""

_MAY_BE_RELATION = re.compile(r"[<>]|!=|\\[lgni]")
_SIGN = re.compile(r"\\([lg]eq?(?:slant)?|lt|gt|neq?|in)(?![a-zA-Z])|([<>]=|(?<![\d)}])!=)")
_SIGNS = {
    "le": "≤",
    "ge": "≥",
    "lt": "<",
    "gt": ">",
    "ne": "≠",
    "in": "∈",
    "<=": "≤",
    ">=": "≥",
    "!=": "≠",
}
_TURNED = str.maketrans(">≥", "<≤")


class _Range(NamedTuple):
    """A set of numbers and the symbol that lies in it."""

    symbol: str
    text: str


def as_sets(gold: str, answer: str) -> tuple[str, str] | None:
    """Return both with inequalities as sets; None if the answer is an inequality that is not solved."""
    if not _MAY_BE_RELATION.search(gold + answer):
        return gold, answer
    gold_set = _set_of(gold)
    answer_set = _set_of(answer)
    if gold_set is None and len(_sides(gold)) > 1:
        return gold, answer  # the gold answer is itself not solved: compared as written
    if answer_set is None:
        is_solved = len(_sides(answer)) == 1
    else:
        is_solved = gold_set is None or gold_set.symbol == answer_set.symbol
    if not is_solved:
        return None
    return gold_set.text if gold_set else gold, answer_set.text if answer_set else answer


def _set_of(text: str) -> _Range | None:
    """Return the set that a relation describes; None for a relation that is not solved."""
    parts = split_outside_brackets(OR.sub(";", text), ";")
    ranges = [_range_of(_sides(part)) for part in parts]
    symbols = {part.symbol if part else None for part in ranges}
    if ranges[0] is None or len(symbols) != 1:
        return None
    return _Range(ranges[0].symbol, r"\cup".join(part.text for part in ranges if part))


def _range_of(sides: list[str]) -> _Range | None:
    """Return the set of one relation, given as sides with the signs between them."""
    if set(sides[1::2]) <= {">", "≥"}:
        sides = [side.translate(_TURNED) for side in reversed(sides)]
    if len(sides) == 3 and sides[1] in "∈≠" and SYMBOL.fullmatch(sides[0]):
        symbol, sign, value = sides
        outside = rf"(-\infty,{value})\cup({value},\infty)"
        return _Range(symbol, value if sign == "∈" else outside)
    if len(sides) == 3:  # one bound: the other is infinite
        is_upper = SYMBOL.fullmatch(sides[0])
        sides = [r"-\infty", "<", *sides] if is_upper else [*sides, "<", r"\infty"]
    if len(sides) != 5:
        return None
    low, low_sign, symbol, high_sign, high = sides
    if not {low_sign, high_sign} <= {"<", "≤"} or not SYMBOL.fullmatch(symbol):
        return None
    # The symbol in its own bounds: not solved.
    if re.search(rf"(?<![\\a-zA-Z]){re.escape(symbol)}(?![a-zA-Z])", f"{low} {high}"):
        return None
    opening = "[" if low_sign == "≤" else "("
    closing = "]" if high_sign == "≤" else ")"
    return _Range(symbol, f"{opening}{low},{high}{closing}")


def _sides(text: str) -> list[str]:
    """Return the sides of a relation and the signs between them."""
    text = _SIGN.sub(lambda match: _SIGNS[(match[1] or match[2])[:2]], text)
    parts = split_outside_brackets(re.sub("[<>≤≥≠∈]", "\0\\g<0>\0", text), "\0")
    return [part.replace("\0", "").strip() for part in parts]
