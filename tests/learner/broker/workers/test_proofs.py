"""A version is proved by the change of logprobs where that can be seen, else by the checksum."""

import math
import statistics

import numpy as np
import pytest
from numpy.typing import NDArray

from prefixrl.common.wire.messages.weights import EngineChecksum
from prefixrl.learner.broker.workers import proofs
from prefixrl.learner.broker.workers.proofs import Checksums, judge, mismatch, slope

POSITIONS, CHANNELS, VOCABULARY = 1024, 64, 64
MAGNITUDE = 25.0
TOLERANCE = 0.2
VERSIONS = 200
STEPS = 8


def bfloat16(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rounded to nearest, as an engine keeps its logits."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


class Sides:
    """A head that Adam trains, scored by a learner and by an engine of other kernels: bf16 logits, 1 % noise on each.

    Half of the noise is the same for every version, as of a kernel that adds up in another order; half is fresh.
    """

    def __init__(self, lr: float) -> None:
        self.random = np.random.default_rng(3)
        self.hidden = self.random.standard_normal((POSITIONS, CHANNELS)).astype(np.float32)
        self.head = self.random.standard_normal((CHANNELS, VOCABULARY)).astype(np.float32)
        logits = self.hidden @ self.head
        self.head *= MAGNITUDE / np.abs(logits).max(axis=1).mean()
        logits = self.hidden @ self.head
        drawn = logits + self.random.gumbel(size=logits.shape)
        self.tokens = drawn.argmax(axis=1)
        self.constant = self.random.standard_normal((2, *logits.shape)).astype(np.float32)
        self.lr = lr

    def train(self) -> None:
        """One version: every weight moves by at most the learning rate per step."""
        moved = self.random.uniform(-1.0, 1.0, self.head.shape).astype(np.float32)
        self.head = self.head + STEPS * self.lr * moved

    def learner(self) -> NDArray[np.float32]:
        return self._scored(self.head, self.constant[0])

    def engine(self, head: NDArray[np.float32]) -> NDArray[np.float32]:
        return self._scored(head, self.constant[1])

    def _scored(
        self, head: NDArray[np.float32], constant: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        logits = self.hidden @ head
        fresh = self.random.standard_normal(logits.shape).astype(np.float32)
        logits = bfloat16(logits * (1.0 + 0.01 * (constant + fresh) / math.sqrt(2.0)))
        top = logits.max(axis=1, keepdims=True)
        table = logits - top - np.log(np.exp(logits - top).sum(axis=1, keepdims=True))
        picked: NDArray[np.float32] = table[np.arange(POSITIONS), self.tokens].astype(np.float32)
        return picked


@pytest.mark.parametrize(("lr", "seen"), [(5e-7, 0), (2.5e-4, None), (2e-2, VERSIONS)])
def test_right_versions_are_admitted_and_the_version_before_never_is(
    lr: float, seen: int | None
) -> None:
    """With logits of 25 in bfloat16. Where the logprobs decide nothing, the checksum does, and is never wrong."""
    sides, checksums, proved = Sides(lr), Checksums(), 0
    head, learner = sides.head, sides.learner()
    engine = sides.engine(head)
    for version in range(1, VERSIONS + 1):
        sides.train()
        now = sides.learner()
        right = judge(sides.engine(sides.head), now, (engine, learner), TOLERANCE)
        stale = judge(sides.engine(head), now, (engine, learner), TOLERANCE)
        assert right.outcome != "refused", (version, right)
        assert stale.outcome != "proved", (version, stale)
        if right.outcome == "unclear":
            sums = EngineChecksum(
                f"sum {version}", "unknown", before=f"sum {version - 1}", layout="l"
            )
            assert checksums.objection(f"d{version}", sums, f"d{version - 1}") is None
            checksums.admit(f"d{version}", sums)
            old = EngineChecksum(
                f"sum {version - 1}", "unknown", before=f"sum {version - 1}", layout="l"
            )
            assert checksums.objection(f"d{version}", old, f"d{version - 1}")
        proved += right.outcome == "proved"
        head, learner, engine = sides.head, now, sides.engine(sides.head)
    assert seen is None or proved == seen


def slow_slope(engine: list[float], learner: list[float]) -> tuple[float, float]:
    """The textbook's sums, position by position."""
    top = bottom = 0.0
    for y, x in zip(engine, learner, strict=True):
        top += x * y
        bottom += x * x
    value = top / bottom
    even = uneven = 0.0
    for y, x in zip(engine, learner, strict=True):
        even += (y - value * x) ** 2
        uneven += ((y - value * x) * x) ** 2
    return value, max(math.sqrt(even / (len(engine) - 1) / bottom), math.sqrt(uneven) / bottom)


def test_slope_and_error_are_those_of_the_slow_sums() -> None:
    random = np.random.default_rng(1)
    learner = random.standard_normal(200)
    for noise in (0.0, 0.3, np.abs(learner)):
        engine = 0.9 * learner + noise * random.standard_normal(200)
        apart = 0.1 * random.standard_normal(200)
        actual = slope(engine, learner, apart)
        assert (actual.value, actual.error) == pytest.approx(
            slow_slope(list(engine), list(learner)), abs=1e-12
        )
        squares = [sum(float(each) ** 2 for each in values) for values in (apart, learner)]
        assert actual.shrinkage == pytest.approx(2 * squares[0] / squares[1])


@pytest.mark.parametrize("positions", [2, 1000, 1001])
def test_the_mismatch_is_that_of_nine_positions_in_ten(positions: int) -> None:
    random = np.random.default_rng(2)
    engine, learner = (random.standard_normal(positions).astype(np.float32) for _ in range(2))
    differences = [
        abs(float(one) - float(other)) for one, other in zip(engine, learner, strict=True)
    ]
    assert mismatch(engine, learner) == pytest.approx(
        statistics.quantiles(differences, n=10, method="inclusive")[8]
    )


@pytest.mark.parametrize("holds", [1.0, 0.0])
def test_a_verdict_is_wrong_as_seldom_as_stated(holds: float) -> None:
    """At the largest error that still gives one, 2 standard errors in place of 4.75, so that misses can be counted."""
    random, wrong, times, deviations = np.random.default_rng(4), 0, 4000, 2.0
    noise = proofs.LARGEST_ERROR / deviations * math.sqrt(POSITIONS)
    for _ in range(times):
        learner = random.standard_normal(POSITIONS)
        actual = slope(
            holds * learner + noise * random.standard_normal(POSITIONS), learner, 0.0 * learner
        )
        wrong += abs(actual.value - holds) > deviations * actual.error
    assert wrong / times == pytest.approx(
        2 * (1 - statistics.NormalDist().cdf(deviations)), rel=0.25
    )
    assert 1 - statistics.NormalDist().cdf(proofs.DEVIATIONS) < 1.1e-6


def test_what_the_learners_own_noise_may_have_hidden_is_not_refused() -> None:
    """Its change is all rounding: the right engine's cannot follow it."""
    random = np.random.default_rng(7)
    noise = [0.01 * random.standard_normal(POSITIONS).astype(np.float32) for _ in range(4)]
    text = -random.random(POSITIONS).astype(np.float32)
    judged = judge(text + noise[0], text + noise[1], (text + noise[2], text + noise[3]), TOLERANCE)
    assert judged.slope is not None and judged.slope.is_seen and judged.outcome == "unclear"


def logprobs(*values: float) -> NDArray[np.float32]:
    return np.asarray(values, dtype=np.float32)


BEFORE = logprobs(-1.0, -2.0, -3.0), logprobs(-1.0, -2.0, -3.0)


@pytest.mark.parametrize(
    ("engine", "learner", "outcome"),
    [
        ((-1.1, -2.2, -3.1), (-1.1, -2.2, -3.1), "proved"),
        ((-1.0, -2.0, -3.0), (-1.1, -2.2, -3.1), "refused"),
        ((-1.05, -2.1, -3.05), (-1.1, -2.2, -3.1), "refused"),  # half of the layers are there
        ((-1.0, -2.0, -3.0), (-1.0, -2.0, -3.0), "unclear"),
        ((-1.5, -2.6, -3.9), (-1.0, -2.0, -3.0), "refused"),
        ((math.nan, -2.0, -3.0), (-1.0, -2.0, -3.0), "refused"),
        ((-math.inf, -2.0, -3.0), (-math.inf, -2.0, -3.0), "refused"),
    ],
    ids=[
        "right",
        "stale",
        "half",
        "nothing changed",
        "another model",
        "no number",
        "two infinities",
    ],
)
def test_an_engine_is_judged_by_its_change(
    engine: tuple[float, ...], learner: tuple[float, ...], outcome: str
) -> None:
    assert judge(logprobs(*engine), logprobs(*learner), BEFORE, 1e-3).outcome == outcome


def test_an_unseen_change_may_be_off_by_three_times_the_mismatch_of_the_proved_version() -> None:
    random = np.random.default_rng(5)
    learner = -random.random(POSITIONS).astype(np.float32)
    noisy = [learner + 0.1 * random.standard_normal(POSITIONS).astype(np.float32) for _ in range(2)]
    moved = learner + 1e-4 * random.standard_normal(POSITIONS).astype(np.float32)
    assert judge(noisy[1], moved, (noisy[0], learner), 1e-3).outcome == "unclear"
    assert judge(noisy[1], moved, None, 1e-3).outcome == "refused"
    assert judge(learner + 1.0, moved, (noisy[0], learner), 1e-3).outcome == "refused"


def test_weights_that_an_installation_did_not_change_are_refused_unless_they_are_the_same() -> None:
    same = EngineChecksum("a", "unknown", before="a", layout="l")
    assert Checksums().objection("d2", same, "d1") == (
        "the checksum of the engine's weights did not change with the installation"
    )
    assert Checksums().objection("d2", same, "d2") is None
    assert "not that of the snapshot" in str(
        Checksums().objection("d2", EngineChecksum("a", "other"), "d1")
    )


def test_two_engines_of_one_layout_must_agree_and_of_two_layouts_need_not() -> None:
    checksums = Checksums()
    checksums.admit("d", EngineChecksum("a", "unknown", before="0", layout="one"))
    assert "another rollout's is a" in str(
        checksums.objection("d", EngineChecksum("b", "unknown", before="0", layout="one"), "")
    )
    assert (
        checksums.objection("d", EngineChecksum("b", "unknown", before="0", layout="two"), "")
        is None
    )
