r"""Values of LaTeX arithmetic, exact or modulo a prime: pure, bounded, microseconds.

Equality is decided in the field of a large prime, with a random number for every variable and for
\pi, and a root for \sqrt{n}. Equal expressions have equal values (it is a homomorphism), so that a
difference proves them unequal; unequal ones agree by chance with probability degree / PRIME
(Schwartz 1980, Zippel 1979).
"""

import random
import re
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, lru_cache
from math import factorial

PRIME = 60_765_662_588_513_235_425_022_835_652_976_245_831
"""7 modulo 8, and such modulo every odd prime below 100 that each of these, and 2, is a square (by reciprocity)."""
_SMALL = tuple(q for q in range(2, 100) if all(q % d for d in range(2, q)))
_MAX_BITS = 2**15
_MAX_TOKENS = 128
_MAX_CHARS = 512
_MAX_DEPTH = 20
_MAX_EXPONENT = 200
_MAX_DIGITS = 15
_TOKEN = re.compile(
    r"\d{1,3}(?:,\d{3})+(?:\.\d+)?(?![\d,])|\d+\.?\d*|\.\d+"
    r"|\\(?:times|cdot|div|frac|sqrt|pi)(?![a-zA-Z])|[a-zA-Z]|[-+*/^!(){}]",
    re.ASCII,
)
_SCIENTIFIC = re.compile(r"[+-]?\d+(?:\.\d+)?(?:\\times|\\cdot|\*)10\^(?:\{[+-]?\d+\}|\d)")
_TIMES = ("*", r"\times", r"\cdot")
_OVER = ("/", r"\div")
_CONSTANTS = frozenset("eiEI")
"""Letters that may be numbers; texts with them are not read."""
_WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{4}")
"""A product of four letters is more likely a word, whose letters have an order."""
_STARTS = re.compile(r"[\da-zA-Z.({\\]")


@dataclass(frozen=True)
class Rational:
    """A value and the way it was written."""

    value: Fraction
    is_evaluated: bool
    """False for `2+2` or `(3)(4)`; true for a fraction of two integers and scientific notation."""
    is_grouped: bool
    """True if a comma was read as a thousands separator; `1,200` may also be a list."""


@lru_cache(maxsize=1024)
def read_rational(text: str) -> Rational | None:
    r"""Return the exact value of `3\frac12`, `1,200` or `5!` without spaces, None if not arithmetic or too large."""
    try:
        reader = _Reader(text)
        value = reader.value()
    except (ValueError, ZeroDivisionError):
        return None
    is_grouped = "," in text
    # "(1,200)" is an interval or a pair, not a number. A factorial alone is a value, 9!/8! is not.
    if is_grouped and "(" in text:
        return None
    is_plain = reader.operations == 0 and ("!" not in text or "/" not in text)
    return Rational(value, is_plain or _SCIENTIFIC.fullmatch(text) is not None, is_grouped)


def are_equal(gold: str, answer: str) -> bool | None:
    r"""Return True if two texts without spaces (`2\sqrt3`, `x^2+1`) are equal, None if this cannot be decided.

    It cannot where one is not read, their letters differ, or unequal texts hold a decimal: it may
    be rounded.
    """
    if _letters(gold) != _letters(answer) or _WORD.search(gold) or "," in gold + answer:
        return None
    values: dict[str, int] = {}
    try:
        is_equal = _Reader(gold, values).value() == _Reader(answer, values).value()
    except (ValueError, ZeroDivisionError):
        return None
    return True if is_equal else (None if "." in gold + answer else False)


def _letters(text: str) -> set[str]:
    r"""Return the variables and commands of a text, \pi among them, without commands of layout."""
    return set(re.findall(r"\\[a-zA-Z]+|[a-zA-Z]", text)) - {
        r"\frac",
        r"\sqrt",
        r"\cdot",
        r"\times",
    }


