"""A cache of greedy completions, so that the target completes no row twice. Pure.

    job ──▶ rows neither cached nor under way, once each ──▶ engine ── written ──▶ every job that waits for them

A greedy completion follows from the row's tokens, the decoding settings and the model, which a
scorer never changes. A row that the engine completes for another job is waited for. Sampled rows
have draws of their own: their jobs pass unchanged, and so does every job without
`scorer.cache_bytes`.
"""

from collections import OrderedDict
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

import numpy as np

from prefixrl.common.engines.interface.base import Continuation, Job, TokenIds
from prefixrl.common.wire.messages.groups import Finish, Sampling

ENTRY_BYTES = 512
"""Memory of an entry besides its token ids and text."""

Key = tuple[bytes, Sampling, frozenset[int], bool]
"""The row's token ids (prompt, prefix), the decoding settings, the stop tokens, and True if it is watched; no digest,
since two may be equal."""


@dataclass(frozen=True)
class Completion:
    """The target's completion of one row."""

    tokens: TokenIds
    finish: Finish
    was_cached: bool = False
    """True if the engine wrote no token of it for this row."""
    text: str | None = None
    """The completion as text, from an engine that returns text instead of ids."""
    error: str = ""
    """Reason of a missing completion, where `finish` is `error`."""
    prompt_tokens: int | None = None
    """Tokens of the row as an endpoint counts them; None where it is continued here."""
    was_stopped: bool = False
    """True if it ends because its answer was complete."""


class GreedyCache:
    """Completions by key, up to `limit_bytes`; the least recently used is dropped first."""

    def __init__(self, limit_bytes: int) -> None:
        self._entries: OrderedDict[Key, Completion] = OrderedDict()
        self.limit_bytes = limit_bytes
        self.size_bytes = 0

    def get(self, key: Key) -> Completion | None:
        """Return the completion of a key, if it is cached."""
        completion = self._entries.get(key)
        if completion is not None:
            self._entries.move_to_end(key)
        return completion

    def put(self, key: Key, completion: Completion) -> None:
        """Keep a completion, unless its key has one or it is larger than the whole cache."""
        entry_bytes = _entry_bytes(key, completion)
        if key in self._entries or entry_bytes > self.limit_bytes:
            return
        self._entries[key] = completion
        self.size_bytes += entry_bytes
        while self.size_bytes > self.limit_bytes:
            self.size_bytes -= _entry_bytes(*self._entries.popitem(last=False))


def _entry_bytes(key: Key, completion: Completion) -> int:
    text_bytes = len((completion.text or "").encode())
    return len(key[0]) + completion.tokens.nbytes + text_bytes + ENTRY_BYTES


@dataclass
class _OpenJob:
    """A job under way."""

    keys: tuple[Key, ...]
    """One per row."""
    asked_rows: tuple[int, ...]
    """Rows that the engine completes for this job."""
    completed: dict[Key, Completion]
    """Completions so far, kept here because the cache may drop them before the job is done."""
    awaited: set[Key]
    """Keys without a completion: those of `asked_rows`, and those that the engine completes for another job."""

    def completions(self) -> list[Completion]:
        """Return the completions of all rows."""
        asked_rows = set(self.asked_rows)
        return [
            self.completed[key]
            if row in asked_rows
            else replace(self.completed[key], was_cached=True)
            for row, key in enumerate(self.keys)
        ]


