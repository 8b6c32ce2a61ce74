"""Engines of the arithmetic example's models, jobs for them, and what transformers says about the same tokens."""

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefixrl.common.config.load import load
from prefixrl.common.config.run import RunConfig
from prefixrl.common.engines.embedded.continuous import TransformersEngine
from prefixrl.common.engines.interface.base import Continuation, Job, JobResult, TokenIds
from prefixrl.common.engines.make import make_engine
from prefixrl.common.engines.vllm.engine import VllmEngine
from support.models import engine_jobs
from support.models.versioned import forward
from support.packages import write_package
from support.paths import EXAMPLE

VOCABULARY = 40
END = 1
"""The models' own end-of-turn token."""
NOTHING_IS_COPIED = "plugin.SharedMemoryWeights.receive_weights = lambda self, update: None"
"""A fault to plant: installations succeed and change nothing."""
BLOCK_TOKENS = 32
"""vLLM's cache shares whole blocks; its default on a CPU is longer than any prompt here."""


def config(**vllm: Any) -> RunConfig:
    """The example's run with a section for the rollout's vLLM."""
    run = load(EXAMPLE / "run.toml")
    section = run.rollout.vllm.model_copy(update={"options": {"block_size": BLOCK_TOKENS}, **vllm})
    return run.model_copy(update={"rollout": run.rollout.model_copy(update={"vllm": section})})


@contextmanager
def started(
    model: Path, role: str = "rollout", run: RunConfig | None = None, **vllm: Any
) -> Iterator[VllmEngine]:
    """A vLLM engine of a run, the example's by default; its processes are gone afterwards."""
    engine = make_engine("vllm", str(model), role, run or config(**vllm))
    assert isinstance(engine, VllmEngine)
    try:
        yield engine
    finally:
        engine.close()


def reference(model: Path) -> TransformersEngine:
    """The embedded engine on the same model, in fp32."""
    return TransformersEngine(str(model), "cpu", "float32", 1)


def job(
    key: str,
    *,
    rows: int = 64,
    tokens: int = 12,
    new: int = 16,
    temperature: float = 0.7,
    stops: frozenset[int] = frozenset(),
) -> Job:
    """A job whose rows, random prompts of about `tokens`, and draws follow from its shape, never from its key."""
    random = np.random.Generator(np.random.PCG64(17))
    lengths = random.integers(max(1, tokens - 4), tokens + 4, rows)
    starts = tuple(random.integers(2, VOCABULARY, length).astype(np.int32) for length in lengths)
    return engine_jobs.job(key, starts, engine_jobs.settings(temperature, new), stops)


def texts(result: JobResult) -> list[list[int]]:
    """Token ids per row."""
    return [row.tokens.tolist() for row in result.rows]


def differences(
    model: Any, starts: tuple[TokenIds, ...], rows: tuple[Continuation, ...], temperature: float
) -> NDArray[np.float64]:
    """|engine - forward| of every sampled token."""
    results = []
    for start, row in zip(starts, rows, strict=True):
        whole = np.concatenate([start, row.tokens])
        results.append(np.abs(row.logprobs - forward(model, whole, temperature)[len(start) - 1 :]))
    return np.concatenate(results)


def probe() -> TokenIds:
    """64 tokens, as the learner's."""
    return np.random.Generator(np.random.PCG64(5)).integers(0, VOCABULARY, 64).astype(np.int32)


def plant(folder: Path, fault: str) -> None:
    """Leave a distribution that breaks our plugin in vLLM's processes; it works where `folder` is on the path."""
    source = f"""
        def register():
            import prefixrl.common.engines.vllm.plugin as plugin
            {fault}
    """
    entry_points = "[vllm.general_plugins]\nplanted = planted_fault:register\n"
    write_package(folder, "planted_fault", entry_points, textwrap.dedent(source))
