"""A cache of greedy completions, so that the target completes no row twice. Pure.

    job ── ask ──▶ rows not in the cache, once each ──▶ engine ── its result ── answer ──▶ completions of the job

A greedy completion follows from the row's tokens, the decoding settings and the model, which a
scorer never changes. Sampled rows have draws of their own: their jobs pass unchanged, and so does
every job without `scorer.cache_bytes`.
"""

from collections import OrderedDict
from collections.abc import Sequence
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


@dataclass(frozen=True)
class _OpenJob:
    """A job under way."""

    keys: tuple[Key, ...]
    """One per row."""
    cached: dict[Key, Completion]
    """Cached completions, kept here because the cache may drop them before the job is done."""


class Completions:
    """The cache, and the jobs that are answered partly from it."""

    def __init__(self, limit_bytes: int) -> None:
        self._cache = GreedyCache(limit_bytes)
        self._open_jobs: dict[str, _OpenJob] = {}

    def missing_part(self, job: Job) -> Job | None:
        """Return the engine's part of a job, None if all is cached; then call `all_completions` or `forget_job`."""
        if job.sampling.temperature > 0 or not self._cache.limit_bytes:
            return job
        keys = _keys_of(job)
        cached: dict[Key, Completion] = {}
        for key in keys:
            completion = self._cache.get(key)
            if completion is not None:
                cached[key] = completion
        self._open_jobs[job.key] = _OpenJob(keys, cached)
        rows = _first_rows(keys, cached)
        return _part(job, rows) if rows else None

    def forget_job(self, key: str) -> None:
        """Drop the job of this key, which will not be done."""
        self._open_jobs.pop(key, None)

    def all_completions(self, key: str, written: Sequence[Continuation]) -> list[Completion]:
        """Return the completions of all rows of a job. `written` are the engine's completions of its missing part."""
        job = self._open_jobs.pop(key, None)
        if job is None:
            return [_completion(row, row.tokens) for row in written]
        fresh: dict[Key, Completion] = {}
        missing = _first_rows(job.keys, job.cached)
        for row, continuation in zip(missing, written, strict=True):
            # A copy: a row of a job's matrix would keep the matrix.
            fresh[job.keys[row]] = _completion(continuation, continuation.tokens.copy())
        for row_key, completion in fresh.items():
            # An error may pass: the same row is asked again the next time.
            if completion.finish != "error":
                self._cache.put(row_key, completion)
        first_rows = set(missing)
        completions = []
        for row, row_key in enumerate(job.keys):
            if row in first_rows:
                completions.append(fresh[row_key])
            else:
                earlier = job.cached.get(row_key) or fresh[row_key]
                completions.append(replace(earlier, was_cached=True))
        return completions


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


def _first_rows(keys: Sequence[Key], cached: dict[Key, Completion]) -> list[int]:
    """Return the rows that the engine must complete: of equal rows the first, without cached ones."""
    first: dict[Key, int] = {}
    for row, key in enumerate(keys):
        if key not in cached:
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
