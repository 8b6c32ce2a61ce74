"""Verdicts without waiting: exact ones at once, the others from children that can be killed.

    submit ──▶ exact? ──yes──▶ verdict
                 └─no─▶ cached? ──▶ queue ──▶ idle child ──▶ verdict
                                      ▲          ├─ past its deadline: killed, `timeout`
                                      └─ once ───┴─ died by itself; the second time `error`

With a reward function of the user's there is no exact path and no cache: every text is given to it, in a child.

Equal questions are asked once, one after the other (cache) or at the same time alike. A child that
is killed, dies or has served its time is replaced; that takes milliseconds (`child_process.py`), so
that no answer waits for a start because another was hostile. The time of an answer begins when a
child takes it.
"""

import selectors
import sys
import time
from collections import OrderedDict, deque
from dataclasses import dataclass

from prefixrl.common.errors import PeerLost
from prefixrl.common.extract import MAX_ANSWER_CHARS, extract_answer
from prefixrl.common.messages import CodeMode, Fault
from prefixrl.scorer.child_process import FUNCTION_PIPE_BYTES, ChildProcess, Template, spawn
from prefixrl.scorer.programs import MAX_PROGRAM_CHARS, find_program
from prefixrl.scorer.sandbox import OVERRAN
from prefixrl.scorer.verifier_child import (
    Answer,
    FromChild,
    Outcome,
    Question,
    deadline_s,
    frame,
)
from prefixrl.scorer.verify import Status, Verdict, bare, judge_exactly

START_DEADLINE_S = 120.0
"""Importing sympy takes half a second; minutes on a cold network file system."""
MAX_FAILED_STARTS = 3
MAX_ATTEMPTS = 2
MAX_GOLD_CHARS = 8_192
"""A question must fit a pipe's buffer (64 KiB), or sending it could block."""
_JUDGED: dict[Outcome, tuple[float, Status]] = {
    "right": (1.0, "ok"),
    "wrong": (0.0, "ok"),
    "parse_fail": (0.0, "parse_fail"),
    "timeout": (0.0, "timeout"),
}
_OK: Status = "ok"


@dataclass(frozen=True)
class RewardFunction:
    """A user's function that is asked instead of the verifier."""

    place: str
    """`file.py:name`."""
    digest: str
    """What its file must have in every child."""


@dataclass
class _Job:
    question: Question
    extracted: str
    keys: list[int]
    attempts: int = 0


@dataclass(eq=False)
class _Child:
    process: ChildProcess
    deadline: float
    """Monotonic time at which it is killed, still starting or at its job; infinite while idle."""
    template: Template | None
    """What it is forked from; None with a function."""
    is_ready: bool = False
    job: _Job | None = None
    jobs_done: int = 0


