r"""Answers written to stop a verifier: each ends, kills nothing, and leaves the pool as it was.

How late they make a verdict is measured by `python -m benchmarks.verifier`: here the bound is one that a busy machine
keeps. That they delay no other by their own limit is in `test_pool.py`, where no clock decides."""

import importlib.util
import logging
import os
import time
from pathlib import Path

import pytest

from benchmarks.hostile_answers import ALLOWED_S, HOSTILE, TIMEOUT_S, judged
from prefixrl.scorer.verifier.child import MEMORY_BYTES
from prefixrl.scorer.verifier.pool import START_DEADLINE_S, VerifierPool
from prefixrl.scorer.verifier.rules.verify import Judgement

log = logging.getLogger(__name__)

BUSY_S = 20.0
"""Additional time on a machine that does other work."""
CHILDREN = 2
TRIES = 20
"""For ordinary answers: other work on the machine may use up the limit of one, but not of half of them."""


def judged_in_time(
    pool: VerifierPool, asked: dict[int, tuple[str, str]]
) -> dict[int, tuple[Judgement, float]]:
    """Verdicts and seconds of ordinary answers, asked again where the time was up."""
    results: dict[int, tuple[Judgement, float]] = {}
    for _ in range(TRIES):
        results |= judged(pool, {key: each for key, each in asked.items() if key not in results})
        late = {key for key in asked if results[key][0].status == "timeout"}
        if not late:
            break
        results = {key: each for key, each in results.items() if key not in late}
    assert not asked.keys() - results.keys(), f"late {TRIES} times: {asked.keys() - results.keys()}"
    return results


def peak_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_every_hostile_answer_ends_and_so_does_the_one_beside_it() -> None:
    assert len(HOSTILE) >= 50
    assert importlib.util.find_spec("gmpy2"), "it changes what sympy does: part of the dev extra"
    descriptors = len(os.listdir("/proc/self/fd"))
    pool = VerifierPool(CHILDREN, TIMEOUT_S)
    slowest_s, peak, late = 0.0, 0, 0
    statuses: dict[str, str] = {}
    try:
        judged(pool, {0: (r"\ln x", "x"), 1: (r"\ln x", "y")})
        for number, (name, answer) in enumerate(HOSTILE.items(), start=1):
            hostile, plain = 2 * number, 2 * number + 1
            asked = {hostile: (answer, r"\ln y+7"), plain: (rf"{number}+\ln y", rf"\ln y+{number}")}
            verdicts = judged(pool, asked)
            verdict, elapsed_s = verdicts[hostile]
            statuses[name] = verdict.status
            assert verdict.reward == 0.0, name
            assert verdict.status in ("ok", "parse_fail", "timeout"), (name, verdict)
            assert elapsed_s <= TIMEOUT_S + ALLOWED_S + BUSY_S, name
            right, waited_s = verdicts[plain]
            if right.status == "timeout":
                late += 1
                ((right, _),) = judged_in_time(pool, {plain: asked[plain]}).values()
            assert (right.reward, right.status) == (1.0, "ok"), name
            assert waited_s <= TIMEOUT_S + ALLOWED_S + BUSY_S, name
            slowest_s = max(slowest_s, elapsed_s, waited_s)
            peak = max([peak, *map(peak_bytes, pool.child_pids)])
        assert late < len(HOSTILE) / 2, "answers beside hostile ones have no time of their own"
        assert peak < MEMORY_BYTES
        # One that was killed is replaced: both judge again, and at the same time.
        asked = {key: (rf"{key}+\ln z", rf"\ln z+{key}") for key in range(1000, 1040)}
        last = judged_in_time(pool, asked)
        assert {verdict.reward for verdict, _ in last.values()} == {1.0}
        deadline = time.monotonic() + START_DEADLINE_S
        while len(pool.child_pids) < CHILDREN or pool.next_deadline_s is not None:
            assert time.monotonic() < deadline, "the pool is not back at full size"
            pool.wait(0.05)
            assert pool.poll() == []
    finally:
        pool.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    log.info("slowest %.2f s, peak %d MiB, %s", slowest_s, peak >> 20, statuses)
