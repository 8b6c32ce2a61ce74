r"""Sides of an equation: the answer, and those that must be names or equal to it. Pure.

x = 2+2 = 4          4, if x is a name and 2+2 is 4
x^2-5x+6 = 0         nothing: an equation that is not solved
x = 1, y = 2         the pair (1,2)
"""

import re
from dataclasses import dataclass
from typing import Literal

from prefixrl.scorer.verifier.rules.guards import sides_of, split_at, tuple_elements

_GREEK = (
    r"\\(?:alpha|beta|gamma|delta|epsilon|varepsilon|zeta|eta|theta|vartheta|kappa|lambda|mu|nu|xi|rho|sigma|tau|phi"
    r"|varphi|chi|psi|omega|ell|Gamma|Delta|Theta|Lambda|Xi|Sigma|Phi|Psi|Omega)(?![a-zA-Z])"
)
_STYLE = (
    r"\\(?:vec|mathbf|boldsymbol|bm|hat|widehat|bar|overline|overrightarrow|tilde|mathcal|mathbb|mathrm|mathit|d?dot)"
)
_WORDS = r"(?:\\(?:text|textbf|textit|textrm|mathrm|mathit|mbox|operatorname)\{[^{}\d=]*\}|[A-Za-z]{3,}(?![A-Za-z]))"
_MARKS = r"(?:_\{[^{}=]*\}|_\\?[A-Za-z0-9]+|\^\{-1\}|\^(?:\{?(?:T|\*|\\prime|\\circ)\}?)|')*"
_LETTER = rf"(?:[A-Za-z]|{_GREEK}|{_STYLE}(?:\{{[^{{}}]*\}}|\\?[A-Za-z]+))"
_ANGLE = r"m?\\(?:angle|triangle|square|measuredangle)~?(?:[A-Z]+|\d|\\?[a-z]+|\{[^{}]*\})"
_FIGURE = rf"(?:[A-Z]{{2,}}|\|[A-Z]{{2,}}\||\[[A-Z]{{3,}}\]|{_ANGLE})"
_ARGUMENT = r"(?:[^()=]|\([^()]*\)|(?<=[A-Z])=)+"
_ATOM = r"-?(?:\d+(?:\.\d+)?|[A-Za-z]|\\pi|\\infty)"
_APPLIED = rf"(?:[fghA-Z]|{_GREEK}|{_STYLE}\{{[^{{}}]*\}}){_MARKS}[(\[]{_ARGUMENT}[)\]]"
_AT_POINT = rf"[a-z]{_MARKS}\({_ATOM}(?:,{_ATOM})*\)"
_TRIGONOMETRIC = rf"\\(?:sin|cos|tan|cot|sec|csc)(?:\^\{{?\d\}}?)?~?[({{]*(?:[A-Z]+|{_GREEK}|\d+|{_ANGLE})[)}}]*"
_CALLED = r"\\(?:det|dim|deg|gcd|operatorname\{\w+\}|min|max|arg|ker|Pr|Re|Im)[_~({\[a-zA-Z].*"
_SIZE = rf"\\?[|]{_LETTER}(?<![xy]){_MARKS}\\?[|]"
_DERIVATIVE = r"\\frac\{(?:d|\\partial)(?:\^\d)?\\?[a-zA-Z]?\}\{(?:d|\\partial)\\?[a-zA-Z](?:\^\d)?\}.*"
_TUPLE = rf"\({_LETTER}(?:_\w)?(?:,{_LETTER}(?:_\w)?)+\)"
_COMPOSED = r"\([a-z](?:\\circ~?|[+*-]|\\cdot~?)[a-z]\)\([^()]*\)"
_SYMBOL = re.compile(rf"{_LETTER}{_MARKS}")
_NAME = re.compile(
    "|".join(
        rf"(?:{form})"
        for form in (
            rf"{_LETTER}{_MARKS}", rf"(?:{_WORDS}~?)+{_MARKS}(?:\(?\$?[A-Za-z]*\$?\)?)", _FIGURE, _APPLIED, _AT_POINT,
            _TRIGONOMETRIC, _CALLED, _SIZE, _DERIVATIVE, _TUPLE, _COMPOSED,
        )
    )
)  # fmt: skip
"""A side whose value is an answer: f(x+1) is a name, x(x+1) is none."""
_QUESTION = re.compile(r"\\(?:i*int|lim|prod|sum)(?![a-zA-Z])")
_QUANTITY = rf"(?:\d*{_FIGURE}(?:\^\d|\^\{{\d\}})?|[fgP]\(\d+\)|\d+)"
_OF_FIGURES = re.compile(
    rf"{_QUANTITY}(?:(?:[-+/*:]|\\cdot|\\times){_QUANTITY})*|\\frac\{{{_QUANTITY}\}}\{{{_QUANTITY}\}}"
)
_OF_LETTERS = re.compile(r"[a-wA-W](?:[-+]?[a-wA-W])+|\\frac\{[a-w]\}\{[a-w]\}|[a-w]/[a-w]")
"""Sums, products and ratios of single letters, none an unknown's: what contests ask for (`p+q`)."""
_POSITIVE = re.compile(r"0*[1-9]\d*(?:\.\d+)?|\\frac\{[1-9]\d*\}\{[1-9]\d*\}|\d+/\d+")
_COMPARED = re.compile(r"[<>]|[!:]=|\\(?:[lgn]eq?|[lg]t|[lg]eqslant|in|approx|equiv|subset|cup|cap)(?![a-zA-Z])")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_GAP = re.compile(r"\\q?quad(?![a-zA-Z])")
_OR = re.compile(r"\\(?:text|mbox|textrm|mathrm)\{[~ ]*or[~ ]*\}|(?<![a-zA-Z\\])or(?![a-zA-Z])")
_AND = re.compile(
    r"\\(?:text|mbox|textrm|mathrm)\{[~ ]*and[~ ]*\}|(?<![a-zA-Z\\])and(?![a-zA-Z])|\\(?:wedge|land)(?![a-zA-Z])"
)

