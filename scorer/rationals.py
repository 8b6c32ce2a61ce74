r"""Exact values of plain LaTeX arithmetic: pure, bounded in time and memory whatever the text.

Only digits, `+ - * / ^ !`, `\times \cdot \div \frac`, brackets and mixed numbers are read; anything
else has no value here.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from math import factorial

_MAX_BITS = 2**15
_MAX_STEPS = 64
_MAX_CHARS = 512
_MAX_DEPTH = 20
_TOKEN = re.compile(
    r"\d{1,3}(?:,\d{3})+(?:\.\d+)?(?![\d,])|\d+\.?\d*|\.\d+|\\(?:times|cdot|div|frac)|[-+*/^!(){}]",
    re.ASCII,
)
_SCIENTIFIC = re.compile(r"[+-]?\d+(?:\.\d+)?(?:\\times|\\cdot|\*)10\^(?:\{[+-]?\d+\}|\d)")
_MULTIPLY = ("*", "\\times", "\\cdot")
_DIVIDE = ("/", "\\div")


@dataclass(frozen=True)
class Rational:
    """A value and how it was written."""

    value: Fraction
    is_evaluated: bool
    """False for `2+2` or `(3)(4)`: a sum or product left undone. A fraction of two integers and
    scientific notation are done."""
    is_grouped: bool
    """True where a comma was read as a thousands separator; `1,200` may also be a list."""


def read_rational(text: str) -> Rational | None:
    """The exact value of a text without spaces.

    None where the text is not plain arithmetic, or its value is too large to hold.
    """
    tokens = _TOKEN.findall(text) if len(text) <= _MAX_CHARS else []
    is_grouped = any("," in token for token in tokens)
    # "(1,200)" is an interval or a pair, not a number.
    if not tokens or "".join(tokens) != text or (is_grouped and "(" in text):
        return None
    reader = _Reader(tokens)
    try:
        value = reader.sum(0)
    except (_NoValueError, ZeroDivisionError):
        return None
    if reader.at != len(tokens):
        return None
    is_evaluated = reader.operations == 0 or _SCIENTIFIC.fullmatch(text) is not None
    return Rational(value, is_evaluated, is_grouped)


class _NoValueError(Exception):
    """The text is not arithmetic, or a bound was reached."""


class _Reader:
    """Recursive descent over the tokens; every result is bounded before it is computed."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._steps = 0
        self.at = 0
        self.operations = 0

    def sum(self, depth: int) -> Fraction:
        if depth > _MAX_DEPTH:
            raise _NoValueError
        total = self._product(depth)
        while (sign := self._next()) in ("+", "-"):
            self._take()
            self.operations += 1
            term = self._product(depth)
            total = _bounded(total + term if sign == "+" else total - term)
        return total

    def _product(self, depth: int) -> Fraction:
        before = self.operations
        total = self._signed(depth)
        while (token := self._next()) in (*_MULTIPLY, *_DIVIDE, "("):
            if token != "(":
                self._take()
            factor = self._signed(depth)
            is_fraction = token == "/" and total.denominator == factor.denominator == 1
            if not is_fraction or self.operations > before:
                self.operations += 1
            total = _bounded(total / factor if token in _DIVIDE else total * factor)
        return total

    def _signed(self, depth: int) -> Fraction:
        sign = 1
        while (token := self._next()) in ("+", "-"):
            self._take()
            sign = -sign if token == "-" else sign
        return sign * self._power(depth)

    def _power(self, depth: int) -> Fraction:
        base = self._atom(depth)
        if self._next() == "^":
            self._take()
            # Without braces LaTeX raises to the first digit alone, while people mean the number.
            if self._next() != "{" and len(self._next()) > 1:
                raise _NoValueError
            base = _raise(base, self._atom(depth))
        if self._next() == "!":
            self._take()
            if base.denominator != 1 or not 0 <= base <= 3000:
                raise _NoValueError
            base = Fraction(factorial(int(base)))
        return base

    def _atom(self, depth: int) -> Fraction:
        token = self._take()
        if token in ("(", "{"):
            inner = self.sum(depth + 1)
            self._expect(")" if token == "(" else "}")
            return inner
        if token == "\\frac":
            return self._fraction(depth)
        if token[0] not in "0123456789.":
            raise _NoValueError
        number = _bounded(Fraction(token.replace(",", "")))
        if self._next() == "\\frac" and number.denominator == 1:  # a mixed number
            self._take()
            return _bounded(number + self._fraction(depth))
        return number

    def _fraction(self, depth: int) -> Fraction:
        parts = []
        for _ in range(2):
            self._expect("{")
            parts.append(self.sum(depth + 1))
            self._expect("}")
        return _bounded(parts[0] / parts[1])

    def _next(self) -> str:
        return self._tokens[self.at] if self.at < len(self._tokens) else ""

    def _take(self) -> str:
        self._steps += 1
        if self.at >= len(self._tokens) or self._steps > _MAX_STEPS:
            raise _NoValueError
        self.at += 1
        return self._tokens[self.at - 1]

    def _expect(self, token: str) -> None:
        if self._take() != token:
            raise _NoValueError


def _raise(base: Fraction, exponent: Fraction) -> Fraction:
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if exponent.denominator != 1 or bits * abs(exponent) > _MAX_BITS:
        raise _NoValueError
    return base ** int(exponent)


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MAX_BITS:
        raise _NoValueError
    return value
