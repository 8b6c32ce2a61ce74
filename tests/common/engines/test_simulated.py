"""The simulated engine: seats, rows that wait for one, and what it reports of them."""

import math
from statistics import NormalDist

import numpy as np
import pytest
import torch

from benchmarks.snapshots import snapshot_of
from prefixrl.common.config.workers.simulated import SimulatedConfig
from prefixrl.common.engines import simulated
from prefixrl.common.engines.interface.base import Job, digest_of, room_of
from prefixrl.common.engines.simulated import SimulatedEngine
from prefixrl.common.wire.messages.groups import Sampling
from support.fakes import SteppedClock

SAMPLING = Sampling(temperature=1.0, max_new_tokens=2)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> SteppedClock:
    stepped = SteppedClock()
    monkeypatch.setattr(simulated, "time", stepped)
    return stepped


def job(key: str, *draws: float) -> Job:
    """A job of a row per draw."""
    text = tuple(np.asarray([index], dtype=np.int32) for index in range(len(draws)))
    return Job(key, text, np.tile(np.asarray(draws)[:, None], 2), SAMPLING, frozenset(), text)


def engine_of(seats: int, sigma: float = 1.0, limit_s: float | None = None) -> SimulatedEngine:
    config = SimulatedConfig(
        completion_s=4.0, completion_sigma=sigma, completion_limit_s=limit_s, seats=seats
    )
    return SimulatedEngine("scorer", config)


def draw_of(lasts_s: float) -> float:
    """The draw with which a row takes so long."""
    return NormalDist().cdf(math.log(lasts_s / 4.0))


def finished(engine: SimulatedEngine, most: int = 1000) -> list[str]:
    """Names of the jobs in the order in which they end."""
    results: list[str] = []
    for _ in range(most):
        results += [each.key for each in engine.step(1.0)]
    return results


def test_a_seat_is_taken_again_the_moment_its_row_ends(clock: SteppedClock) -> None:
    engine = engine_of(2)
    engine.submit(job("a", draw_of(1.0), draw_of(10.0)))
    engine.submit(job("b", draw_of(3.0), draw_of(6.0)))
    engine.submit(job("c", draw_of(5.0)))
    assert (engine.waiting_rows, engine.rows_left("a"), engine.rows_left("b")) == (3, 2, 2)
    began_s = clock.monotonic()
    assert finished(engine, 40) == ["a", "b", "c"]
    # One seat: 10 s of a, then 5 s of c; the other: 1 + 3 + 6. Nobody waited for a's longest row.
    assert engine.busy_row_s == pytest.approx(25.0, rel=1e-4)
    assert clock.monotonic() - began_s < 17.0 and engine.rows_left("a") == 0


def test_the_share_of_seats_is_true_when_one_row_of_32_runs_on(clock: SteppedClock) -> None:
    engine = engine_of(32)
    engine.submit(job("a", *[draw_of(1.0)] * 31, draw_of(20.0)))
    engine.step(2.0)
    clock.sleep(19.0 - 1.0)
    began_s, since_s = engine.busy_row_s, clock.monotonic()
    assert began_s == pytest.approx(31 * 1.0 + 19.0, rel=1e-3) and engine.rows_left("a") == 1
    clock.sleep(0.5)
    assert (engine.busy_row_s - began_s) / (32 * (clock.monotonic() - since_s)) == pytest.approx(
        1 / 32
    )


def test_rows_take_lognormal_times_up_to_the_limit() -> None:
    engine = engine_of(1000, limit_s=9.0)
    engine.submit(job("a", *[(index + 0.5) / 999 for index in range(999)]))
    finished(engine, 2000)
    normal, most = NormalDist(), math.log(9.0 / 4.0)
    mean_s = 4.0 * math.exp(0.5) * normal.cdf(most - 1.0) + 9.0 * (1 - normal.cdf(most))
    assert engine.busy_row_s / 999 == pytest.approx(mean_s, rel=5e-3)


def test_a_job_can_be_dropped_until_one_of_its_rows_has_a_seat() -> None:
    engine = engine_of(2, sigma=0.0)
    for key in "abc":
        engine.submit(job(key, 0.5, 0.5))
    assert not engine.cancel("a") and not engine.cancel("unknown")
    assert engine.cancel("b") and not engine.cancel("b") and engine.waiting_rows == 2
    assert finished(engine, 20) == ["a", "c"]


@pytest.mark.parametrize(
    ("seats", "room"), [(1, 2), (2, 3), (16, 24), (256, 384), (1024, 1536), (8192, 8192)]
)
def test_half_the_seats_again_wait_for_one(seats: int, room: int) -> None:
    assert room_of(seats) == room


def test_its_digests_are_those_of_its_tensors() -> None:
    engine = SimulatedEngine("rollout", SimulatedConfig())
    assert engine.digest() == digest_of(engine.weights()) == digest_of({"weight": torch.zeros(4)})
    given = snapshot_of(
        3, {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(5, dtype=torch.bfloat16)}
    )
    engine.install(given)
    assert engine.digest() == digest_of(engine.weights()) == given.manifest.digest
    assert engine.checksum().follows == "snapshot"
