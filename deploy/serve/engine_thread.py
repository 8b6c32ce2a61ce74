"""An engine in its own thread, which the rows of many clients share.

    coroutine per answer ── a piece of at most PIECE_TOKENS ──▶ thread: jobs of alike pieces ──▶ engine
                ▲ continuation ───────────────────────────────────────────────────────────────────┘

A row is decoded in pieces, and each piece is a job. So new rows can join between two pieces, text is sent while it
grows, and at most one piece is decoded for a client that has disconnected. vLLM's prefix cache keeps what the pieces
share; transformers computes it again.
"""

import asyncio
import queue
import sys
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, count

import msgspec
import numpy as np
from numpy.typing import NDArray

from prefixrl.common.engines.interface.base import Continuation, Engine, Job, TokenIds
from prefixrl.common.errors import PeerLost, PrefixRLError
from prefixrl.common.wire.messages.groups import Sampling

PIECE_TOKENS = 16
"""Few enough tokens that a person can read the text as it arrives."""
STEP_S = 0.002
"""Longest wait for the engine; new rows are noticed after it."""
IDLE_S = 0.1
END_S = 30.0


@dataclass(frozen=True)
class SharedRow:
    """A row to continue."""

    tokens: TokenIds
    uniforms: NDArray[np.float64]
    """Draws in [0, 1), one per new token."""
    sampling: Sampling
    """Its `max_new_tokens` is the limit of the whole row."""
    stop_tokens: frozenset[int]
    masked_tokens: frozenset[int] = frozenset()


@dataclass(frozen=True)
class _Piece:
    row: SharedRow
    future: "Future[Continuation]" = field(default_factory=Future)

    @property
    def kind(self) -> tuple[Sampling, frozenset[int], frozenset[int]]:
        """Pieces of one kind may be one job."""
        return self.row.sampling, self.row.stop_tokens, self.row.masked_tokens

    def settle(self, outcome: Continuation | Exception) -> None:
        """Give the outcome to the coroutine if it still waits."""
        with suppress(InvalidStateError):
            if isinstance(outcome, Exception):
                self.future.set_exception(outcome)
            else:
                self.future.set_result(outcome)


class EngineThread:
    """An engine and the rows that wait for it."""

    def __init__(
        self,
        engine: Engine,
        name: str,
        piece_tokens: int = PIECE_TOKENS,
    ) -> None:
        """Start the thread.

        Args:
            piece_tokens: most tokens of a piece; an endpoint writes a whole answer at once.
        """
        self._engine = engine
        self.name = name
        self.on_fault: Callable[[], None] = lambda: None
        """Called, in the thread, when the engine has failed."""
        self._piece_tokens = piece_tokens
        self.most_positions: int = getattr(engine, "most_positions", None) or sys.maxsize
        self.fault: Exception | None = None
        """Error that ended the thread."""
        self._new: queue.SimpleQueue[_Piece | None] = queue.SimpleQueue()
        self._waiting: deque[_Piece] = deque()
        self._open: dict[str, list[_Piece]] = {}
        self._keys = map(str, count())
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name=f"{name}-engine", daemon=True)
        self._thread.start()

    @property
    def rows(self) -> int:
        """Number of rows that wait or decode."""
        return self._new.qsize() + len(self._waiting) + sum(map(len, self._open.values()))

    async def pieces(self, row: SharedRow) -> AsyncGenerator[Continuation, None]:
        """Yield the continuation of a row piece by piece, up to a stop or its limit."""
        limit = row.sampling.max_new_tokens
        tokens = row.tokens
        for decoded in range(0, limit, self._piece_tokens):
            size = min(self._piece_tokens, limit - decoded)
            sampling = msgspec.structs.replace(row.sampling, max_new_tokens=size)
            uniforms = row.uniforms[decoded : decoded + size]
            piece = replace(row, tokens=tokens, uniforms=uniforms, sampling=sampling)
            written = await self._decoded(piece)
            yield written
            if written.finish != "length":
                return
            tokens = np.concatenate([tokens, written.tokens])

    async def _decoded(self, row: SharedRow) -> Continuation:
        if self.fault is not None:
            raise self.fault
        piece = _Piece(row)
        self._new.put(piece)
        if self.fault is not None and not self._thread.is_alive():
            raise self.fault  # the thread ended meanwhile
        return await asyncio.wrap_future(piece.future)

    def close(self) -> None:
        """End the thread; its rows get an error. Raise PeerLost if the engine does not return."""
        self._is_closing = True
        self._new.put(None)
        self._thread.join(END_S)
        if self._thread.is_alive():
            raise PeerLost(f"the engine of the {self.name} did not return within {END_S:g} s")

    # --- in the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._take_new()
                self._submit()
                for result in self._engine.step(STEP_S) if self._open else ():
                    for piece, written in zip(self._open.pop(result.key), result.rows, strict=True):
                        piece.settle(written)
            self.fault = PeerLost("the server ends")
        except Exception as error:  # noqa: BLE001  an engine may raise anything; every waiting client must hear of it
            self.fault = error
            self.on_fault()
        self._take_new()
        for piece in chain(self._waiting, *self._open.values()):
            piece.settle(self.fault)
        self._waiting.clear()
        self._open.clear()

    def _take_new(self) -> None:
        """Take the pieces that arrived; wait a moment if there is no other work."""
        is_idle = not (self._waiting or self._open)
        while True:
            try:
                piece = self._new.get(timeout=IDLE_S) if is_idle else self._new.get_nowait()
            except queue.Empty:
                return
            is_idle = False
            if piece is not None:
                self._waiting.append(piece)

    def _submit(self) -> None:
        """Give waiting pieces to the engine while it has room; drop the pieces of clients that have disconnected."""
        while self._waiting and self._has_room():
            oldest = self._waiting[0]
            most = self._engine.seats if self._engine.takes_runs else 1
            alike = list[_Piece]()
            later = deque[_Piece]()
            for piece in self._waiting:
                if piece.future.cancelled():
                    continue
                (alike if len(alike) < most and piece.kind == oldest.kind else later).append(piece)
            self._waiting = later
            if alike:
                self._begin(alike)

    def _has_room(self) -> bool:
        if self._engine.takes_runs:
            return not self._open  # pieces that come meanwhile share the next job
        return sum(map(len, self._open.values())) < self._engine.room

    def _begin(self, pieces: list[_Piece]) -> None:
        row = pieces[0].row
        key = next(self._keys)
        uniforms = np.stack([each.row.uniforms for each in pieces])
        rows = tuple(each.row.tokens for each in pieces)
        job = Job(
            key, rows, uniforms, row.sampling, row.stop_tokens, masked_tokens=row.masked_tokens
        )
        try:
            self._engine.submit(job)
            self._open[key] = pieces
        except PrefixRLError as error:
            for piece in pieces:
                piece.settle(error)
