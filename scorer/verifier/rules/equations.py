r"""Sides of an equation: the answer, and those that must be names or equal to it. Pure.

x = 2+2 = 4          4, if x is a name and 2+2 is 4
x^2-5x+6 = 0         nothing: an equation that is not solved
\pi\approx3.14       \pi if the gold answer is exact, else 3.14: both agree to the digits given
x = 1, y = 2         the pair (1,2)
"""

import re
from typing import NamedTuple

from prefixrl.scorer.verifier.rules.arithmetic import read_rational
from prefixrl.scorer.verifier.rules.guards import (
    PATTERNS,
    free_letters,
    listed,
    split_at,
    tuple_elements,
)
from prefixrl.scorer.verifier.rules.words import is_word


class Claim(NamedTuple):
    """Two texts that must agree for an answer to be right."""

    want: str
    got: str
    is_side: bool = False
    """True if `got` is another side, which may be a sum not carried out, and agrees to the digits of `want`."""


def claims(want: str, got: str) -> list[Claim] | None:
    """Return all that must hold if the answer is right; None if it is wrong for its form.

    Spaces matter as far as a parser needs them. The pair itself is returned where there is nothing to take apart.
    """
    left, right = _tuple_of(want), _tuple_of(got)
    if (
        left
        and right
        and (left[0] or right[0])
        and (left[0] == right[0] or not left[0] or not right[0])
    ):
        return [Claim(left[1], right[1])]
    wanted, given = _sides(want), _sides(got)
    if len(wanted) > 1:
        return _of_equation(want, wanted, got, given)
    if len(given) > 1:
        return _of_chain(want, given, got)
    if "=" not in got or tuple_elements(compact(got)):
        return [Claim(want, got)]
    parts = [_sides(each) for each in listed(got)]
    is_solved = all(is_name(side, want) for sides in parts for side in sides[:-1])
    return [Claim(want, ",".join(sides[-1] for sides in parts))] if is_solved else None


def is_name(side: str, gold: str) -> bool:
    """Return True if a side only says what the value is of: f(2) does, f(x) for a gold answer with letters alone."""
    text = PATTERNS["bars"].sub(r"\1\2", _called(PATTERNS["label"].sub("TEXT", compact(side))))
    if elements := tuple_elements(text):
        return all(map(PATTERNS["symbol"].fullmatch, elements))
    found = PATTERNS["name"].fullmatch(text)
    if found is None or PATTERNS["denies"].search(side):
        return False
    functions, head, power, given = found.groups()
    if functions:
        is_unknown = PATTERNS["trigonometric"].match(text) and re.search(
            r"(?<![\\a-z])[a-z]", head + given
        )
        return bool(head or given) and not is_unknown
    is_one = (
        len(head) == 1 or head[:1] == "\\" or head.isupper() or (len(head) > 2 and is_word(head))
    )
    if not is_one or head.isdigit() or (power and not head[1:].isupper()):
        return False
    return {each for each in free_letters(given) if each.islower()} - set("fgh") <= free_letters(
        gold
    ) - {head}


def _is_quantity(side: str, want: str) -> bool:
    text, value = compact(side), read_rational(compact(want))
    if text.startswith((r"\sin", r"\cos")) and value is not None and abs(value.value) > 1:
        return False
    terms = re.split("[-+]", text)
    is_sum = PATTERNS["sum"].fullmatch(text) is not None and len(set(terms)) == len(terms)
    return is_name(side, want) or (is_sum and value is not None and value.value > 0)


def _sides(text: str) -> list[str]:
    """Return the sides of one equation; lists have only themselves."""
    is_list = len(listed(text)) > 1 and not re.match(r"\([a-zA-Z\\,_\d]*\)=", compact(text))
    return [text] if is_list else split_at(PATTERNS["approximately"].sub("=", text), "=")


def _of_equation(want: str, wanted: list[str], got: str, given: list[str]) -> list[Claim] | None:
    r"""Compare with the right side of a gold answer `name = value`."""
    turned = wanted[::-1] if len(wanted) == 2 and not is_name(wanted[0], wanted[0]) else wanted
    name, value = _called(turned[0]), turned[-1]
    if len(wanted) != 2 or not is_name(turned[0], turned[0]):
        return [Claim(want, got)]
    others = [side for side in given if _called(side) != name]
    if len(given) == 1 or len(others) < len(given):
        return _of_chain(value, [wanted[0], *others], got) if others else None
    return None if "'" in name + _called(given[0]) else [Claim(want, got)]


def _of_chain(want: str, given: list[str], got: str) -> list[Claim] | None:
    """Return the last side as the answer; those before are names or equal to it."""
    *sides, last = given
    if is_name(last, want) and not is_name(sides[0], want) and compact(last) != compact(want):
        last, *sides = sides[-1], *sides[:-1]  # "5=y"
    if last != want and last.casefold() == want.casefold():
        return None
    others = [side for side in sides if not _is_quantity(side, want)]
    if not free_letters(want) and any(map(free_letters, others)):
        return None
    if others and PATTERNS["approximately"].search(got) and "." not in want:
        return [Claim(want, others[-1]), *(Claim(last, side, True) for side in others)]
    return [Claim(want, last), *(Claim(last, side, True) for side in others)]


def _called(side: str) -> str:
    r"""Return a name as compared: `\frac{dy}{dx}` is `y'`, styles of letters do not count."""
    name = re.sub(r"\\frac\{d(\\?[a-zA-Z]+)\}\{d[a-zA-Z]\}", r"\1'", compact(side))
    return PATTERNS["style"].sub(r"\1\2", re.sub(r"\^\{?\\prime\}?", "'", name))


def _tuple_of(text: str) -> tuple[list[str], str] | None:
    """Return `y=2, x=1` as names and values by the alphabet: x, y and (1,2); a tuple has no names."""
    if tuple_elements(compact(text)):
        return [], text
    pairs = [split_at(part.strip(), "=") for part in listed(PATTERNS["gap"].sub(",", text))]
    if len(pairs) < 2 or any(
        len(pair) != 2 or not PATTERNS["symbol"].fullmatch(compact(pair[0])) for pair in pairs
    ):
        return None
    values = {compact(name): value for name, value in pairs}
    names = sorted(values)
    return (
        (names, "(" + ",".join(values[name] for name in names) + ")")
        if len(values) == len(pairs)
        else None
    )


def compact(text: str) -> str:
    """Remove the spaces."""
    return "".join(text.split())
