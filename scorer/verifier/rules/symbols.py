"""Readings of a text by math-verify's parser, and their equality; may cost seconds.

read        the whole text as one expression; a part of it is never taken for it
are_equal   math-verify's comparison of two readings, and what it rounds away
"""

import logging
from math import isfinite

from prefixrl.scorer.verifier.rules.guards import is_close

log = logging.getLogger(__name__)


def read(text: str) -> tuple[object, ...]:
    """Return an expression, if the whole text is one, and the text; nothing for a blank text.

    math-verify's own search is not used: where a text does not parse, it takes a number or a fraction within it.
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
        return latex2sympy(plain, is_real=is_real, normalization_config=None, conversion_config=conversion), plain
    except MemoryError:
        raise
    except Exception:
        log.debug("%.200r is no expression", plain, exc_info=True)
        return (plain,)


def are_equal(want: object, got: object) -> bool:
    """Compare two readings."""
    from math_verify import verify
    from sympy import Symbol

    if _has_matrix(want) or _has_matrix(got):
        return want == got
    if isinstance(want, Symbol) and isinstance(got, Symbol):
        return str(want) == str(got)
    try:
        # Intervals and inequalities are equivalent; by default math-verify accepts that for a gold inequality only.
        is_equal = verify(want, got, allow_set_relation_comp=True, timeout_seconds=None, raise_on_error=True)
        return bool(is_equal) and _is_close(want, got)
    except MemoryError:
        raise
    except Exception:
        # Sympy raises any error on pairs that it cannot compare: they are not equal.
        log.debug("a pair could not be compared", exc_info=True)
        return False


def _has_matrix(reading: object) -> bool:
    """Return True for an equation with a matrix, which math-verify finds equal to any other."""
    from sympy import And, MatrixBase, MatrixExpr, preorder_traversal
    from sympy.core.relational import Relational

    if not isinstance(reading, (Relational, And)):
        return False
    return any(isinstance(part, (MatrixBase, MatrixExpr)) for part in preorder_traversal(reading))


def _is_close(want: object, got: object) -> bool:
    """Compare numbers, alone or as elements, more strictly than math-verify does."""
    from sympy import Expr, FiniteSet, MatrixBase, Tuple

    kinds = (FiniteSet, Tuple, MatrixBase)
    if isinstance(want, kinds) and isinstance(got, kinds):
        wanted, given = list(want), list(got)
        is_ordered = not (isinstance(want, FiniteSet) or isinstance(got, FiniteSet))
        if is_ordered:
            return len(wanted) == len(given) and all(map(_is_element, wanted, given))
        return all(any(_is_element(one, other) for one in wanted) for other in given)
    if not (isinstance(want, Expr) and isinstance(got, Expr) and want.is_number and got.is_number):
        return True
    try:
        if not (isfinite(abs(complex(want))) and isfinite(abs(complex(got)))):
            return True
        return is_close(complex(want), complex(got)) or _is_percent(want, got)
    except (TypeError, OverflowError):  # too large for a float
        return True


def _is_percent(want: object, got: object) -> bool:
    """Return True where one holds a percent sign, which math-verify may leave out."""
    from sympy import Expr, UnevaluatedExpr

    return any(isinstance(each, Expr) and each.has(UnevaluatedExpr) for each in (want, got))


def _is_element(want: object, got: object) -> bool:
    """Compare elements: a decimal is a rational number exactly or not at all, as it is alone."""
    from sympy import Float, Rational

    if isinstance(want, Rational) and isinstance(got, Float):
        return bool(Rational(str(got)) == want)
    return _is_close(want, got)
