r"""Sides of an equation: the answer, and the sides that must be names or equal to it. Pure.

x = 2+2 = 4          4, if x is a name and 2+2 is 4
x^2-5x+6 = 0         nothing: an equation that is not solved
\pi\approx3.14       \pi if the gold answer is exact, else 3.14: both agree to the digits given
x = 1, y = 2         the pair (1,2)
"""

import re
from typing import NamedTuple

from prefixrl.scorer.verifier.rules.arithmetic import read_rational
from prefixrl.scorer.verifier.rules.guards import (
    GREEK,
    free_letters,
    list_values,
    split_outside_brackets,
    tuple_elements,
)
from prefixrl.scorer.verifier.rules.relations import MARKS, SYMBOL
from prefixrl.scorer.verifier.rules.words import is_word

_APPROXIMATELY = re.compile(r"\\(?:approx|approxeq|simeq|doteq)(?![a-zA-Z])|≈")


class Claim(NamedTuple):
    """Two texts that must agree for an answer to be right."""

    gold: str
    answer: str
    is_side: bool = False
    """True if `answer` is another side, which may be a sum not carried out, and agrees to the digits of `gold`."""


def claims(gold: str, answer: str) -> list[Claim] | None:
    """Return all that must hold if the answer is right; None if it is wrong for its form.

    Spaces matter as far as a parser needs them. The pair itself is returned where there is nothing
    to take apart.
    """
    gold_tuple = _tuple_of(gold)
    answer_tuple = _tuple_of(answer)
    if gold_tuple and answer_tuple and gold_tuple.agrees_in_names(answer_tuple):
        return [Claim(gold_tuple.text, answer_tuple.text)]
    gold_sides = _sides(gold)
    answer_sides = _sides(answer)
    if len(gold_sides) > 1:
        return _claims_of_equation(gold, gold_sides, answer, answer_sides)
    if len(answer_sides) > 1:
        return _claims_of_chain(gold, answer_sides, answer)
    if "=" not in answer or tuple_elements(without_spaces(answer)):
        return [Claim(gold, answer)]
    # A list of equations: "x=1 or x=2".
    equations = [_sides(part) for part in list_values(answer)]
    is_solved = all(is_name(side, gold) for sides in equations for side in sides[:-1])
    return [Claim(gold, ",".join(sides[-1] for sides in equations))] if is_solved else None


# --- names ----------------------------------------------------------------------------------------

_TEXT_LABEL = re.compile(r"(?:\\(?:text|mathrm|mathit|operatorname)\{[^{}\d=]*\}~?)+[A-Za-z]*")
_BARS = re.compile(r"\\?\|(.*[^xy|\\].*?)\\?\||\[([A-Z]{3,})\]")
r"""The length `|AB|` and the area `[ABC]`; the absolute value of x or y is not solved."""
_TRIGONOMETRIC = r"\\(?:sin|cos|tan|cot|sec|csc)"
_BEGINS_TRIGONOMETRIC = re.compile(_TRIGONOMETRIC)
_FUNCTION = (
    rf"(?:{_TRIGONOMETRIC}|\\(?:det|dim|deg|gcd|lcm|min|max|arg|ker|Pr|Re|Im)"
    r"|m?\\(?:angle|triangle|square|measuredangle))"
)
_ARGUMENTS = r"(?:\((?:[^()]|\([^()]*\))*\)|\[[^\[\]]*\]|\{[^{}]*\})"
# A name with marks, of one thing: what a value may be the value of.
_NAME = re.compile(
    rf"(?P<functions>(?:{_FUNCTION}(?:{MARKS}|\^\{{?\d\}}?)~?)*)"
    rf"(?P<head>[A-Za-z]+|{GREEK}|\d+|){MARKS}"
    rf"(?P<power>(?:\^\{{?\d\}}?)?)"
    rf"(?P<arguments>{_ARGUMENTS}?)"
)
_DENIES = re.compile(r"(?<![a-z])(?:not|wrong|false|never)(?![a-z])", re.IGNORECASE)
_SMALL_LETTER = re.compile(r"(?<![\\a-z])[a-z]")
_FUNCTION_LETTERS = frozenset("fgh")


def is_name(side: str, gold: str) -> bool:
    """Return True if a side only says what the value is of: f(2) does, f(x) for a gold answer with letters alone."""
    text = _TEXT_LABEL.sub("TEXT", without_spaces(side))
    text = _BARS.sub(r"\1\2", _compared_name(text))
    if elements := tuple_elements(text):
        return all(map(SYMBOL.fullmatch, elements))
    match = _NAME.fullmatch(text)
    if match is None or _DENIES.search(side):
        return False
    functions, head, power, arguments = match.groups()
    if functions:
        # The sine of an unknown letter is an equation that is not solved.
        is_unsolved = _BEGINS_TRIGONOMETRIC.match(text) and _SMALL_LETTER.search(head + arguments)
        return bool(head or arguments) and not is_unsolved
    is_word_of_letters = len(head) > 2 and is_word(head)
    is_one_thing = len(head) == 1 or head[:1] == "\\" or head.isupper() or is_word_of_letters
    if not is_one_thing or head.isdigit() or (power and not head[1:].isupper()):
        return False
    unknowns = {letter for letter in free_letters(arguments) if letter.islower()}
    return unknowns - _FUNCTION_LETTERS <= free_letters(gold) - {head}


