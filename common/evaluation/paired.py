"""The difference of two arms on the same problems, its interval, its chance. Pure."""

import math
from collections.abc import Mapping

import msgspec

from prefixrl.common.evaluation.accuracy import Z_975, percentile_interval, wilson


class Difference(msgspec.Struct, frozen=True):
    """Mean rewards of one arm less those of another, over the problems that both have."""

    mean: float
    ci95: tuple[float, float]
    better: int
    """Problems on which the first arm has the higher mean reward."""
    worse: int
    problems: int
    chance: float
    """Exact McNemar or sign test: chance of so unequal numbers if better and worse were equally likely."""


def difference(one: Mapping[str, float], other: Mapping[str, float]) -> Difference | None:
    """Compare mean rewards by problem; None without a common problem.

    Where each is 0 or 1 the interval is Agresti and Min's (2005), else a percentile bootstrap over problems.
    """
    common = sorted(one.keys() & other.keys())
    if not common:
        return None
    gaps = [one[name] - other[name] for name in common]
    better, worse = sum(gap > 0 for gap in gaps), sum(gap < 0 for gap in gaps)
    is_binary = all(value in (0.0, 1.0) for name in common for value in (one[name], other[name]))
    if is_binary:
        ends = agresti_min(better, worse, len(gaps))
    elif min(gaps) == max(gaps):
        # Without spread: no interval of rewards in [0, 1] needs to be wider than that of a share.
        half = wilson(0, len(gaps))[1]
        ends = max(-1.0, gaps[0] - half), min(1.0, gaps[0] + half)
    else:
        ends = percentile_interval(gaps)
    return Difference(math.fsum(gaps) / len(gaps), ends, better, worse, len(gaps), sign_test(better, worse))


def agresti_min(better: int, worse: int, of: int) -> tuple[float, float]:
    """Return the 95% interval: Wald's, with half a problem more in each of the four cells."""
    gap, total = better - worse, of + 2
    half = Z_975 * math.sqrt(better + worse + 1 - gap * gap / total) / total
    return max(-1.0, gap / total - half), min(1.0, gap / total + half)


def sign_test(better: int, worse: int) -> float:
    """Return the two-sided exact chance of so unequal numbers."""
    tail = sum(math.comb(better + worse, k) for k in range(min(better, worse) + 1))
    return min(1.0, float(2 * tail / 2 ** (better + worse)))
