r"""Equality of algebraic expressions without sympy: pure, bounded, microseconds.

`2\sqrt{3}`, `\frac{3\pi}{4}`, `x^2+2x+1` are evaluated in the field of a large prime, with a random number for every
variable and for \pi, and a root for \sqrt{n}. Equal expressions have equal values (it is a homomorphism), so that a
difference proves them unequal; unequal ones agree by chance with probability degree / PRIME (Schwartz 1980, Zippel
1979).
"""

import random
import re
from functools import cache

from prefixrl.scorer.verifier.rules.reader import NoValueError, TokenReader

PRIME = 46_111_359_278_910_368_495_062_042_946_635_121_401
"""1 modulo 8 and modulo every odd prime below 100: by reciprocity each of these, and 2, has a square root."""
_SMALL = tuple(q for q in range(2, 100) if all(q % d for d in range(2, q)))
_MAX_CHARS = 256
_MAX_DEPTH = 20
_MAX_EXPONENT = 200
_MAX_DIGITS = 15
_TOKEN = re.compile(r"\d+\.\d+|\.\d+|\d+|\\(?:frac|sqrt|pi|cdot|times)(?![a-zA-Z])|[a-zA-Z]|[-+*/^(){}]", re.ASCII)
_CONSTANTS = frozenset("eiEI")
"""Letters that may be numbers; texts with them are not read."""
_WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{4}")
"""A product of four letters is more likely a word, whose letters have an order."""
_STARTS = re.compile(r"[\da-zA-Z.({\\]")


def are_equal(gold: str, answer: str) -> bool | None:
    """Return True if two texts without spaces are equal, None if this cannot be decided.

    It cannot where one is not read, their letters differ, or unequal texts hold a decimal: it may be rounded.
    """
    if len(gold) > _MAX_CHARS or len(answer) > _MAX_CHARS:
        return None
    if letters(gold) != letters(answer) or _WORD.search(gold):
        return None
    values: dict[str, int] = {}
    try:
        is_equal = _Reader(gold, values).value() == _Reader(answer, values).value()
    except (NoValueError, ZeroDivisionError):
        return None
    return True if is_equal else (None if "." in gold + answer else False)


def letters(text: str) -> frozenset[str]:
    r"""Return the variables and commands of a text, \pi among them, without commands of layout."""
    found = set(re.findall(r"\\[a-zA-Z]+|[a-zA-Z]", text))
    return frozenset(found - {r"\frac", r"\sqrt", r"\cdot", r"\times"})


@cache
def _root(number: int) -> int:
    """Return a square root modulo PRIME (Tonelli 1891); one takes milliseconds."""
    odd, twos = PRIME - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    non_residue = next(z for z in range(2, 10_000) if pow(z, (PRIME - 1) // 2, PRIME) != 1)
    power, root = pow(number, odd, PRIME), pow(number, (odd + 1) // 2, PRIME)
    step, order = pow(non_residue, odd, PRIME), twos
    while power != 1:
        least, square = 0, power
        while square != 1:
            least, square = least + 1, square * square % PRIME
        factor = pow(step, 1 << (order - least - 1), PRIME)
        step, order = factor * factor % PRIME, least
        root, power = root * factor % PRIME, power * step % PRIME
    return root


class _Reader(TokenReader):
    """Recursive descent; `values` holds the numbers given to variables so far."""

    def __init__(self, text: str, values: dict[str, int]) -> None:
        tokens: list[str] = _TOKEN.findall(text)
        if "".join(tokens) != text or not text:
            raise NoValueError
        super().__init__(tokens, _MAX_CHARS, _MAX_DEPTH)
        self._values = values

    def value(self) -> int:
        """Return the value of the whole text."""
        value = self._sum(0)
        if not self.is_done:
            raise NoValueError
        return value

    def _sum(self, depth: int) -> int:
        self.check_depth(depth)
        total = self._product(depth)
        while self.next() in ("+", "-"):
            sign = 1 if self.take() == "+" else -1
            total += sign * self._product(depth)
        return total % PRIME

    def _product(self, depth: int) -> int:
        total = self._signed(depth)
        while _STARTS.match(token := self.next()) or token in ("*", "/"):
            if token in ("*", "/", r"\cdot", r"\times"):
                self.take()
                factor = self._signed(depth)
            else:
                if token[0] in "0123456789." and self._tokens[self.at - 1][-1] in "0123456789.":
                    raise NoValueError
                factor = self._power(depth)
            total = total * (_inverse(factor) if token == "/" else factor) % PRIME
        return total

    def _signed(self, depth: int) -> int:
        return self.take_sign() * self._power(depth)

    def _power(self, depth: int) -> int:
        base = self._atom(depth)
        if self.next() != "^":
            return base
        self.take()
        exponent = self._exponent()
        if self.next() == "^":
            raise NoValueError
        return pow(base if exponent >= 0 else _inverse(base), abs(exponent), PRIME)

    def _exponent(self) -> int:
        """Read one digit, or an integer in braces."""
        token = self.take()
        sign = 1
        if is_braced := token == "{":
            token = self.take()
            if token == "-":
                sign, token = -1, self.take()
            self.expect("}")
        if not token.isdigit() or (len(token) > 1 and not is_braced) or int(token) > _MAX_EXPONENT:
            raise NoValueError
        return sign * int(token)

    def _atom(self, depth: int) -> int:
        token = self.take()
        if token in ("(", "{"):
            value = self._sum(depth + 1)
            self.expect(")" if token == "(" else "}")
            return value
        if token == r"\frac":
            above, below = self._braced(depth), self._braced(depth)
            return above * _inverse(below) % PRIME
        if token == r"\sqrt":
            return self._square_root()
        if token[0] in "0123456789.":
            return _number(token)
        if token == r"\pi" or (token.isalpha() and token not in _CONSTANTS):
            return self._values.setdefault(token, random.SystemRandom().randrange(2, PRIME))
        raise NoValueError

    def _braced(self, depth: int) -> int:
        self.expect("{")
        value = self._sum(depth + 1)
        self.expect("}")
        return value

    def _square_root(self) -> int:
        """Read a positive integer whose primes are small or occur squared; return its root."""
        token = self.take()
        if token == "{":
            token = self.take()
            self.expect("}")
        elif len(token) > 1:
            raise NoValueError
        if not token.isdigit() or len(token) > _MAX_DIGITS or int(token) == 0:
            raise NoValueError
        left, root = int(token), 1
        for q in _SMALL:
            while left % q == 0:
                left, root = left // q, root * _root(q) % PRIME
        if left != 1:
            raise NoValueError
        return root


def _number(token: str) -> int:
    whole, _, rest = token.partition(".")
    if len(whole) + len(rest) > _MAX_DIGITS:
        raise NoValueError
    return int(whole + rest) * _inverse(pow(10, len(rest), PRIME)) % PRIME


def _inverse(value: int) -> int:
    if value % PRIME == 0:
        raise ZeroDivisionError
    return pow(value, -1, PRIME)
