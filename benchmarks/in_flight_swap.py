"""The cost of forgetting keys and values of the old weights when new ones come in the middle of answers.

vLLM with the arithmetic example's adapter writes the same answers three times: without an update, with updates that
clear the caches (as in a run), and with updates that keep them. The weights installed are the ones it has, so the work
is the same.

    pause       one installation, from asking vLLM to pause until running answers may go on
    clearing    time of the answers with updates that clear, less that with updates that keep, per update

    python -m benchmarks.in_flight_swap [--quick] --json FILE
"""

import os
import statistics
import time
from pathlib import Path

import click
import numpy as np

from benchmarks.results import Figure, Report, commit, options
from benchmarks.snapshots import snapshot_of
from prefixrl.common.config.load import load
from prefixrl.common.engines.interface.base import Job
from prefixrl.common.engines.vllm.engine import VllmEngine
from prefixrl.common.engines.vllm.setup import resolve
from prefixrl.common.seeds import row_uniforms
from prefixrl.common.wire.messages.groups import Sampling

EXAMPLE = Path(__file__).resolve().parent.parent / "deploy" / "examples" / "arithmetic"
PROMPT_TOKENS, TOKENS, ROWS, UPDATES = 24, 96, 16, 4


class Keeping(VllmEngine):
    """Goes on with the keys and values of the old weights where `is_keeping`."""

    is_keeping = False

    async def _pause(self) -> None:
        await self._llm.pause_generation(mode="keep", clear_cache=not self.is_keeping)


def write(engine: Keeping, updates: int) -> tuple[float, list[float]]:
    """Seconds for the answers, and of each installation in between."""
    weights = engine.weights()
    pauses: list[float] = []
    rows = tuple(np.arange(2, 2 + PROMPT_TOKENS, dtype=np.int32) % 38 + 2 for _ in range(ROWS))
    draws = row_uniforms(3, "prefix", ROWS, TOKENS)
    begun, written = time.monotonic(), engine.progress
    engine.submit(
        Job("answers", rows, draws, Sampling(temperature=1.0, max_new_tokens=TOKENS), frozenset())
    )
    due = [written + ROWS * TOKENS * (update + 1) // (updates + 1) for update in range(updates)]
    while not engine.step(0.002):
        if due and engine.progress >= due[0]:
            due.pop(0)
            snapshot = snapshot_of(len(pauses) + 1, weights)
            started_s = time.monotonic()
            engine.install(snapshot)
            pauses.append(time.monotonic() - started_s)
    return time.monotonic() - begun, pauses


@click.command()
@options
def main(path: Path, quick: bool) -> None:
    """Measure and write the figures."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    at, started_s = commit(), time.monotonic()
    run = load(EXAMPLE / "run.toml")
    engine = Keeping(resolve(run.adapter.model, "rollout", run))
    repeats = 2 if quick else 7
    plain: list[float] = []
    pauses: list[float] = []
    clearing: list[float] = []
    keeping: list[float] = []
    try:
        write(engine, UPDATES)  # warms up
        for _ in range(repeats):
            plain.append(write(engine, 0)[0])
            engine.is_keeping = False
            cleared_s, paused = write(engine, UPDATES)
            engine.is_keeping = True
            kept_s, _ = write(engine, UPDATES)
            pauses += [pause * 1e3 for pause in paused]
            clearing.append(cleared_s)
            keeping.append(kept_s)
    finally:
        engine.close()
    costs = [
        1e3 * (cleared - kept) / UPDATES for cleared, kept in zip(clearing, keeping, strict=True)
    ]
    middle, kinds = statistics.median, ("median", "smallest and largest")
    figures = [
        Figure(
            "pause of an update",
            "ms",
            middle(pauses),
            len(pauses),
            (min(pauses), max(pauses)),
            None,
            "",
            None,
            *kinds,
        ),
        Figure(
            "clearing, per update",
            "ms",
            middle(costs),
            len(costs),
            (min(costs), max(costs)),
            middle(plain) * 1e3,
            "all answers without an update",
            middle(costs) / middle(plain) / 1e3,
            *kinds,
        ),
    ]
    settings = {"rows": ROWS, "prompt_tokens": PROMPT_TOKENS, "tokens": TOKENS, "updates": UPDATES}
    raw = {"plain_s": plain, "clearing_s": clearing, "keeping_s": keeping}
    report = Report("in_flight_swap", quick, settings, figures, raw, at)
    report.finish(path, started_s)


if __name__ == "__main__":
    main()
