"""What a worker asks of an engine, whatever stands behind it.

An engine is driven by its worker's loop and owns no thread the loop must know of: `submit` queues a job, `step` does a bounded
piece of work (or waits a bounded time for it) and returns what finished. A job is one forward's rows; the engine never mixes
rows of two jobs in a way that changes their text.
"""

import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from prefixrl.common.config import RunConfig
from prefixrl.common.messages import Finish, Sampling, Usage

TokenIds = NDArray[np.int32]


@dataclass(frozen=True)
class Job:
    """Rows to continue.

    Attributes:
        key: Name of the job, the task it belongs to.
        rows: Token ids each row starts from.
        uniforms: Draws in [0, 1), shape (rows, max_new_tokens); unused when greedy.
        sampling: Temperature and token limit.
        stop_tokens: Ids that end a row; the one that did is the row's last token.
        script: What the `simulated` engine of a scorer "writes", one row each; None for real engines.
    """

    key: str
    rows: tuple[TokenIds, ...]
    uniforms: NDArray[np.float64]
    sampling: Sampling
    stop_tokens: frozenset[int]
    script: tuple[TokenIds, ...] | None = None


@dataclass(frozen=True)
class Finished:
    """One row's continuation: ids as drawn, their logprobs under the sampling distribution, and what ended it.

    An engine of a scorer may leave the logprobs out (an empty array): nobody reads them there.
    """

    tokens: TokenIds
    logprobs: NDArray[np.float32]
    finish: Finish
    spans: tuple[tuple[int, int], ...]
    """(version, tokens) in order: which weights sampled which tokens. Version 0 is what the engine was started with."""
    text: str | None = None
    """What an engine wrote that is given text, not ids; `tokens` is then what its model's tokenizer reads in it."""
    error: str = ""
    """Why there is no continuation, where `finish` is `error`."""


@dataclass(frozen=True)
class JobResult:
    """A finished job; `rows` in the order of the job's."""

    key: str
    rows: tuple[Finished, ...]
    elapsed_s: float


class Engine(Protocol):
    """A model that continues rows of tokens."""

    name: str
    slots: int
    """Jobs that may run at once."""
    progress: int
    """Grows with every decoded token."""
    busy_slot_s: float
    """Slot-seconds spent on jobs so far."""

    @property
    def waits_for(self) -> str:
        """The endpoint an engine waits for, and why; "" while it waits for none."""

    @property
    def usage(self) -> Usage | None:
        """What its endpoint was asked for so far; None where it has none."""

    def submit(self, job: Job) -> None:
        """Queue a job."""

    def cancel(self, key: str) -> bool:
        """Drop a job that has not started; False when it has, or is unknown."""

    def step(self, timeout_s: float) -> list[JobResult]:
        """Work for a bounded time; jobs that finished."""

    def install(self, tensors: dict[str, torch.Tensor], version: int) -> None:
        """Replace all weights; every token sampled from now on is of `version`, and so is all it is computed from.

        Running jobs go on where they stand, and what was cached of the old weights is computed again. Raises ValueError,
        changing nothing, unless names, shapes, dtypes fit.
        """

    def weights(self) -> dict[str, torch.Tensor]:
        """The weights as installed, by name, tied ones once."""

    def logprobs(self, tokens: TokenIds, temperature: float) -> NDArray[np.float32]:
        """Logprob of every token but the first given those before it, shape (tokens - 1,)."""


def spans_of(versions: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Runs of equal versions, token by token, as (version, tokens)."""
    return tuple((version, len(list(run))) for version, run in groupby(versions))


def make_engine(
    kind: str,
    model: str,
    role: str,
    config: RunConfig,
    watch: Callable[[], None] = lambda: None,
) -> Engine:
    """The engine a worker of `role` ("rollout" or "scorer") uses; `auto` takes the best that is installed here.

    `watch` is called while an endpoint is waited for, and may raise what ends the wait.

    Raises:
        UserError: vLLM was asked for and is not there, or its settings cannot be; an endpoint refuses what it is asked.
        DataError: the model cannot be loaded.
        PeerLost: an endpoint does not answer.
    """
    if kind == "simulated":
        from prefixrl.common.engine_simulated import SimulatedEngine

        return SimulatedEngine(role, config.simulated)
    if kind == "openai":
        from prefixrl.common.engine_openai import OpenAIEngine

        return OpenAIEngine(model, config, watch)
    section = config.rollout if role == "rollout" else config.scorer
    device = section.device
    has_cuda = device != "cpu" and torch.cuda.is_available()
    if kind == "vllm" or (kind == "auto" and has_cuda and is_vllm_installed()):
        from prefixrl.common.engine_vllm import VllmEngine
        from prefixrl.common.vllm_setup import resolve

        return VllmEngine(resolve(model, role, config))
    from prefixrl.common.engine_transformers import TransformersEngine

    if device == "auto":
        device = "cuda" if has_cuda else "cpu"
    dtype = config.learner.dtype if role == "rollout" else "auto"
    return TransformersEngine(model, device, dtype, section.threads)


def is_vllm_installed() -> bool:
    """Whether there is a vLLM to import; a mere folder of that name is none."""
    spec = importlib.util.find_spec("vllm")
    return spec is not None and spec.origin is not None
