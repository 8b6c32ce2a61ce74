"""Updates in the middle of answers that vLLM writes.

What wrote a token stands in the token, and the spans say the same.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from benchmarks.snapshots import snapshot_of
from e2e.modes import in_flight_run
from prefixrl.common.engines.interface.base import Job, JobResult, spans_of
from prefixrl.common.engines.vllm.engine import VllmEngine
from prefixrl.common.engines.vllm.setup import resolve
from prefixrl.common.seeds import row_uniforms
from prefixrl.common.weights.snapshot import Snapshot
from prefixrl.common.wire.messages.groups import Sampling
from support.fakes import wait_until
from support.models import versioned
from support.models import vllm_world as world

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),  # of vLLM and what it imports
]

TOKENS = 400
ROWS = 6
STARTS = tuple(np.arange(2, 20 + row, dtype=np.int32) for row in range(ROWS))
Here = tuple[VllmEngine, Path, dict[int, versioned.Tensors]]


@pytest.fixture(scope="module")
def here(vllm_is_there: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Here]:
    folder = versioned.save(tmp_path_factory.mktemp("versioned"))
    with world.started(folder) as engine:
        initial = engine.weights()
        later = {number: versioned.version(initial, number) for number in range(1, 5)}
        yield engine, folder, {0: initial} | later


def crossing(engine: VllmEngine, weights: dict[int, versioned.Tensors]) -> JobResult:
    """A job in which versions 1 to 4 are installed, each after some tokens more."""
    engine.install(snapshot_of(0, weights[0]))
    draws = row_uniforms(3, "prefix", ROWS, TOKENS)
    begun = engine.progress
    engine.submit(
        Job("a", STARTS, draws, Sampling(temperature=1.0, max_new_tokens=TOKENS), frozenset())
    )
    done: list[JobResult] = []

    def has_written(tokens: int) -> bool:
        done.extend(engine.step(0.01))
        return bool(done) or engine.progress >= begun + tokens

    for version in range(1, 5):
        wait_until(lambda tokens=ROWS * 32 * version: has_written(tokens), "more tokens", 120.0)
        engine.install(snapshot_of(version, weights[version]))
    wait_until(lambda: has_written(10**9), "the end of the job", 120.0)
    return done[0]


def test_every_token_is_of_the_version_of_its_span(
    here: Here, report: Callable[[str], None]
) -> None:
    engine, _, weights = here
    rows = crossing(engine, weights).rows
    for row in rows:
        assert row.tokens.size == TOKENS
        assert spans_of(versioned.written_by(row.tokens).tolist()) == row.spans
    assert max(len(row.spans) for row in rows) > 1
    report(f"four updates in {ROWS} answers of {TOKENS} tokens: spans {rows[0].spans}")


def test_nothing_of_the_old_weights_is_left_in_what_follows_a_swap(
    here: Here, report: Callable[[str], None]
) -> None:
    engine, folder, weights = here
    rows = crossing(engine, weights).rows
    gaps = []
    for start, row in zip(STARTS, rows, strict=True):
        place, text = 0, np.concatenate([start, row.tokens])
        for version, size in row.spans:
            expected = versioned.logprobs(folder, weights[version], text, 1.0)[len(start) - 1 :]
            gaps.append(np.abs(expected - row.logprobs)[place : place + size].max())
            place += size
    report(f"logprobs across updates: largest difference {max(gaps):.2g}")
    assert max(gaps) < 1e-3


WRITTEN_TOKENS = 64
"""More than what may still be under way of the version before: less than STREAM_TOKENS of each of the two rows."""


def until_written(engine: "Held", iteration: int) -> None:
    """Wait for tokens of this version in the first answers, then let these stand still until the next one."""
    wait_until(
        lambda: (
            not engine.is_first
            or (engine.newest >= iteration and engine.progress >= engine.begun + WRITTEN_TOKENS)
        ),
        "more tokens",
        120.0,
    )
    if engine.is_first and iteration < in_flight_run.STALENESS:
        engine.stand_still()


class Held(VllmEngine):
    """Its first answers can be made to stand still until new weights are installed."""

    is_first = True
    installed = newest = 0
    begun = 0
    """Progress when the newest version was there and its probe scored, in tokens."""

    def offer(self, seats: int) -> None:
        """Offer no room behind the seats: a group that waits there could not be trained while the first stand still."""
        super().offer(seats)
        self.room = seats

    def stand_still(self) -> None:
        self._call(self._llm.pause_generation(mode="keep", clear_cache=False), 60.0, "pause")

    def install(self, snapshot: Snapshot) -> None:
        super().install(snapshot)
        self.installed = snapshot.version

    def step(self, timeout_s: float) -> list[JobResult]:
        if self.newest < self.installed:
            # Not in `install`: the probe comes after it, and would wait for ever for an engine that stands still.
            self.begun, self.newest = self.progress, self.installed
        done = super().step(timeout_s)
        self.is_first = self.is_first and not done
        if not self._open:
            time.sleep(0.005)
        return done


def test_a_run_records_what_vllm_wrote_across_updates_and_keeps_the_window(
    tmp_path: Path, report: Callable[[str], None]
) -> None:
    here = in_flight_run.world(tmp_path, TOKENS, iterations=6)
    engine = Held(resolve(str(here.model), "rollout", here.config))
    try:
        trained = in_flight_run.run(here, engine, partial(until_written, engine))
        gap = in_flight_run.largest_gap(here)
    finally:
        engine.close()
    assert max(trained.ages) <= in_flight_run.STALENESS and min(trained.ages) >= 0
    rows = [row for group in trained.groups for row in group.prefixes.rows]
    widest = max(rows, key=lambda row: len(row.spans))
    report(f"spans of an answer: {[(span.version, span.tokens) for span in widest.spans]}")
    assert [span.version for span in widest.spans] == [0, 1, 2, 3]
    assert gap < 1e-3