class VerifierPool:
    """Judges completions. Belongs to one thread, which must outlive it: children die with it.

    Nothing here waits but `wait` and `close`. Children are started at the first answer that cannot
    be settled exactly, and time spent starting counts against no answer.
    """

    def __init__(
        self,
        children: int,
        timeout_s: int,
        function: RewardFunction | None = None,
        runs_programs: bool = False,
        cache_entries: int = 65_536,
        jobs_per_child: int = 2_000,
    ) -> None:
        """A pool of no processes yet.

        Args:
            children: answers judged at the same time.
            timeout_s: whole seconds for one answer, or for one call of a function; a child that
                has not answered GRACE_S later is killed.
            function: asked instead of the verifier.
            runs_programs: whether programs in answers will be submitted, to be run in the sandbox.
            cache_entries: verdicts kept, least recently used first out.
            jobs_per_child: answers after which a child is replaced: sympy's caches only grow.
        """
        self._size = children
        self._timeout_s = timeout_s
        self._function = function
        self._takes_long_questions = function is not None or runs_programs
        self._cache_entries = cache_entries
        self._jobs_per_child = jobs_per_child
        self._is_started = False
        self._cache: OrderedDict[Question, Verdict] = OrderedDict()
        self._settled: list[tuple[int, Verdict]] = []
        self._jobs: dict[Question, _Job] = {}
        self._queue: deque[_Job] = deque()
        self._children: list[_Child] = []
        self._template: Template | None = None
        self._killed: list[ChildProcess] = []
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
        """The living children, but for starting ones of which nothing is known yet."""
        return tuple(child.process.pid for child in self._children if child.process.pid)

    def submit(
        self, key: int, text: str, gold: str, question: str = "", code: CodeMode = "none"
    ) -> None:
        """Take a completion; `poll` returns its verdict under `key`. `code`: which programs in it are run."""
        extracted = extract_answer(text)
        if self._function is not None:
            self._ask_long(key, Question(gold, text, self._timeout_s, question), extracted or "")
            return
        program = find_program(text, code) if code != "none" else None
        if program is not None or code == "tests":
            self._submit_program(key, program, gold, code)
            return
        verdict = judge_exactly(gold, extracted)
        if verdict is None and extracted is not None:
            verdict = self._recall(Question(gold, extracted, self._timeout_s))
        if verdict is None and extracted is not None and len(gold) > MAX_GOLD_CHARS:
            reason = f"a gold answer of more than {MAX_GOLD_CHARS} characters"
            verdict = Verdict(0.0, "error", reason, "too long for a child")
        if verdict is not None:
            self._settled.append((key, verdict))
            return
        assert extracted is not None, "without an answer judge_exactly has decided"
        asked = Question(gold, extracted, self._timeout_s)
        self._ask(key, asked, extracted[:MAX_ANSWER_CHARS])

    def _submit_program(self, key: int, program: str | None, gold: str, code: CodeMode) -> None:
        if program is None:
            self._settled.append((key, Verdict(0.0, "no_answer", None)))
        elif len(program) > MAX_PROGRAM_CHARS:
            cut = program[:MAX_ANSWER_CHARS]
            self._settled.append((key, Verdict(0.0, "parse_fail", cut)))
        else:
            self._ask_long(key, Question(gold, program, self._timeout_s, code=code), program)

    def _ask_long(self, key: int, question: Question, extracted: str) -> None:
        if len(frame(question)) > FUNCTION_PIPE_BYTES:
            reason = f"more than {FUNCTION_PIPE_BYTES} bytes of question, answer and gold answer"
            verdict = Verdict(0.0, "error", reason, "too long for a child")
            self._settled.append((key, verdict))
        else:
            self._ask(key, question, extracted[:MAX_ANSWER_CHARS])

    def check_gold(self, key: int, gold: str) -> None:
        """Judge a gold answer against itself by sympy alone; `poll` returns the verdict under `key`."""
        self._ask(key, Question(gold, bare(gold), self._timeout_s), gold[:MAX_ANSWER_CHARS])

    def _ask(self, key: int, question: Question, extracted: str) -> None:
        job = self._jobs.get(question)
        if job is None:
            job = self._jobs[question] = _Job(question, extracted, [])
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
            if child not in self._children:
                continue  # given up with its template
            self._discard(child)
            if child.job is not None:
                self._give_up(child.job)
            else:
                self._count_failed_start()
        self._killed = [each for each in self._killed if not each.is_gone()]
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
        self._retire_template()
        self._queue.clear()
        self._jobs.clear()
        self._selector.close()

    # --- children ---------------------------------------------------------------------------------

    def _keep_full(self) -> None:
        while self._is_started and len(self._children) < self._size:
            process = self._new_process()
            child = _Child(process, time.monotonic() + START_DEADLINE_S, self._template)
            self._children.append(child)
            self._selector.register(child.process.outbox, selectors.EVENT_READ, child)

    def _new_process(self) -> ChildProcess:
        if self._function:
            return spawn(self._function.place, self._function.digest)
        if self._template is not None and not self._template.is_alive:
            self._count_failed_start()
        if self._template is None:
            self._template = Template()
        return self._template.fork(self._takes_long_questions)

    def _retire_template(self) -> None:
        """Fork no more from it. The children it was starting are given up, the others go on: they die with it, so it stays."""
        retired, self._template = self._template, None
        if retired is None:
            return
        for child in [each for each in self._children if not each.is_ready]:
            self._discard(child)
        self._close_unused(retired)

    def _close_unused(self, template: Template | None) -> None:
        is_used = any(child.template is template for child in self._children)
        if template is not None and template is not self._template and not is_used:
            template.close()

    def _discard(self, child: _Child) -> None:
        self._children.remove(child)
        self._selector.unregister(child.process.outbox)
        child.process.kill()
        self._killed.append(child.process)
        self._close_unused(child.template)

    def _count_failed_start(self) -> None:
        """One failure, however many children the template was starting."""
        self._retire_template()
        self._failed_starts += 1
        if self._failed_starts >= MAX_FAILED_STARTS:
            raise PeerLost(
                f"verifier children ended or hung before they were ready, {self._failed_starts} times "
                f"in a row (limit {START_DEADLINE_S:.0f} s each); their last words are on stderr. "
                f"Try: {self._how_to_try()}"
            )

    def _how_to_try(self) -> str:
        if self._function:
            return f"{sys.executable} {self._function.place.rpartition(':')[0]}"
        return f"{sys.executable} -c 'import math_verify'"

    def _assign(self) -> None:
        for child in self._children:
            if not self._queue:
                return
            if child.is_ready and child.job is None:
                self._send(child, self._queue.popleft())

    def _send(self, child: _Child, job: _Job) -> None:
        job.attempts += 1
        child.job = job
        child.deadline = time.monotonic() + deadline_s(self._timeout_s, job.question.code)
        child.process.ask(job.question)

    def _read_children(self) -> None:
        for key, _ in self._selector.select(0):
            child: _Child = key.data
            if child not in self._children:
                continue  # given up with its template
            messages, is_alive = child.process.hear()
            for message in messages:
                self._handle(child, message)
            if not is_alive:
                self._lose(child)

    def _handle(self, child: _Child, message: FromChild) -> None:
        child.deadline = float("inf")
        if not isinstance(message, Answer):
            child.process.learn_pid(message.pid)
            child.is_ready = True
            self._failed_starts = 0
            return
        job, child.job = child.job, None
        child.jobs_done += 1
        if self._function is not None and job is not None:
            if child.jobs_done >= self._jobs_per_child:
                self._discard(child)
            self._take_score(job, message)
            return
        has_failed = message.outcome == "error"
        # What was interrupted or ran out of memory may have left sympy's caches in any state.
        if has_failed or message.outcome == "timeout" or child.jobs_done >= self._jobs_per_child:
            self._discard(child)
        if job is not None and has_failed:
            self._retry(job, message.reason, message.fault)
        elif job is not None:
            if message.extracted is not None:
                job.extracted = message.extracted[:MAX_ANSWER_CHARS]
            self._finish(job, message.outcome, message.reward)

    def _lose(self, child: _Child) -> None:
        """The child ended by itself, or spoke nonsense."""
        if child not in self._children:
            return
        self._discard(child)
        if child.job is not None and child.deadline <= time.monotonic():
            self._give_up(child.job)  # its CPU limit was quicker than this process
        elif child.job is not None:
            place = self._function.place if self._function else "the verifier"
            reason = f"{place}: its process ended {MAX_ATTEMPTS} times"
            self._retry(child.job, reason, "process died")
        elif not child.is_ready:
            self._count_failed_start()

    # --- verdicts ---------------------------------------------------------------------------------

    def _retry(self, job: _Job, reason: str, fault: Fault) -> None:
        if job.attempts < MAX_ATTEMPTS:
            self._queue.appendleft(job)
        else:
            self._fail(job, reason, fault)

    def _fail(self, job: _Job, reason: str, fault: Fault) -> None:
        self._settle(job, Verdict(0.0, "error", reason[:MAX_ANSWER_CHARS], fault))

    def _take_score(self, job: _Job, answer: Answer) -> None:
        if answer.outcome == "scored":
            self._settle(job, Verdict(answer.reward, "ok", job.extracted))
        else:
            self._fail(job, answer.reason, answer.fault)

    def _give_up(self, job: _Job) -> None:
        """A child ran past its deadline: the fault of a formula, but not of what keeps its own time."""
        if self._function is not None:
            reason = f"{self._function.place}: no reward within {self._timeout_s} s"
            self._fail(job, reason, "function overran")
        elif job.question.code != "none":
            self._fail(job, OVERRAN, "sandbox overran")
        else:
            self._finish(job, "timeout")

    def _finish(self, job: _Job, outcome: Outcome, score: float = 0.0) -> None:
        reward, status = (score, _OK) if outcome == "scored" else _JUDGED[outcome]
        verdict = Verdict(reward, status, job.extracted)
        # A timeout may be the machine's fault: it stands for these answers, not for later ones.
        if status != "timeout":
            self._cache[job.question] = verdict
            if len(self._cache) > self._cache_entries:
                self._cache.popitem(last=False)
        self._settle(job, verdict)

    def _settle(self, job: _Job, verdict: Verdict) -> None:
        del self._jobs[job.question]
        self._settled.extend((key, verdict) for key in job.keys)

    def _recall(self, question: Question) -> Verdict | None:
        verdict = self._cache.get(question)
        if verdict is not None:
            self._cache.move_to_end(question)
        return verdict
