"""Jobs of engines, and a run of them to their ends."""

import time
from collections.abc import Iterable, Sequence

import numpy as np

from prefixrl.common.engines.embedded.continuous import TransformersEngine
from prefixrl.common.engines.embedded.fixed_rows import FixedRowsEngine
from prefixrl.common.engines.interface.base import Engine, Job, JobResult, TokenIds
from prefixrl.common.seeds import row_uniforms
from prefixrl.common.wire.messages.groups import Sampling

EmbeddedEngines = TransformersEngine | FixedRowsEngine
TOKENS = 12
PROMPTS = ([5, 9, 2], [7], [11, 3, 3, 8, 40, 22], [60, 2])


def settings(temperature: float = 0.7, tokens: int = TOKENS) -> Sampling:
    return Sampling(temperature=temperature, max_new_tokens=tokens)


def job(
    key: str,
    rows: Sequence[Sequence[int] | TokenIds] = PROMPTS,
    sampling: Sampling | None = None,
    stops: Iterable[int] = (),
    masks: Iterable[int] = (),
    seed: int = 3,
) -> Job:
    """Rows to continue, at temperature 0.7 and by 12 tokens unless `sampling` says otherwise."""
    sampling = sampling or settings()
    return Job(
        key,
        tuple(np.asarray(row, dtype=np.int32) for row in rows),
        row_uniforms(seed, "prefix", len(rows), sampling.max_new_tokens),
        sampling,
        frozenset(stops),
        masked_tokens=frozenset(masks),
    )


def finish(engine: Engine, *jobs: Job, already: Iterable[str] = ()) -> dict[str, JobResult]:
    """Submit jobs and run until these and those there `already` are done; nothing may be left over."""
    for submitted in jobs:
        engine.submit(submitted)
    expected = {submitted.key for submitted in jobs} | set(already)
    results: dict[str, JobResult] = {}
    deadline_s = time.monotonic() + 120.0
    while results.keys() < expected:
        assert time.monotonic() < deadline_s, f"only {sorted(results)} finished"
        results |= {result.key: result for result in engine.step(0.05)}
    assert engine.step(0.0) == [] and engine.waiting_rows == 0
    return results


def same(first: JobResult, right: JobResult) -> bool:
    """Return True if two results are equal bit by bit."""
    return all(
        a.finish == b.finish
        and np.array_equal(a.tokens, b.tokens)
        and np.array_equal(a.logprobs, b.logprobs)
        for a, b in zip(first.rows, right.rows, strict=True)
    )
