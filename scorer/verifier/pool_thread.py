"""A verifier pool in a thread of its own, which feeds its children while the engine takes a step.

loop ── submit ──▶ queue ──▶ thread: VerifierPool ──▶ verdicts ──▶ poll
└─ a byte wakes it ─▶┘
"""

import os
import select
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from prefixrl.common.wire.messages.groups import CodeMode
from prefixrl.scorer.verifier.pool import VerifierPool
from prefixrl.scorer.verifier.rules.verify import Judgement

LONGEST_WAIT_S = 0.5
"""Time after which `trouble` is told anew though nothing happens."""


class PoolThread:
    """A pool that its thread makes, feeds and polls; the other methods never wait. Children die with the thread."""

    def __init__(self, make: Callable[[], VerifierPool]) -> None:
        """Start the thread, which ends with the process."""
        self.trouble = ""
        self._submitted: deque[tuple[int, str, str, str, CodeMode]] = deque()
        self._verdicts: deque[tuple[int, Judgement]] = deque()
        self._failure: Exception | None = None
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        threading.Thread(target=self._run, args=(make,), name="verifier", daemon=True).start()

    def submit(self, key: int, text: str, gold: str, question: str = "", code: CodeMode = "none") -> None:
        """Take a completion; `poll` returns its verdict under `key`."""
        self._submitted.append((key, text, gold, question, code))
        with suppress(BlockingIOError):  # a full pipe wakes the thread as well
            os.write(self._wake, b"!")

    def poll(self) -> list[tuple[int, Judgement]]:
        """Return the newest verdicts, in any order; raises what ended the thread, PeerLost without children."""
        if self._failure is not None:
            raise self._failure
        return [self._verdicts.popleft() for _ in range(len(self._verdicts))]

    def _run(self, make: Callable[[], VerifierPool]) -> None:
        try:
            pool = make()
            while True:
                self._turn(pool)
        except Exception as error:  # noqa: BLE001 -- `poll` raises it in the thread of the loop
            self._failure = error

    def _turn(self, pool: VerifierPool) -> None:
        due_s = pool.next_deadline_s
        limit_s = LONGEST_WAIT_S if due_s is None else min(due_s, LONGEST_WAIT_S)
        woken, _, _ = select.select([pool.descriptor, self._woken], [], [], limit_s)
        if self._woken in woken:
            os.read(self._woken, select.PIPE_BUF)
        for _ in range(len(self._submitted)):
            pool.submit(*self._submitted.popleft())
        self._verdicts.extend(pool.poll())
        self.trouble = pool.trouble
