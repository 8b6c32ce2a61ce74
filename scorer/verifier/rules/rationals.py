r"""Exact values of plain LaTeX arithmetic. Pure, and bounded in time and memory.

Only digits, `+ - * / ^ !`, `\times \cdot \div \frac`, brackets and mixed numbers are read; anything else has no value.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from math import factorial

from prefixrl.scorer.verifier.rules.reader import NoValueError, TokenReader

_MAX_BITS = 2**15
_MAX_TOKENS = 64
_MAX_CHARS = 512
_MAX_DEPTH = 20
_TOKEN = re.compile(
    r"\d{1,3}(?:,\d{3})+(?:\.\d+)?(?![\d,])|\d+\.?\d*|\.\d+|\\(?:times|cdot|div|frac)|[-+*/^!(){}]", re.ASCII
)
_SCIENTIFIC = re.compile(r"[+-]?\d+(?:\.\d+)?(?:\\times|\\cdot|\*)10\^(?:\{[+-]?\d+\}|\d)")
_MULTIPLY = ("*", "\\times", "\\cdot")
_DIVIDE = ("/", "\\div")


@dataclass(frozen=True)
class Rational:
    """A value and the way it was written."""

    value: Fraction
    is_evaluated: bool
    """False for `2+2` or `(3)(4)`, a sum or product not carried out; true for a fraction of two integers and scientific
    notation."""
    is_grouped: bool
    """True if a comma was read as a thousands separator; `1,200` may also be a list."""


def read_rational(text: str) -> Rational | None:
    """Return the exact value of a text without spaces, None if not arithmetic or too large."""
    tokens = _TOKEN.findall(text) if len(text) <= _MAX_CHARS else []
    is_grouped = any("," in token for token in tokens)
    # "(1,200)" is an interval or a pair, not a number.
    if not tokens or "".join(tokens) != text or (is_grouped and "(" in text):
        return None
    reader = _Reader(tokens)
    try:
        value = reader.sum(0)
    except (NoValueError, ZeroDivisionError):
        return None
    if not reader.is_done:
        return None
    is_evaluated = reader.operations == 0 or _SCIENTIFIC.fullmatch(text) is not None
    return Rational(value, is_evaluated, is_grouped)


class _Reader(TokenReader):
    """Recursive descent over the tokens; every result is bounded before it is computed."""

    def __init__(self, tokens: list[str]) -> None:
        super().__init__(tokens, _MAX_TOKENS, _MAX_DEPTH)
        self.operations = 0

    def sum(self, depth: int) -> Fraction:
        self.check_depth(depth)
        total = self._product(depth)
        while (sign := self.next()) in ("+", "-"):
            self.take()
            self.operations += 1
            term = self._product(depth)
            total = _bounded(total + term if sign == "+" else total - term)
        return total

    def _product(self, depth: int) -> Fraction:
        before = self.operations
        total = self._signed(depth)
        while (token := self.next()) in (*_MULTIPLY, *_DIVIDE, "("):
            if token != "(":
                self.take()
            factor = self._signed(depth)
            is_fraction = token == "/" and total.denominator == factor.denominator == 1
            if not is_fraction or self.operations > before:
                self.operations += 1
            total = _bounded(total / factor if token in _DIVIDE else total * factor)
        return total

    def _signed(self, depth: int) -> Fraction:
        return self.take_sign() * self._power(depth)

    def _power(self, depth: int) -> Fraction:
        base = self._atom(depth)
        if self.next() == "^":
            self.take()
            # Without braces LaTeX raises to the first digit alone, while people mean the number.
            if self.next() != "{" and len(self.next()) > 1:
                raise NoValueError
            base = _raise(base, self._atom(depth))
        if self.next() == "!":
            self.take()
            if base.denominator != 1 or not 0 <= base <= 3000:
                raise NoValueError
            base = Fraction(factorial(int(base)))
        return base

    def _atom(self, depth: int) -> Fraction:
        token = self.take()
        if token in ("(", "{"):
            inner = self.sum(depth + 1)
            self.expect(")" if token == "(" else "}")
            return inner
        if token == "\\frac":
            return self._fraction(depth)
        if token[0] not in "0123456789.":
            raise NoValueError
        number = _bounded(Fraction(token.replace(",", "")))
        if self.next() == "\\frac" and number.denominator == 1:  # a mixed number
            self.take()
            return _bounded(number + self._fraction(depth))
        return number

    def _fraction(self, depth: int) -> Fraction:
        parts = []
        for _ in range(2):
            self.expect("{")
            parts.append(self.sum(depth + 1))
            self.expect("}")
        return _bounded(parts[0] / parts[1])


def _raise(base: Fraction, exponent: Fraction) -> Fraction:
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if exponent.denominator != 1 or bits * abs(exponent) > _MAX_BITS:
        raise NoValueError
    return base ** int(exponent)


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MAX_BITS:
        raise NoValueError
    return value
