r"""Answers written to stop a verifier: each ends, kills nothing, and leaves the pool as it was.

How late they make a verdict is measured by `python -m benchmarks.verifier`: here the bound is one that a busy machine keeps.
That they delay no other by their own limit is in `test_verifier_pool.py`, where no clock decides.
"""

import importlib.util
import logging
import os
import time
from pathlib import Path

import pytest

from benchmarks.hostile_answers import ALLOWED_S, HOSTILE, TIMEOUT_S, judged
from prefixrl.scorer.verifier_child import MEMORY_BYTES
from prefixrl.scorer.verifier_pool import START_DEADLINE_S, VerifierPool

log = logging.getLogger(__name__)

BUSY_S = 20.0
"""What a machine that does other work may take more."""
CHILDREN = 2


def peak_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


@pytest.mark.timeout(600)
def test_every_hostile_answer_ends_and_so_does_the_one_beside_it() -> None:
    assert len(HOSTILE) >= 50
    assert importlib.util.find_spec("gmpy2"), "it changes what sympy does: part of the dev extra"
    descriptors = len(os.listdir("/proc/self/fd"))
    pool = VerifierPool(CHILDREN, TIMEOUT_S)
    slowest_s, peak = 0.0, 0
    statuses: dict[str, str] = {}
    try:
        judged(pool, {0: (r"\ln x", "x"), 1: (r"\ln x", "y")})
        for number, (name, answer) in enumerate(HOSTILE.items(), start=1):
            hostile, plain = 2 * number, 2 * number + 1
            asked = {hostile: (answer, r"\ln y+7"), plain: (rf"{number}+\ln y", rf"\ln y+{number}")}
            found = judged(pool, asked)
            verdict, elapsed_s = found[hostile]
            statuses[name] = verdict.status
            assert verdict.reward == 0.0, name
            assert verdict.status in ("ok", "parse_fail", "timeout"), (name, verdict)
            assert elapsed_s <= TIMEOUT_S + ALLOWED_S + BUSY_S, name
            right, waited_s = found[plain]
            assert (right.reward, right.status) == (1.0, "ok"), name
            assert waited_s <= TIMEOUT_S + ALLOWED_S + BUSY_S, name
            slowest_s = max(slowest_s, elapsed_s, waited_s)
            peak = max([peak, *map(peak_bytes, pool.child_pids)])
        assert peak < MEMORY_BYTES
        # One that was killed is replaced: both judge again, and at the same time.
        last = judged(pool, {key: (rf"{key}+\ln z", rf"\ln z+{key}") for key in range(1000, 1040)})
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
