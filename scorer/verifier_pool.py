"""Verdicts without waiting: exact ones at once, the others from children that can be killed.

    submit ──▶ exact? ──yes──▶ verdict
                 └─no─▶ cached? ──▶ queue ──▶ idle child ──▶ verdict
                                      ▲          ├─ past its deadline: killed, `timeout`
                                      └─ once ───┴─ died by itself; the second time `error`

Equal questions are asked once, one after the other (cache) or at the same time alike. A child that
is killed, dies or has served its time is replaced, so the pool is soon back at full size.
"""

import contextlib
import os
import selectors
import subprocess
import sys
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field

import msgspec

from prefixrl.common.errors import PeerLost
from prefixrl.scorer.extract import MAX_ANSWER_CHARS, extract_answer
from prefixrl.scorer.verifier_child import (
    LENGTH_BYTES,
    Answer,
    FromChild,
    Outcome,
    Question,
    deadline_s,
    frame,
)
from prefixrl.scorer.verify import Status, Verdict, judge_exactly

START_DEADLINE_S = 120.0
"""Importing sympy takes half a second; minutes on a cold network file system."""
MAX_FAILED_STARTS = 3
MAX_ATTEMPTS = 2
MAX_GOLD_CHARS = 8_192
"""A question must fit a pipe's buffer (64 KiB), or sending it could block."""
_READ_BYTES = 65_536
_ENVIRONMENT = ("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "TMPDIR")
"""All that a child sees of the parent's environment, which may hold tokens."""

_JUDGED: dict[Outcome, tuple[float, Status]] = {
    "right": (1.0, "ok"),
    "wrong": (0.0, "ok"),
    "parse_fail": (0.0, "parse_fail"),
    "timeout": (0.0, "timeout"),
}


@dataclass
class _Job:
    gold: str
    answer: str
    keys: list[int]
    attempts: int = 0


@dataclass(eq=False)
class _Child:
    process: subprocess.Popen[bytes]
    inbox: int
    """Where questions are written."""
    outbox: int
    """Where answers are read."""
    deadline: float
    """Monotonic time at which it is killed, still starting or at its job; infinite while idle."""
    is_ready: bool = False
    job: _Job | None = None
    jobs_done: int = 0
    received: bytearray = field(default_factory=bytearray)


class VerifierPool:
    """Judges completions. Belongs to one thread, which must outlive it: children die with it.

    Nothing here waits but `wait` and `close`. Children are started at the first answer that cannot
    be settled exactly, and time spent starting counts against no answer.
    """

    def __init__(
        self,
        children: int,
        timeout_s: int,
        cache_entries: int = 65_536,
        jobs_per_child: int = 2_000,
    ) -> None:
        """A pool of no processes yet.

        Args:
            timeout_s: whole seconds for each step of math-verify; a child is killed after
                `3 * timeout_s + 1`.
            cache_entries: verdicts kept, least recently used first out.
            jobs_per_child: answers after which a child is replaced: sympy's caches only grow.
        """
        self._size = children
        self._timeout_s = timeout_s
        self._cache_entries = cache_entries
        self._jobs_per_child = jobs_per_child
        self._is_started = False
        self._cache: OrderedDict[tuple[str, str], Verdict] = OrderedDict()
        self._settled: list[tuple[int, Verdict]] = []
        self._jobs: dict[tuple[str, str], _Job] = {}
        self._queue: deque[_Job] = deque()
        self._children: list[_Child] = []
        self._killed: list[subprocess.Popen[bytes]] = []
        self._selector = selectors.DefaultSelector()
        self._failed_starts = 0

    @property
    def pending(self) -> int:
        """Submitted answers that `poll` has not returned yet."""
        return len(self._settled) + sum(len(job.keys) for job in self._jobs.values())

    @property
    def next_deadline_s(self) -> float | None:
        """Seconds until `poll` has work even if no child answers; None while all are idle."""
        deadline = min((child.deadline for child in self._children), default=float("inf"))
        return max(0.0, deadline - time.monotonic()) if deadline < float("inf") else None

    @property
    def child_pids(self) -> tuple[int, ...]:
        """The living children, starting ones included."""
        return tuple(child.process.pid for child in self._children)

    def submit(self, key: int, text: str, gold: str) -> None:
        """Take a completion; `poll` returns its verdict under `key`."""
        extracted = extract_answer(text)
        verdict = judge_exactly(gold, extracted)
        if verdict is None and extracted is not None:
            verdict = self._recall(gold, extracted)
        if verdict is None and extracted is not None and len(gold) > MAX_GOLD_CHARS:
            verdict = Verdict(0.0, "error", extracted[:MAX_ANSWER_CHARS])
        if verdict is not None:
            self._settled.append((key, verdict))
            return
        assert extracted is not None, "without an answer judge_exactly has decided"
        job = self._jobs.get((gold, extracted))
        if job is None:
            job = self._jobs[gold, extracted] = _Job(gold, extracted, [])
            self._queue.append(job)
        job.keys.append(key)
        self._is_started = True
        self._keep_full()
        self._assign()

    def poll(self) -> list[tuple[int, Verdict]]:
        """What has been judged since the last call, in any order. Never blocks.

        Raises:
            PeerLost: children cannot be started at all, so no answer will ever be judged.
        """
        self._read_children()
        now = time.monotonic()
        for child in [each for each in self._children if each.deadline <= now]:
            self._discard(child)
            if child.job is not None:
                self._finish(child.job, "timeout")
            else:
                self._count_failed_start()
        self._killed = [process for process in self._killed if process.poll() is None]
        self._keep_full()
        self._assign()
        settled, self._settled = self._settled, []
        return settled

    def wait(self, timeout_s: float) -> None:
        """Sleep until `poll` may have something to do, or `timeout_s` has passed."""
        if self._settled:
            return
        until_deadline = self.next_deadline_s
        limit = timeout_s if until_deadline is None else min(timeout_s, until_deadline)
        if self._children:
            self._selector.select(limit)
        else:
            time.sleep(limit)

    def close(self) -> None:
        """Kill and reap all children; answers still pending get no verdict."""
        for child in list(self._children):
            self._discard(child)
        for process in self._killed:
            process.wait()
        self._killed.clear()
        self._queue.clear()
        self._jobs.clear()
        self._selector.close()

    # --- children ---------------------------------------------------------------------------------

    def _keep_full(self) -> None:
        while self._is_started and len(self._children) < self._size:
            self._start()

    def _start(self) -> None:
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        # -P: modules of the working directory must not shadow the installed ones.
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "prefixrl.scorer.verifier_child", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        assert process.stdin is not None and process.stdout is not None, "both are pipes"
        outbox = process.stdout.fileno()
        os.set_blocking(outbox, False)
        child = _Child(process, process.stdin.fileno(), outbox, time.monotonic() + START_DEADLINE_S)
        self._children.append(child)
        self._selector.register(outbox, selectors.EVENT_READ, child)

    def _discard(self, child: _Child) -> None:
        self._children.remove(child)
        self._selector.unregister(child.outbox)
        child.process.kill()
        for pipe in (child.process.stdin, child.process.stdout):
            if pipe is not None:
                pipe.close()
        self._killed.append(child.process)

    def _count_failed_start(self) -> None:
        self._failed_starts += 1
        if self._failed_starts >= MAX_FAILED_STARTS:
            raise PeerLost(
                f"{self._failed_starts} verifier children in a row ended or hung before they were "
                f"ready (limit {START_DEADLINE_S:.0f} s each); their last words are on stderr. "
                f"Try: {sys.executable} -c 'import math_verify'"
            )

    def _assign(self) -> None:
        for child in self._children:
            if not self._queue:
                return
            if child.is_ready and child.job is None:
                self._send(child, self._queue.popleft())

    def _send(self, child: _Child, job: _Job) -> None:
        job.attempts += 1
        child.job = job
        child.deadline = time.monotonic() + deadline_s(self._timeout_s)
        question = frame(Question(job.gold, job.answer, self._timeout_s))
        # Broken: it died while idle; the end of its output says so to the next poll.
        with contextlib.suppress(BrokenPipeError):
            os.write(child.inbox, question)

    def _read_children(self) -> None:
        for key, _ in self._selector.select(0):
            child: _Child = key.data
            try:
                data = os.read(child.outbox, _READ_BYTES)
            except BlockingIOError:
                continue
            child.received += data
            if not self._take_messages(child) or not data:
                self._lose(child)

    def _take_messages(self, child: _Child) -> bool:
        """False when the child says something that is no message."""
        buffer = child.received
        while len(buffer) >= LENGTH_BYTES:
            end = LENGTH_BYTES + int.from_bytes(buffer[:LENGTH_BYTES], "big")
            if len(buffer) < end:
                break
            try:
                message = msgspec.msgpack.decode(buffer[LENGTH_BYTES:end], type=FromChild)
            except (msgspec.DecodeError, UnicodeDecodeError):
                return False
            del buffer[:end]
            self._handle(child, message)
        return len(buffer) < _READ_BYTES

    def _handle(self, child: _Child, message: FromChild) -> None:
        child.deadline = float("inf")
        if not isinstance(message, Answer):
            child.is_ready = True
            self._failed_starts = 0
            return
        job, child.job = child.job, None
        child.jobs_done += 1
        has_failed = message.outcome == "error"
        if has_failed or child.jobs_done >= self._jobs_per_child:
            self._discard(child)
        if job is not None and has_failed:
            self._retry(job)
        elif job is not None:
            self._finish(job, message.outcome)

    def _lose(self, child: _Child) -> None:
        """The child ended by itself, or spoke nonsense."""
        if child not in self._children:
            return
        self._discard(child)
        if child.job is not None and child.deadline <= time.monotonic():
            self._finish(child.job, "timeout")  # its CPU limit was quicker than this process
        elif child.job is not None:
            self._retry(child.job)
        elif not child.is_ready:
            self._count_failed_start()

    # --- verdicts ---------------------------------------------------------------------------------

    def _retry(self, job: _Job) -> None:
        if job.attempts < MAX_ATTEMPTS:
            self._queue.appendleft(job)
        else:
            self._settle(job, Verdict(0.0, "error", job.answer[:MAX_ANSWER_CHARS]))

    def _finish(self, job: _Job, outcome: Outcome) -> None:
        reward, status = _JUDGED[outcome]
        verdict = Verdict(reward, status, job.answer[:MAX_ANSWER_CHARS])
        # A timeout may be the machine's fault: it stands for these answers, not for later ones.
        if status != "timeout":
            self._cache[job.gold, job.answer] = verdict
            if len(self._cache) > self._cache_entries:
                self._cache.popitem(last=False)
        self._settle(job, verdict)

    def _settle(self, job: _Job, verdict: Verdict) -> None:
        del self._jobs[job.gold, job.answer]
        self._settled.extend((key, verdict) for key in job.keys)

    def _recall(self, gold: str, extracted: str) -> Verdict | None:
        verdict = self._cache.get((gold, extracted))
        if verdict is not None:
            self._cache.move_to_end((gold, extracted))
        return verdict
