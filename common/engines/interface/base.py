"""The interface between a worker's loop and an engine: `submit` queues a job, `step` does a piece of work.

Where an engine `takes_runs`, a job's rows are one forward, and no other job changes a bit of their text.
"""

import math
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from prefixrl.common.weights.snapshot import Snapshot, describe
from prefixrl.common.wire.messages.fields import MOST_ROWS
from prefixrl.common.wire.messages.groups import Finish, Sampling
from prefixrl.common.wire.messages.weights import EngineChecksum
from prefixrl.common.wire.messages.worker import ModelDigests, Ready, Usage
from prefixrl.common.wire.packing import Logprobs as Logprobs
from prefixrl.common.wire.packing import ProbeRow
from prefixrl.common.wire.packing import TokenIds as TokenIds

if TYPE_CHECKING:
    import torch


Watch = Callable[[int], bool]
"""Takes the tokens that an engine writes for a row, one by one, and returns True at the token that ends the row."""


@dataclass(frozen=True)
class Job:
    """Rows to continue."""

    key: str
    rows: tuple[TokenIds, ...]
    uniforms: NDArray[np.float64]
    """Draws in [0, 1), shape (rows, max_new_tokens); unused when greedy."""
    sampling: Sampling
    stop_tokens: frozenset[int]
    """Stop token ids. The stop token is kept as the last token of the row."""
    script: tuple[TokenIds, ...] | None = None
    """Text of each row that the `simulated` engine of a scorer returns; None for real engines."""
    masked_tokens: frozenset[int] = frozenset()
    """Ids with probability 0; logprobs are those of the distribution over the others."""
    watches: tuple[Callable[[], Watch] | None, ...] = ()
    """Makers of the rows' watches, None for a row that its tokens alone end; empty: no row is watched. Only engines
    whose record says so (`ends_watched_rows`) obey them."""

    def watch(self, index: int) -> Watch | None:
        """Return a new watch of a row; None for a row that is not watched."""
        make = self.watches[index] if self.watches else None
        return make() if make else None


@dataclass(frozen=True)
class Continuation:
    """Continuation of a row: ids as drawn, their logprobs when sampled, and its end."""

    tokens: TokenIds
    logprobs: Logprobs
    """Empty for scorers, which do not read them."""
    finish: Finish
    spans: tuple[tuple[int, int], ...]
    """Pairs (version, tokens) in order; version 0 is the weights at the start."""
    text: str | None = None
    """Text of an engine that is given text, not ids; `tokens` is then the encoding by its model's tokenizer."""
    error: str = ""
    prompt_tokens: int | None = None
    """Tokens of the row as an endpoint counts them; None where it is continued here."""
    was_stopped: bool = False
    """True if its watch has ended it."""


@dataclass(frozen=True)
class JobResult:
    """A finished job; `rows` in the order of the job's."""

    key: str
    rows: tuple[Continuation, ...]
    elapsed_s: float


@dataclass(eq=False)
class OpenJob:
    """A job with rows that have not ended."""

    job: Job
    rows_left: int
    """Number of rows that have not ended."""
    started_s: float | None = None
    """Time at which its first row took a seat."""
    rows: dict[int, Continuation] = field(default_factory=dict)


class Engine:
    """A model that continues rows of tokens."""

    name: str
    seats = 1
    """Number of rows decoded at once."""
    room = 1
    """Number of rows to submit before they end, so that no seat stays empty."""
    takes_runs = True
    """True if a job's rows are one forward, so that its groups belong together."""
    about = ""
    """Choices that the engine made itself, in words."""

    def __init__(self) -> None:
        self._open: dict[str, OpenJob] = {}
        """Jobs in the order in which they came."""
        self._queue = deque[Any]()
        """Rows that wait for a seat, each with the `entry` of its job."""
        self.progress = 0
        self.tokens = 0

    @property
    @abstractmethod
    def busy_row_s(self) -> float:
        """Row-seconds in a seat so far."""

    @property
    def waiting_rows(self) -> int:
        """Number of submitted rows that wait for a seat."""
        return len(self._queue)

    def rows_left(self, key: str) -> int:
        """Return how many rows of a job have not ended; 0 for an unknown one."""
        return self._open[key].rows_left if key in self._open else 0

    @property
    def waits_for(self) -> str:
        """Endpoint that the engine waits for, and why; "" while it does not wait."""
        return ""

    @property
    def usage(self) -> Usage | None:
        """Requests and tokens used at the endpoint. None for a local engine."""
        return None

    @abstractmethod
    def submit(self, job: Job) -> None:
        """Queue the rows of a job."""

    def cancel(self, key: str) -> bool:
        """Drop a job without a seated row; return False for a job that has begun or is unknown."""
        entry = self._open.get(key)
        if entry is None or entry.started_s is not None:
            return False
        del self._open[key]
        self._queue = deque(row for row in self._queue if row.entry is not entry)
        return True

    def _end_row(
        self, entry: OpenJob, index: int, row: Continuation, now_s: float
    ) -> list[JobResult]:
        """Note the end of a row; return the result of its job if no other row is left."""
        entry.rows[index] = row
        entry.rows_left -= 1
        if entry.rows_left:
            return []
        assert entry.started_s is not None, "a row ends in a seat"
        del self._open[entry.job.key]
        rows = tuple(entry.rows[each] for each in range(len(entry.rows)))
        return [JobResult(entry.job.key, rows, now_s - entry.started_s)]

    @abstractmethod
    def step(self, timeout_s: float) -> list[JobResult]:
        """Work for a bounded time; return the jobs that finished."""


