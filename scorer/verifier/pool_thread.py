"""A judge in a thread of its own, which goes on while the engine takes a step.

loop ── submit ──▶ queue ──▶ thread: VerifierPool, or a server of rewards ──▶ verdicts ──▶ poll
└─ a byte wakes it ─▶┘
"""

import os
import select
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from prefixrl.common.wire.messages.groups import CodeMode
from prefixrl.scorer.verifier.exchange import NO_FACTS, AnswerFacts
from prefixrl.scorer.verifier.pool import VerifierPool
from prefixrl.scorer.verifier.rules.verify import Judgement

SubmittedRow = tuple[int, str, str, str, CodeMode, AnswerFacts]
"""Key, text, gold answer, question, verifier and facts of an answer."""
LONGEST_WAIT_S = 0.5
"""Longest time after which `trouble` is updated, even if nothing happens."""


class JudgeThread(ABC):
    """A judge in its thread; the other methods never wait."""

    def __init__(self) -> None:
        """Start the thread, which ends with the process."""
        self.trouble = ""
        self.is_patient = False
        """True while it waits for a server, which ends by itself."""
        self._submitted: deque[SubmittedRow] = deque()
        self._verdicts: deque[tuple[int, Judgement]] = deque()
        self._failure: Exception | None = None
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="verifier", daemon=True)
        self._thread.start()

    def submit(
        self,
        key: int,
        text: str,
        gold: str,
        question: str = "",
        code: CodeMode = "none",
        facts: AnswerFacts = NO_FACTS,
    ) -> None:
        """Take a completion; `poll` returns its verdict under `key`."""
        self._submitted.append((key, text, gold, question, code, facts))
        with suppress(BlockingIOError):  # a full pipe wakes the thread as well
            os.write(self._wake, b"!")

    def poll(self) -> list[tuple[int, Judgement]]:
        """Return the newest verdicts, in any order; raises what ended the thread, PeerLost without children."""
        if self._failure is not None:
            raise self._failure
        return [self._verdicts.popleft() for _ in range(len(self._verdicts))]

    def _run(self) -> None:
        try:
            self._judge()
        except Exception as error:  # noqa: BLE001 -- `poll` raises it in the thread of the loop
            self._failure = error

    @abstractmethod
    def _judge(self) -> None:
        """Take what is submitted and give verdicts, for ever."""


class PoolThread(JudgeThread):
    """A pool that its thread makes, feeds and polls. Children die with the thread."""

    def __init__(self, make: Callable[[], VerifierPool]) -> None:
        self._make = make
        super().__init__()

    def _judge(self) -> None:
        pool = self._make()
        while True:
            self._turn(pool)

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