Role = Literal["answer", "equal"]


@dataclass(frozen=True)
class Claim:
    """Two texts that must agree for an answer to be right."""

    want: str
    got: str
    role: Role = "answer"
    """`equal`: another side of the equation, which may be a sum or product not carried out."""


def claims(want: str, got: str) -> list[Claim] | None:
    """Return all that must hold if the answer is right; None if it is wrong for its form.

    Spaces matter as far as a parser needs them. The pair itself is returned where there is nothing to take apart.
    """
    pair = _as_pairs(want, got)
    if pair is not None:
        return [Claim(*pair)]
    wanted, given = _sides(want), _sides(got)
    if len(wanted) > 1:
        return _of_equation(want, wanted, got, given)
    if len(given) > 1:
        return _of_chain(want, given)
    listed = split_at(_OR.sub(",", _AND.sub(",", got)), ",")
    is_list = len(listed) > 1 and "=" not in want and not tuple_elements(_compact(got))
    if is_list and not all(_is_named(each) for each in listed):
        return None
    return [Claim(want, got)]


def _sides(text: str) -> list[str]:
    """Return the sides of one equation; lists and inequalities have only themselves."""
    joined = _OR.sub(",", _AND.sub(",", _THOUSANDS.sub("", text)))
    is_list = len(split_at(joined, ",")) > 1 and not _is_pair_named(text)
    if is_list or _COMPARED.search(_outside(text)):
        return [text]
    return sides_of(text)


