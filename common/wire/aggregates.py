"""One score of an answer from those of its steps. Pure."""

import math
import statistics
from collections.abc import Sequence
from typing import Literal

Aggregate = Literal["last", "min", "mean", "product"]


def aggregated(scores: Sequence[float], how: Aggregate) -> float:
    """Return one score from those of the steps, 0 without any."""
    if not scores:
        return 0.0
    match how:
        case "last":
            return scores[-1]
        case "min":
            return min(scores)
        case "mean":
            return statistics.fmean(scores)
        case "product":
            return math.prod(scores)
