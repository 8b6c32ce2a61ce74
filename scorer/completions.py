"""What the target has completed greedily, so that it completes no row twice. Pure: jobs in, smaller jobs out.

    job ── ask ──▶ rows that are not known, once each ──▶ engine ── its result ── answer ──▶ completions of the whole job

A greedy completion follows from the row's tokens, the decoding settings and the model, which a scorer never changes. Sampled
rows have draws of their own: their jobs pass unchanged, and so does every job where no memory was asked for.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from prefixrl.common.engine import Finished, Job, TokenIds
from prefixrl.common.messages import Finish, Sampling

ENTRY_BYTES = 512
"""What Python takes for an entry besides its token ids."""

Key = tuple[bytes, Sampling, frozenset[int]]
"""The row's token ids (prompt, prefix), the decoding settings, the stop tokens: as they are, for two digests may be equal."""


@dataclass(frozen=True)
class Completion:
    """What the target goes on with after one row."""

    tokens: TokenIds
    finish: Finish
    was_cached: bool = False
    """The engine wrote none of it for this row."""
    text: str | None = None
    """What an engine wrote that is given text, not ids."""
    error: str = ""
    """Why there is none, where `finish` is `error`."""


class GreedyCache:
    """Completions by key, of at most so many bytes; what was not asked for longest goes first."""

    def __init__(self, limit_bytes: int) -> None:
        self._entries: OrderedDict[Key, Completion] = OrderedDict()
        self.limit_bytes = limit_bytes
        self.size_bytes = 0

    def get(self, key: Key) -> Completion | None:
        """The completion of a key, if it is known."""
        found = self._entries.get(key)
        if found is not None:
            self._entries.move_to_end(key)
        return found

    def put(self, key: Key, completion: Completion) -> None:
        """Keep a completion, unless its key has one; one larger than the whole cache is not kept."""
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
class _Asked:
    """A job under way."""

    keys: tuple[Key, ...]
    """Of every row."""
    known: dict[Key, Completion]
    """Held from the beginning: the cache may drop them before the job is done."""


class Completions:
    """The cache, and the jobs that are to be answered partly from it."""

    def __init__(self, limit_bytes: int) -> None:
        self._cache = GreedyCache(limit_bytes)
        self._asked: dict[str, _Asked] = {}

    def ask(self, job: Job) -> Job | None:
        """What the engine has to do for a job: all of it, a part, or (None) nothing. `answer` must follow, or `forget`."""
        if job.sampling.temperature > 0 or not self._cache.limit_bytes:
            return job
        keys = tuple((row.tobytes(), job.sampling, job.stop_tokens) for row in job.rows)
        known = {key: found for key in keys if (found := self._cache.get(key)) is not None}
        self._asked[job.key] = _Asked(keys, known)
        rows = _first_of_each(keys, known)
        return _part(job, rows) if rows else None

    def forget(self, key: str) -> None:
        """The job of this key will not be done."""
        self._asked.pop(key, None)

    def answer(self, key: str, done: Sequence[Finished]) -> list[Completion]:
        """The completions of the whole job, in the order of its rows; `done`: of what the engine was left to do."""
        asked = self._asked.pop(key, None)
        if asked is None:
            return [_completion(each, each.tokens) for each in done]
        written: dict[Key, Completion] = {}
        missing = _first_of_each(asked.keys, asked.known)
        for row, each in zip(missing, done, strict=True):
            # A copy: a row of a job's matrix would keep the matrix.
            written[asked.keys[row]] = _completion(each, each.tokens.copy())
        for found, completion in written.items():
            if completion.finish != "error":
                self._cache.put(found, completion)
        first = set(missing)
        return [
            written[found]
            if row in first
            else replace(asked.known.get(found) or written[found], was_cached=True)
            for row, found in enumerate(asked.keys)
        ]


def _completion(done: Finished, tokens: TokenIds) -> Completion:
    return Completion(tokens, done.finish, text=done.text, error=done.error)


def _first_of_each(keys: Sequence[Key], known: dict[Key, Completion]) -> list[int]:
    """The rows that the engine has to complete: of equal ones the first, of known ones none."""
    first: dict[Key, int] = {}
    for row, key in enumerate(keys):
        if key not in known:
            first.setdefault(key, row)
    return list(first.values())


def _part(job: Job, rows: list[int]) -> Job:
    """A job of some rows of another, the very same one where they are all."""
    if len(rows) == len(job.rows):
        return job
    return replace(
        job,
        rows=tuple(job.rows[row] for row in rows),
        uniforms=job.uniforms[np.asarray(rows)],
        script=None if job.script is None else tuple(job.script[row] for row in rows),
    )