def _of_equation(want: str, wanted: list[str], got: str, given: list[str]) -> list[Claim] | None:
    r"""Compare with the right side of a gold answer `name = value`."""
    name, value = _named(wanted)
    if name is None:
        return [Claim(want, got)]
    if len(given) == 1:
        return [Claim(value, got)]
    others = [side for side in given if _called(side) != name]
    if len(others) < len(given):
        return _of_chain(value, [wanted[0], *others]) if others else None
    if "'" in name or "'" in _called(given[0]):
        return None
    return [Claim(want, got)]


def _of_chain(want: str, given: list[str]) -> list[Claim] | None:
    """Return the last side as the answer; those before are names or equal to the gold answer."""
    sides = given
    if is_name(sides[-1]) and not is_name(sides[0]) and _compact(sides[-1]) != _compact(want):
        sides = [sides[-1], *sides[:-1]]  # "5=y"
    found = [Claim(want, sides[-1])]
    for side in sides[:-1]:
        if not _is_quantity(_compact(side), _compact(want)):
            found.append(Claim(want, side, "equal"))
    return found


def is_name(side: str) -> bool:
    """Return True if a side only says what the value is of."""
    return _NAME.fullmatch(_compact(side)) is not None


def _is_quantity(side: str, want: str) -> bool:
    if _NAME.fullmatch(side) or _QUESTION.search(side):
        return True
    if re.search(r"[A-Z]{2}|\[[A-Z]|[fgP]\(", side) and _OF_FIGURES.fullmatch(side):
        return True
    return _OF_LETTERS.fullmatch(side) is not None and _POSITIVE.fullmatch(want) is not None


def _named(sides: list[str]) -> tuple[str | None, str]:
    """Return the name and the value of an equation of two sides."""
    if len(sides) == 2 and is_name(sides[0]):
        return _called(sides[0]), sides[1]
    if len(sides) == 2 and is_name(sides[1]):
        return _called(sides[1]), sides[0]
    return None, ""


def _called(side: str) -> str:
    r"""Return a name as compared: `\frac{dy}{dx}` is `y'`, styles of letters do not count."""
    name = re.sub(r"\\frac\{d(\\?[a-zA-Z]+)\}\{d[a-zA-Z]\}", r"\1'", _compact(side))
    name = re.sub(r"\^\{?\\prime\}?", "'", name)
    return re.sub(rf"{_STYLE}(?:\{{([^{{}}]*)\}}|(\\?[a-zA-Z]+))", lambda m: m.group(1) or m.group(2), name)


def _is_named(element: str) -> bool:
    sides = _sides(element)
    return all(is_name(side) for side in sides[:-1])


def _is_pair_named(text: str) -> bool:
    first = sides_of(text)[0]
    return first != text and re.fullmatch(_TUPLE, _compact(first)) is not None


def _as_pairs(want: str, got: str) -> tuple[str, str] | None:
    """Return both as tuples where one is `x=1, y=2` and the other `(1,2)`."""
    left, right = _coordinates(want), _coordinates(got)
    if left and right:
        return None if left[0] != right[0] else (left[1], right[1])
    if left and tuple_elements(_compact(got)):
        return left[1], got
    if right and tuple_elements(_compact(want)):
        return want, right[1]
    return None


def _coordinates(text: str) -> tuple[list[str], str] | None:
    """Return the names and values of `y=2, x=1`, by the alphabet: x, y and (1,2)."""
    joined = _AND.sub(",", _GAP.sub("", text))
    parts = [part.strip() for part in split_at(joined, ",")]
    pairs = [sides_of(part) for part in parts if part]
    if len(pairs) < 2 or any(len(pair) != 2 or not _SYMBOL.fullmatch(_compact(pair[0])) for pair in pairs):
        return None
    values = {_compact(name): value for name, value in pairs}
    names = sorted(values)
    return (names, "(" + ",".join(values[name] for name in names) + ")") if len(values) == len(pairs) else None


def _compact(text: str) -> str:
    return re.sub(r"\s+", "", text)


def _outside(text: str) -> str:
    """Return the text without its parts in round brackets."""
    return re.sub(r"\([^()]*\)", "", text)