class AdapterEngine(Engine):
    """An engine of a rollout: its weights can be replaced, and it scores given text."""

    _digest = ""
    """Digest of the version installed last, for an engine that holds weights as they are published."""

    @abstractmethod
    def install(self, snapshot: Snapshot) -> None:
        """Replace all weights, for running jobs too; ValueError, changing nothing, unless they fit."""

    @abstractmethod
    def weights(self) -> "dict[str, torch.Tensor]":
        """Return the installed weights by name, tied ones once."""

    def digest(self) -> str:
        """Return the digest of the installed weights, as the learner would publish them."""
        return digest_of(self.weights())

    @abstractmethod
    def score(self, rows: Sequence[ProbeRow]) -> Logprobs:
        """Return the logprobs of the scored tokens of a probe, at temperature 1, end to end."""

    def checksum(self) -> EngineChecksum:
        """Return a checksum of the weights that it computes with; slow, so only where it is needed.

        It is their digest where they stand in memory as they are published.
        """
        digest = self.digest()
        return EngineChecksum(digest, "snapshot" if digest == self._digest else "other")


def room_of(seats: int) -> int:
    """Return the rows to submit to an engine with this many seats that queues rows itself."""
    # Half as many rows as seats wait: they replace ended rows without a round trip.
    return max(seats, min(MOST_ROWS, seats + math.ceil(seats / 2)))


def ready_of(engine: Engine, digests: ModelDigests, version: int, weights_digest: str) -> Ready:
    """Return the Ready of a worker with this engine."""
    return Ready(
        seats=engine.seats,
        room=engine.room,
        takes_runs=engine.takes_runs,
        digests=digests,
        version=version,
        weights_digest=weights_digest,
        engine=engine.name,
        about=engine.about,
    )


def check_fit(
    parameters: "Mapping[str, torch.Tensor]", tensors: "Mapping[str, torch.Tensor]"
) -> None:
    """Raise ValueError unless names, shapes and dtypes of new weights are the model's `own`."""
    if parameters.keys() != tensors.keys():
        raise ValueError(
            f"weights differ in names: {sorted(parameters.keys() ^ tensors.keys())[:4]}"
        )
    for name, tensor in tensors.items():
        shape = parameters[name].shape
        dtype = parameters[name].dtype
        if shape != tensor.shape:
            raise ValueError(
                f"weight {name} has shape {tuple(tensor.shape)}, the model's is {tuple(shape)}"
            )
        if dtype != tensor.dtype:
            raise ValueError(f"weight {name} has dtype {tensor.dtype}, the model's is {dtype}")


def spans_of(versions: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Return the spans of equal versions, token by token, as (version, tokens)."""
    return tuple((version, len(list(run))) for version, run in groupby(versions))


def score_rows(
    logprobs: Callable[[TokenIds, float], Logprobs], rows: Sequence[ProbeRow]
) -> Logprobs:
    """Return the logprobs of a probe, row by row, from those of whole texts."""
    scored = [logprobs(np.concatenate(row), 1.0)[max(0, row[0].size - 1) :] for row in rows]
    return np.concatenate(scored) if scored else np.zeros(0, dtype=np.float32)


def digest_of(tensors: "Mapping[str, torch.Tensor]") -> str:
    """Return the digest of weights, on whatever device, as the learner would publish them."""
    return describe(0, {name: tensor.cpu() for name, tensor in tensors.items()}).digest
