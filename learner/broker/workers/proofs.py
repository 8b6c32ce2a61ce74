"""The proof that an engine computes with a version (docs/weights.md). Pure: arrays in, verdicts out.

Two engines never agree exactly. What differs between their kernels stays from version to version, so compared are
*changes* since the version that this engine proved last:

    slope = sum(engine change x learner change) / sum(learner change^2)      1: the version is there; 0: it is not

Where the change is too small beside the noise of either, the checksum of the engine's weights must decide.
"""

import math
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from prefixrl.common.wire.messages.weights import EngineChecksum

Logprobs = NDArray[np.float32]
Outcome = Literal["proved", "refused", "unclear"]

DEVIATIONS = 4.75
"""Standard errors that a slope may be off: right or stale weights are misjudged with a probability of 1e-6."""
LARGEST_ERROR = 0.5
"""Off by that much, a slope of 1 and one of 0 meet: beyond it nothing is decided."""
LEAST_ERROR = 0.25
"""Off by that much, a slope is always taken: roundings bend a little what they do not cancel."""
QUANTILE = 0.9
TIMES_CALIBRATED = 3.0
CHECKSUMS_KEPT = 64


class Slope(NamedTuple):
    """The engine's change of logprobs in units of the learner's."""

    value: float
    error: float
    """Standard error."""
    shrinkage: float
    """Most that the learner's own noise may have taken from the slope of right weights."""

    @property
    def is_seen(self) -> bool:
        """True if the change stands out of the noise enough for a verdict."""
        return DEVIATIONS * self.error <= LARGEST_ERROR

    @property
    def outcome(self) -> Outcome:
        """The verdict: right weights have a slope of 1, less the shrinkage; the previous weights have 0."""
        margin = max(LEAST_ERROR, DEVIATIONS * self.error)
        if not self.is_seen or 1.0 - self.shrinkage - margin <= self.value < 1.0 - margin:
            return "unclear"
        return "proved" if abs(self.value - 1.0) <= margin else "refused"


class ProbeVerdict(NamedTuple):
    """The verdict of the logprobs alone about an installation."""

    outcome: Outcome
    mismatch: float
    """Difference of engine and learner that nine of ten positions keep below."""
    limit: float
    """Largest mismatch of weights that the slope does not prove."""
    slope: Slope | None
    """None where there is no version before to compare with."""

    @property
    def reason(self) -> str:
        """The figures in words."""
        if self.slope is not None and self.slope.outcome == "refused":
            return f"its logprobs changed by {self.slope.value:.2f} of the learner's change, allowed are 0.75 to 1.25"
        return (
            f"nine of ten probe logprobs differ by up to {self.mismatch:.3g} from the learner's, tolerance "
            f"{self.limit:.3g} (rollout.probe_tolerance)"
        )


def mismatch(engine: Logprobs, learner: Logprobs) -> float:
    """Return the 90th percentile of |engine - learner|: one position may be far off in bfloat16."""
    if not engine.size:
        return 0.0
    # As np.quantile, at a tenth of its time: it is asked for every installation.
    with np.errstate(invalid="ignore"):  # two that are -inf: no number, and refused as such
        apart = np.sort(np.abs(engine.astype(np.float64) - learner))
    place = QUANTILE * (apart.size - 1)
    below, above = apart[math.floor(place)], apart[math.ceil(place)]
    quantile = float(below + (above - below) * (place - math.floor(place)))
    return math.nan if np.isnan(apart[-1]) else quantile


def slope(
    engine_change: NDArray[np.float64],
    learner_change: NDArray[np.float64],
    apart: NDArray[np.float64],
) -> Slope:
    """Return the least-squares slope through the origin with its errors; `apart`: what the two differed by before."""
    squares = float(learner_change @ learner_change)
    if squares == 0.0 or learner_change.size < 2:
        return Slope(0.0, math.inf, 1.0)
    value = float(engine_change @ learner_change) / squares
    residuals = engine_change - value * learner_change
    even = math.sqrt(float(residuals @ residuals) / (learner_change.size - 1) / squares)
    uneven = math.sqrt(float((residuals * learner_change) @ (residuals * learner_change))) / squares
    return Slope(value, max(even, uneven), min(1.0, 2.0 * float(apart @ apart) / squares))


def judge(
    engine: Logprobs, learner: Logprobs, before: tuple[Logprobs, Logprobs] | None, tolerance: float
) -> ProbeVerdict:
    """Judge an installation; `before` holds both logprobs of the version that the engine proved last."""
    distance, limit, fit = mismatch(engine, learner), tolerance, None
    if before is not None and math.isfinite(distance):
        limit = max(tolerance, TIMES_CALIBRATED * mismatch(*before))
        was_engine, was_learner = (each.astype(np.float64) for each in before)
        fit = slope(engine - was_engine, learner - was_learner, was_engine - was_learner)
        if fit.outcome != "unclear":
            return ProbeVerdict(fit.outcome, distance, limit, fit)
    # A distance that is no number is not within the limit.
    return ProbeVerdict("unclear" if distance <= limit else "refused", distance, limit, fit)


class Checksums:
    """Checksums that engines of one layout had with proved weights."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], str] = {}
        """By digest of the weights and layout; the oldest are dropped."""

    def objection(self, digest: str, checksum: EngineChecksum, before: str) -> str | None:
        """Return why a checksum does not prove these weights, else None; in other layouts it must change, and agree."""
        if checksum.follows == "snapshot":
            return None
        if checksum.follows == "other":
            return "the checksum of the engine's weights is not that of the snapshot"
        expected = self._known.get((digest, checksum.layout), checksum.value)
        if expected != checksum.value:
            return f"the checksum of the engine's weights is {checksum.value}, another rollout's is {expected}"
        if before != digest and checksum.before in ("", checksum.value):
            return "the checksum of the engine's weights did not change with the installation"
        return None

    def admit(self, digest: str, checksum: EngineChecksum) -> None:
        """Note the checksum of weights that were admitted."""
        self._known.setdefault((digest, checksum.layout), checksum.value)
        while len(self._known) > CHECKSUMS_KEPT:
            del self._known[next(iter(self._known))]