@cache
def _root(number: int) -> int:
    """Return a square root modulo PRIME, which is 3 modulo 4."""
    return pow(number, (PRIME + 1) // 4, PRIME)


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


class _Reader:
    """Recursive descent; every result is bounded, and modulo PRIME if there are `values` for variables.

    Raises ValueError where a text is not read or a bound is reached.
    """

    def __init__(self, text: str, values: dict[str, int] | None = None) -> None:
        self._tokens: list[str] = _TOKEN.findall(text) if len(text) <= _MAX_CHARS else []
        if not text or "".join(self._tokens) != text or len(self._tokens) > _MAX_TOKENS:
            raise ValueError
        self._tokens.append("")
        self._values = values
        self._position = 0
        self._depth = 0
        self.operations = 0
        """Sums and products, apart from fractions of two integers."""

    def value(self) -> Fraction:
        value = self._read_sum()
        if self._next_token():
            raise ValueError
        return self._bounded(value)

    def _bounded(self, value: Fraction) -> Fraction:
        if self._values is not None:
            return Fraction(value.numerator * pow(value.denominator, -1, PRIME) % PRIME)
        if _bits(value) > _MAX_BITS:
            raise ValueError
        return value

    def _read_sum(self) -> Fraction:
        if self._depth > _MAX_DEPTH:
            raise ValueError
        self._depth += 1
        total = self._read_product()
        while (sign := self._next_token()) in ("+", "-"):
            self._take_token()
            self.operations += 1
            term = self._read_product()
            total = self._bounded(total + term if sign == "+" else total - term)
        self._depth -= 1
        return total

    def _read_product(self) -> Fraction:
        before = self.operations
        total = self._read_signed()
        while (
            is_written := (token := self._next_token()) in (*_TIMES, *_OVER)
        ) or self._starts_factor(token):
            if is_written:
                self._take_token()
            factor = self._read_signed() if is_written else self._read_power()
            is_fraction = token == "/" and total.denominator == factor.denominator == 1
            if not is_fraction or self.operations > before:
                self.operations += 1
            total = self._bounded(total / factor if token in _OVER else total * factor)
        return total

    def _starts_factor(self, token: str) -> bool:
        if self._values is None or not _STARTS.match(token):
            return token == "("
        if token[0] in "0123456789." and self._tokens[self._position - 1][-1] in "0123456789.":
            raise ValueError
        return True

    def _read_sign(self) -> int:
        sign = 1
        while self._next_token() in ("+", "-"):
            sign = -sign if self._take_token() == "-" else sign
        return sign

    def _read_signed(self) -> Fraction:
        return self._read_sign() * self._read_power()

    def _read_power(self) -> Fraction:
        base = self._read_atom()
        if self._next_token() == "^":
            self._take_token()
            exponent = self._read_integer()
            most = _MAX_EXPONENT if self._values is not None else _MAX_BITS // max(_bits(base), 1)
            if abs(exponent) > most:
                raise ValueError
            base = (
                base**exponent
                if self._values is None
                else Fraction(pow(int(base), exponent, PRIME))
            )
        if self._next_token() == "!" and self._values is None:
            self._take_token()
            if base.denominator != 1 or not 0 <= base <= 3000:
                raise ValueError
            base = Fraction(factorial(int(base)))
        return base

    def _read_integer(self) -> int:
        """Read one digit, or an integer in braces: LaTeX takes the first digit alone, while people mean the number."""
        token = self._take_token()
        sign = 1
        if is_braced := token == "{":
            sign = self._read_sign()
            token = self._take_token()
            self._expect_token("}")
        if not token.isdigit() or (len(token) > 1 and not is_braced) or len(token) > _MAX_DIGITS:
            raise ValueError
        return sign * int(token)

    def _read_atom(self) -> Fraction:
        token = self._take_token()
        if token in ("(", "{"):
            value = self._read_sum()
            self._expect_token(")" if token == "(" else "}")
            return value
        if token == r"\frac":
            return self._read_fraction()
        if token[0] in "0123456789.":
            return self._read_number(token)
        if self._values is None:
            raise ValueError
        if token == r"\sqrt":
            return self._read_square_root()
        if token == r"\pi" or (token.isalpha() and token not in _CONSTANTS):
            return Fraction(
                self._values.setdefault(token, random.SystemRandom().randrange(2, PRIME))
            )
        raise ValueError

    def _read_number(self, token: str) -> Fraction:
        number = self._bounded(
            Fraction(int(token) if token.isdecimal() else token.replace(",", ""))
        )
        if (
            self._next_token() == r"\frac" and token.isdigit() and self._values is None
        ):  # a mixed number
            self._take_token()
            return self._bounded(number + self._read_fraction())
        return number

    def _read_fraction(self) -> Fraction:
        parts = []
        for _ in range(2):
            self._expect_token("{")
            parts.append(self._read_sum())
            self._expect_token("}")
        return self._bounded(parts[0] / parts[1])

    def _read_square_root(self) -> Fraction:
        """Read a positive integer whose primes are small or occur squared; return its root."""
        radicand = self._read_integer()
        root = 1
        for prime in _SMALL:
            while radicand > 0 and radicand % prime == 0:
                radicand //= prime
                root = root * _root(prime) % PRIME
        if radicand != 1:
            raise ValueError
        return Fraction(root)

    def _next_token(self) -> str:
        """Return the next token, "" behind the last one."""
        return self._tokens[self._position]

    def _take_token(self) -> str:
        token = self._next_token()
        if not token:
            raise ValueError
        self._position += 1
        return token

    def _expect_token(self, token: str) -> None:
        if self._take_token() != token:
            raise ValueError