class Completions:
    """The cache, and the jobs that are answered partly from it, partly by what the engine writes for other jobs."""

    def __init__(self, limit_bytes: int) -> None:
        self._cache = GreedyCache(limit_bytes)
        self._open_jobs: dict[str, _OpenJob] = {}
        self._under_way: dict[Key, str] = {}
        """Keys that the engine completes, with the job that asked for them."""
        self._complete: list[tuple[str, list[Completion]]] = []

    def missing_part(self, job: Job) -> Job | None:
        """Return the engine's part of a job, None if it has none; `complete_jobs` has the job when all is there."""
        if job.sampling.temperature > 0 or not self._cache.limit_bytes:
            return job
        keys = _keys_of(job)
        completed: dict[Key, Completion] = {}
        for key in keys:
            completion = self._cache.get(key)
            if completion is not None:
                completed[key] = completion
        asked_rows = _first_rows(keys, completed.keys() | self._under_way.keys())
        self._under_way |= {keys[row]: job.key for row in asked_rows}
        awaited = set(keys) - completed.keys()
        self._open_jobs[job.key] = _OpenJob(keys, tuple(asked_rows), completed, awaited)
        self._complete_answered()
        return _part(job, asked_rows) if asked_rows else None

    def is_awaited(self, key: str) -> bool:
        """Return True if another job waits for rows of the job of this key."""
        return any(
            self._under_way.get(row_key) == key
            for name, job in self._open_jobs.items()
            if name != key
            for row_key in job.awaited
        )

    def forget_job(self, key: str) -> None:
        """Drop the job of this key, which will not be done; no other job may wait for it."""
        if (job := self._open_jobs.pop(key, None)) is not None:
            for row in job.asked_rows:
                del self._under_way[job.keys[row]]

    def add_written(self, key: str, written: Sequence[Continuation]) -> None:
        """Take the engine's completions of its part of a job."""
        job = self._open_jobs.get(key)
        if job is None:
            self._complete.append((key, [_completion(row, row.tokens) for row in written]))
            return
        fresh: dict[Key, Completion] = {}
        for row, continuation in zip(job.asked_rows, written, strict=True):
            # A copy: a row of a job's matrix would keep the matrix.
            fresh[job.keys[row]] = _completion(continuation, continuation.tokens.copy())
        for row_key, completion in fresh.items():
            del self._under_way[row_key]
            # An error may pass: the same row is asked again the next time.
            if completion.finish != "error":
                self._cache.put(row_key, completion)
        for waiting in self._open_jobs.values():
            for row_key in waiting.awaited & fresh.keys():
                waiting.completed[row_key] = fresh[row_key]
            waiting.awaited -= fresh.keys()
        self._complete_answered()

    def _complete_answered(self) -> None:
        for key in [key for key, job in self._open_jobs.items() if not job.awaited]:
            self._complete.append((key, self._open_jobs.pop(key).completions()))

    def complete_jobs(self) -> list[tuple[str, list[Completion]]]:
        """Return the jobs that are complete since the last call, each with the completions of all of its rows."""
        complete, self._complete = self._complete, []
        return complete


def _completion(written: Continuation, tokens: TokenIds) -> Completion:
    return Completion(
        tokens,
        written.finish,
        text=written.text,
        error=written.error,
        prompt_tokens=written.prompt_tokens,
        was_stopped=written.was_stopped,
    )


def _keys_of(job: Job) -> tuple[Key, ...]:
    is_watched = [watch is not None for watch in job.watches] or [False] * len(job.rows)
    return tuple(
        (row.tobytes(), job.sampling, job.stop_tokens, watched)
        for row, watched in zip(job.rows, is_watched, strict=True)
    )


def _first_rows(keys: Sequence[Key], unasked: AbstractSet[Key]) -> list[int]:
    """Return the rows that the engine must complete: of equal rows the first, without `unasked` ones."""
    first: dict[Key, int] = {}
    for row, key in enumerate(keys):
        if key not in unasked:
            first.setdefault(key, row)
    return list(first.values())


def _part(job: Job, rows: list[int]) -> Job:
    """Return a job of some rows of another, or the job itself if these are all of its rows."""
    if len(rows) == len(job.rows):
        return job
    return replace(
        job,
        rows=tuple(job.rows[row] for row in rows),
        uniforms=job.uniforms[np.asarray(rows)],
        script=None if job.script is None else tuple(job.script[row] for row in rows),
        watches=tuple(job.watches[row] for row in rows) if job.watches else (),
    )
