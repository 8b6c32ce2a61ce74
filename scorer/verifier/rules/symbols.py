"""Readings of a text by math-verify's parser, and their equality; may cost seconds."""

import logging
from fractions import Fraction
from math import isfinite
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from sympy import Expr

log = logging.getLogger(__name__)

_RELATIVE = 1e-6
"""Six digits must agree; math-verify compares six decimals."""
_ZERO = 1e-100


def read_expression(text: str) -> tuple[object, ...]:
    """Return an expression, if the whole text is one, and the text; nothing for a blank text.

    math-verify's own search is not used: where a text does not parse, it takes a number or a
    fraction within it.
    """
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
    from latex2sympy2_extended.math_normalization import NormalizationConfig, normalize_latex
    from math_verify.grader import should_treat_as_complex

    config = NormalizationConfig(malformed_operators=True, nits=True, boxed="none")
    plain = normalize_latex(" ".join(text.split()), config).strip()
    if not plain:
        return ()
    conversion = ConversionConfig(lowercase_symbols=False)
    is_real = not should_treat_as_complex(plain)
    try:
        return latex2sympy(
            plain, is_real=is_real, normalization_config=None, conversion_config=conversion
        ), plain
    except MemoryError:
        # Memory is a matter of this process, not of the text.
        raise
    except Exception:
        log.debug("%.200r is no expression", plain, exc_info=True)
        return (plain,)


def are_equal(gold: object, answer: object, margin: Fraction = Fraction(0)) -> bool:
    """Compare two readings; numbers may differ by a margin."""
    from math_verify import verify
    from sympy import Symbol

    if margin and _is_number(gold) and _is_number(answer):
        return abs(complex(gold.evalf()) - complex(answer.evalf())) <= float(margin) * (1 + 1e-9)
    if _has_matrix(gold) or _has_matrix(answer):
        return gold == answer
    if isinstance(gold, Symbol) and isinstance(answer, Symbol):
        return str(gold) == str(answer)
    gold, answer = _with_same_symbols(gold, answer)
    try:
        is_equal = verify(gold, answer, timeout_seconds=None, raise_on_error=True)
        return bool(is_equal) and _is_close(gold, answer)
    except MemoryError:
        raise
    except Exception:
        # Sympy raises any error on pairs that it cannot compare: they are not equal.
        log.debug("a pair could not be compared", exc_info=True)
        return False


def _is_number(reading: object) -> "TypeGuard[Expr]":
    from sympy import Expr

    return isinstance(reading, Expr) and bool(reading.is_number)


def _with_same_symbols(gold: object, answer: object) -> tuple[object, object]:
    """Read `i` as the imaginary unit if both hold it, and take letters below an even root as positive."""
    # math-verify does the first for some forms alone, and finds the root of x^3 unequal to x^{3/2}.
    from sympy import Expr, I, Pow, Rational, Symbol

    if not (isinstance(gold, Expr) and isinstance(answer, Expr)):
        return gold, answer
    units = [
        {symbol for symbol in side.free_symbols if symbol.name == "i"} for side in (gold, answer)
    ]
    changes = dict.fromkeys(units[0] | units[1], I) if all(units) else {}
    roots = {
        power.base
        for power in gold.atoms(Pow)
        if isinstance(power.exp, Rational) and power.exp.q % 2 == 0
    }
    changes |= {symbol: Symbol(symbol.name, positive=True) for symbol in roots & gold.free_symbols}
    return (gold.subs(changes), answer.subs(changes)) if changes else (gold, answer)


def _has_matrix(reading: object) -> bool:
    """Return True for an equation with a matrix, which math-verify finds equal to any other."""
    from sympy import And, MatrixBase, MatrixExpr
    from sympy.core.relational import Relational

    return isinstance(reading, (Relational, And)) and bool(reading.has(MatrixBase, MatrixExpr))


def _is_close(gold: object, answer: object) -> bool:
    """Compare numbers, alone or as elements, more strictly than math-verify does: a rational number is met exactly."""
    from sympy import FiniteSet, Float, MatrixBase, Rational, Tuple, UnevaluatedExpr

    kinds = (FiniteSet, Tuple, MatrixBase)
    if isinstance(gold, kinds) and isinstance(answer, kinds):
        gold_elements, answer_elements = list(gold), list(answer)
        if not (isinstance(gold, FiniteSet) or isinstance(answer, FiniteSet)):
            is_as_long = len(gold_elements) == len(answer_elements)
            return is_as_long and all(map(_is_close, gold_elements, answer_elements))
        return all(
            any(_is_close(element, other) for element in gold_elements) for other in answer_elements
        )
    if isinstance(gold, Rational) and isinstance(answer, Float):
        return bool(Rational(str(answer)) == gold)
    if not (_is_number(gold) and _is_number(answer)):
        return True
    try:
        numbers = complex(gold), complex(answer)
        largest = max(map(abs, numbers))
        return (
            not isfinite(largest)
            or largest < _ZERO
            or abs(numbers[0] - numbers[1]) <= _RELATIVE * largest
            # A percent sign, which may be left out.
            or bool(gold.has(UnevaluatedExpr) or answer.has(UnevaluatedExpr))
        )
    except (TypeError, OverflowError):  # too large for a float
        return True