_SUM_OF_LETTERS = re.compile(r"(?:[a-wA-W]|[A-Z]{2})(?:[-+](?:[a-wA-W]|[A-Z]{2}))+")


def _is_quantity(side: str, gold: str) -> bool:
    """Return True for a name, and for a sum of different letters beside a positive number: `p+q`."""
    text = without_spaces(side)
    number = read_rational(without_spaces(gold))
    if text.startswith((r"\sin", r"\cos")) and number is not None and abs(number.value) > 1:
        return False
    if is_name(side, gold):
        return True
    terms = re.split("[-+]", text)
    is_sum = _SUM_OF_LETTERS.fullmatch(text) is not None and len(set(terms)) == len(terms)
    return is_sum and number is not None and number.value > 0


_STYLE = re.compile(
    r"\\(?:vec|mathbf|boldsymbol|bm|hat|widehat|bar|overline|overrightarrow|tilde|mathcal|mathbb"
    r"|mathrm|mathit|d?dot)(?:\{([^{}]*)\}|(\\?[a-zA-Z]+))"
)
_LEIBNIZ = re.compile(r"\\frac\{d(\\?[a-zA-Z]+)\}\{d[a-zA-Z]\}")
_PRIME_MARK = re.compile(r"\^\{?\\prime\}?")


def _compared_name(side: str) -> str:
    r"""Return a name as compared: `\frac{dy}{dx}` is `y'`, styles of letters do not count."""
    name = _LEIBNIZ.sub(r"\1'", without_spaces(side))
    return _STYLE.sub(r"\1\2", _PRIME_MARK.sub("'", name))


# --- sides ----------------------------------------------------------------------------------------

_TUPLE_OF_NAMES = re.compile(r"\([a-zA-Z\\,_\d]*\)=")


def _sides(text: str) -> list[str]:
    """Return the sides of one equation; lists have only themselves."""
    if len(list_values(text)) > 1 and not _TUPLE_OF_NAMES.match(without_spaces(text)):
        return [text]
    return split_outside_brackets(_APPROXIMATELY.sub("=", text), "=")


def _claims_of_equation(
    gold: str, gold_sides: list[str], answer: str, answer_sides: list[str]
) -> list[Claim] | None:
    r"""Compare with the right side of a gold answer `name = value`."""
    if len(gold_sides) != 2:
        return [Claim(gold, answer)]
    gold_left, gold_right = gold_sides
    # "3 = x" is turned round.
    name_side, value = (
        (gold_left, gold_right) if is_name(gold_left, gold_left) else (gold_right, gold_left)
    )
    if not is_name(name_side, name_side):
        return [Claim(gold, answer)]
    name = _compared_name(name_side)
    other_sides = [side for side in answer_sides if _compared_name(side) != name]
    if len(answer_sides) == 1 or len(other_sides) < len(answer_sides):
        return _claims_of_chain(value, [gold_left, *other_sides], answer) if other_sides else None
    # Of another name: a derivative is another thing.
    is_derivative = "'" in name + _compared_name(answer_sides[0])
    return None if is_derivative else [Claim(gold, answer)]


def _claims_of_chain(gold: str, answer_sides: list[str], answer: str) -> list[Claim] | None:
    """Return the last side as the answer; the sides before it must be names or equal to it."""
    *sides, last = answer_sides
    is_last_name = is_name(last, gold) and not is_name(sides[0], gold)
    if is_last_name and without_spaces(last) != without_spaces(gold):
        last, sides = sides[-1], sides[:-1]  # "5=y": the name is left out
    if last != gold and last.casefold() == gold.casefold():
        return None
    other_sides = [side for side in sides if not _is_quantity(side, gold)]
    if not free_letters(gold) and any(map(free_letters, other_sides)):
        return None
    must_agree = [Claim(last, side, is_side=True) for side in other_sides]
    # "\pi\approx3.14" for an exact gold answer: the side before is the answer.
    is_exact_before = other_sides and _APPROXIMATELY.search(answer) and "." not in gold
    return [Claim(gold, other_sides[-1] if is_exact_before else last), *must_agree]


class _Tuple(NamedTuple):
    """A tuple of values, with their names if each was given by an equation."""

    names: list[str]
    text: str

    def agrees_in_names(self, other: "_Tuple") -> bool:
        """Return True if one tuple at least has names, and the other has the same names or no names."""
        if not self.names or not other.names:
            return bool(self.names or other.names)
        return self.names == other.names


_SPACE_BEFORE_EQUATION = re.compile(r"[,;]?\s+(?=[a-zA-Z]\s*=)")


def _tuple_of(text: str) -> _Tuple | None:
    """Return `y=2, x=1` as names and values by the alphabet: x, y and (1,2); a tuple has no names."""
    if tuple_elements(without_spaces(text)):
        return _Tuple([], text)
    equations = list_values(_SPACE_BEFORE_EQUATION.sub(",", text))
    if len(equations) < 2:
        return None
    values: dict[str, str] = {}
    for equation in equations:
        sides = split_outside_brackets(equation.strip(), "=")
        if len(sides) != 2 or not SYMBOL.fullmatch(without_spaces(sides[0])):
            return None
        values[without_spaces(sides[0])] = sides[1]
    if len(values) != len(equations):
        return None  # two values of one name are alternatives
    names = sorted(values)
    return _Tuple(names, "(" + ",".join(values[name] for name in names) + ")")


def without_spaces(text: str) -> str:
    """Remove the spaces."""
    return "".join(text.split())
