"""Verdicts without waiting: exact ones at once, the others from children that can be killed.

    submit ──▶ exact? ──yes──▶ verdict
                 └─no─▶ cached? ──▶ queue ──▶ idle child ──▶ verdict
                                      ▲          ├─ past its deadline: killed, `timeout`
                                      └─ once ───┴─ died by itself; the second time `error`

With a user's reward function there is no exact path and no cache: a child gives every text to the
function. If the function takes the verifier's verdict, a pool within this one gives it first; if it
takes no `finish`, a cut answer may be settled without it (`AnswerFacts.is_zero_if_cut`). Equal
questions go to a child once, whether they come one after the other (cache) or together. A child
that is killed, dies or has judged its share is replaced within milliseconds (`child_process.py`).
The time of an answer begins when a child receives it.
"""

import itertools
import logging
import selectors
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from prefixrl.common.config.foreign import user_function
from prefixrl.common.errors import PeerLost
from prefixrl.common.prompts.extract import MAX_ANSWER_CHARS
from prefixrl.common.wire.messages.fields import encodable
from prefixrl.common.wire.messages.groups import CodeMode, Fault
from prefixrl.scorer.sandbox.runner import OVERRAN
from prefixrl.scorer.verifier.child_process import ChildProcess, Template, spawn
from prefixrl.scorer.verifier.complaints import Troubles
from prefixrl.scorer.verifier.exchange import (
    NO_FACTS,
    STANDARD,
    AnswerFacts,
    ChildQuestion,
    ChildReady,
    Choices,
    FromChild,
)
from prefixrl.scorer.verifier.routing import ForChild, ask_function, ask_verifier
from prefixrl.scorer.verifier.rules.verify import SYMPY_RULE, Judgement
from prefixrl.scorer.verifier.verifiers import deadline_s, find_verifier, is_mathematics

log = logging.getLogger(__name__)

START_DEADLINE_S = 120.0
"""Limit of a start: importing sympy takes half a second, but minutes on a cold network file system."""
MAX_FAILED_STARTS = 3
MAX_ATTEMPTS = 2
MAX_JOBS = 2_000
"""Answers after which a child is replaced: sympy's caches only grow."""
MAX_CACHED = 65_536
"""Verdicts in the cache, which drops the least recently used one first."""


@dataclass(frozen=True)
class RewardFunction:
    """A user's function that replaces the verifier."""

    function_ref: str
    """`file.py:name`."""
    digest: str
    """Digest that its file must have in every child."""
    environment: tuple[str, ...] = ()
    """Names of variables that its children get besides the basics."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Weights of the parts that it gives."""


@dataclass
class _Job:
    question: ChildQuestion
    extracted: str
    keys: list[int]
    attempts: int = 0
    verdict: Judgement | None = None
    """The verifier's own, for a function that takes it."""


@dataclass(eq=False)
class _Child:
    process: ChildProcess
    deadline: float
    """Monotonic time at which it is killed, while it starts or works; infinite while idle."""
    template: Template | None
    """The template from which it is forked; None with a function."""
    is_ready: bool = False
    job: _Job | None = None
    asked_s: float = 0.0
    """Monotonic time at which it got the job."""
    jobs_done: int = 0


class VerifierPool:
    """A judge of completions, owned by one thread that must outlive it: children die with it.

    Only `wait` and `close` wait. Children are started for the first answer that has no exact
    verdict.
    """

    is_patient = False

    def __init__(
        self,
        children: int,
        timeout_s: int,
        function: RewardFunction | None = None,
        choices: Choices = STANDARD,
    ) -> None:
        """Make a pool; processes are started later.

        A child has `timeout_s` for one answer or one call of a function, and is killed GRACE_S
        later.
        """
        self._size = children
        self._timeout_s = timeout_s
        self._function = function
        self._choices = choices
        self._is_started = False
        self._cache: OrderedDict[ChildQuestion, Judgement] = OrderedDict()
        self._settled: list[tuple[int, Judgement]] = []
        self._jobs: dict[ChildQuestion, _Job] = {}
        self._queue: deque[_Job] = deque()
        self._children: list[_Child] = []
        self._template: Template | None = None
        self._killed: list[ChildProcess] = []
        self._selector = selectors.DefaultSelector()
        self._failed_starts = 0
        self._takes: frozenset[str] | None = None
        """Names of the parameters that a function is handed by name; None until a child has said them."""
        self._first: VerifierPool | None = None
        """The pool whose verdicts a function takes; None without one, and until a child has said that it does."""
        self._unpaired: dict[int, _Job] = {}
        self._numbers = itertools.count()
        self._troubles = Troubles(log, function.function_ref if function else "", timeout_s)

    @property
    def pending(self) -> int:
        """The number of submitted answers that `poll` has not returned yet."""
        return len(self._settled) + sum(len(job.keys) for job in self._jobs.values())

    @property
    def next_deadline_s(self) -> float | None:
        """The seconds until `poll` has work even if no child answers; None while all are idle."""
        now_s = time.monotonic()
        deadlines = [child.deadline for child in self._children if child.deadline < float("inf")]
        waits_s = [max(0.0, deadline - now_s) for deadline in deadlines]
        if self._first and (first_s := self._first.next_deadline_s) is not None:
            waits_s.append(first_s)
        return min(waits_s, default=None)

    @property
    def trouble(self) -> str:
        """A function that hangs, or failed in the last minute, in words; else ""."""
        return self._troubles.in_words(self._slowest_s())

    def _slowest_s(self) -> float:
        """Return the seconds since the question on which some child has worked longest."""
        now_s = time.monotonic()
        return max((now_s - child.asked_s for child in self._children if child.job), default=0.0)

    @property
    def child_pids(self) -> tuple[int, ...]:
        """The process ids of the children that have reported their id."""
        return tuple(child.process.pid for child in self._children if child.process.pid)

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
        answer = encodable(text)
        if self._function:
            step = ask_function(answer, gold, question, facts, self._timeout_s)
        else:
            step = ask_verifier(answer, gold, question, code, self._timeout_s, self._choices)
        if isinstance(step, ForChild):
            cached = self._cache.get(step.question)
            if cached is None:
                self._ask_child(key, step)
                return
            self._cache.move_to_end(step.question)
            step = cached
        self._settled.append((key, step))

    def check_gold(self, key: int, gold: str) -> None:
        """Ask if sympy reads a gold answer; `poll` returns the verdict under `key`."""
        question = ChildQuestion(gold, "", self._timeout_s, is_gold=True)
        self._ask_child(key, ForChild(question, gold[:MAX_ANSWER_CHARS]))

    def _ask_child(self, key: int, step: ForChild) -> None:
        job = self._jobs.get(step.question)
        if job is None:
            job = self._jobs[step.question] = _Job(step.question, step.extracted, [key])
            self._enqueue(job)
        else:
            job.keys.append(key)
        self._is_started = True
        self._keep_full()
        self._assign()

    def _enqueue(self, job: _Job) -> None:
        if self._is_zero(job.question.facts):
            self._settle(job, Judgement(0.0, "no_answer", ""))
            return
        if self._first is None:
            self._queue.append(job)
            return
        number = next(self._numbers)
        self._unpaired[number] = job
        self._first.submit(number, job.question.answer, job.question.gold)

    def _is_zero(self, facts: AnswerFacts) -> bool:
        """Return True for a cut answer that the function is known not to take."""
        is_zero = facts.is_zero_if_cut and facts.finish == "length"
        return is_zero and self._takes is not None and "finish" not in self._takes

    def _learn_parameters(self, ready: ChildReady) -> None:
        """Note what the function takes; from now on its first verdicts and cut answers have their own way."""
        if self._takes is not None:
            return
        self._takes = frozenset(ready.takes)
        if "verdict" in self._takes:
            self._first = VerifierPool(self._size, self._timeout_s, choices=self._choices)
            self._selector.register(self._first.descriptor, selectors.EVENT_READ, None)
        waiting = list(self._queue)
        self._queue.clear()
        for job in waiting:
            self._enqueue(job)

    @property
    def descriptor(self) -> int:
        """A descriptor that is readable while some child has written."""
        return self._selector.fileno()

    def poll(self) -> list[tuple[int, Judgement]]:
        """Return the newest verdicts, in any order; never blocks; raises PeerLost without children."""
        # A function that takes the verifier's verdict gets a text once that verdict is there.
        for number, verdict in self._first.poll() if self._first else ():
            job = self._unpaired.pop(number)
            job.verdict = verdict
            self._queue.append(job)
        # Before deadlines are looked at: an answer that has come is not late.
        self._read_children()
        self._troubles.log_slow_call(self._slowest_s())
        now = time.monotonic()
        for child in [child for child in self._children if child.deadline <= now]:
            if child not in self._children:
                continue  # discarded with its template
            self._discard(child)
            if child.job is not None:
                self._give_up_job(child.job)
            else:
                self._count_failed_start()
        self._killed = [process for process in self._killed if not process.has_ended()]
        self._keep_full()
        self._assign()
        settled, self._settled = self._settled, []
        return settled

    def wait(self, timeout_s: float) -> None:
        """Sleep until `poll` may have work, or `timeout_s` has passed."""
        if self._settled or (self._first and self._first._settled):
            return
        until_deadline = self.next_deadline_s
        limit = timeout_s if until_deadline is None else min(timeout_s, until_deadline)
        if self._children:
            self._selector.select(limit)
        else:
            time.sleep(limit)

    def close(self) -> None:
        """Kill and reap all children; answers still pending get no verdict."""
        if self._first is not None:
            self._first.close()
        for child in list(self._children):
            self._discard(child)
        for process in self._killed:
            process.has_ended(waits=True)
        self._killed.clear()
        self._retire_template()
        self._queue.clear()
        self._jobs.clear()
        self._selector.close()

    def _keep_full(self) -> None:
        while self._is_started and len(self._children) < self._size:
            child = _Child(self._new_process(), time.monotonic() + START_DEADLINE_S, self._template)
            self._children.append(child)
            self._selector.register(child.process.outbox, selectors.EVENT_READ, child)

    def _new_process(self) -> ChildProcess:
        if self._function:
            function = self._function
            weights = msgspec.json.encode(function.weights).decode()
            words = (function.function_ref, function.digest, str(self._timeout_s), weights)
            return spawn(words, function.environment)
        if self._template is not None and not self._template.is_alive:
            self._count_failed_start()
        if self._template is None:
            self._template = Template(self._choices.verifiers)
        return self._template.fork()

    def _retire_template(self) -> None:
        """Fork no more from the template; discard the children that it was starting."""
        # The others go on and would die with it, so the process stays.
        retired, self._template = self._template, None
        if retired is None:
            return
        for child in [child for child in self._children if not child.is_ready]:
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
        """Count one failure, however many children the template was starting."""
        self._retire_template()
        self._failed_starts += 1
        if self._failed_starts >= MAX_FAILED_STARTS:
            ref = self._function.function_ref if self._function else ""
            attempt = user_function.file_of(ref) if ref else "-c 'import math_verify'"
            raise PeerLost(
                f"verifier children ended or hung before they were ready, {self._failed_starts} times in a row (limit "
                f"{START_DEADLINE_S:.0f} s each); their errors are on stderr. Try: {sys.executable} {attempt}"
            )

    def _assign(self) -> None:
        for child in self._children:
            if self._queue and child.is_ready and child.job is None:
                job = child.job = self._queue.popleft()
                job.attempts += 1
                child.asked_s = time.monotonic()
                child.deadline = child.asked_s + deadline_s(self._timeout_s, job.question.code)
                question = msgspec.structs.replace(job.question, verdict=job.verdict)
                child.process.send_question(question)

    def _read_children(self) -> None:
        for key, _ in self._selector.select(0):
            child: _Child | None = key.data  # None: the pool of first verdicts, which `poll` reads
            if child is None or child not in self._children:
                continue  # discarded with its template
            messages, is_alive = child.process.read_messages()
            for message in messages:
                self._handle(child, message)
            if not is_alive:
                self._replace_ended(child)

    def _handle(self, child: _Child, message: FromChild) -> None:
        child.deadline = float("inf")
        if not isinstance(message, Judgement):
            child.process.learn_pid(message.pid)
            child.is_ready = True
            self._failed_starts = 0
            self._learn_parameters(message)
            return
        job, child.job = child.job, None
        child.jobs_done += 1
        has_failed = message.status == "error"
        # After an interruption or a lack of memory, sympy's caches may be in any state.
        is_spoiled = self._function is None and (has_failed or message.status == "timeout")
        if is_spoiled or child.jobs_done >= MAX_JOBS:
            self._discard(child)
        if job is None:
            return
        if has_failed:
            reason = message.extracted or ""
            self._fail(job, reason, message.fault, may_retry=self._function is None)
        else:
            self._finish(job, message)

    def _replace_ended(self, child: _Child) -> None:
        """Discard a child that ended by itself or sent an invalid message."""
        if child not in self._children:
            return
        self._discard(child)
        if child.job is not None and child.deadline <= time.monotonic():
            self._give_up_job(child.job)  # its CPU limit was quicker than this process
        elif child.job is not None:
            judge = self._function.function_ref if self._function else "the verifier"
            self._troubles.log_failure(
                f"{judge}: its process ended with an answer unjudged", "process died"
            )
            reason = f"{judge}: its process ended {MAX_ATTEMPTS} times"
            self._fail(child.job, reason, "process died", may_retry=True)
        elif not child.is_ready:
            self._count_failed_start()

    def _fail(self, job: _Job, reason: str, fault: Fault, may_retry: bool = False) -> None:
        self._troubles.count_failure(fault)
        if may_retry and job.attempts < MAX_ATTEMPTS:
            self._queue.appendleft(job)
        else:
            self._settle(job, Judgement(0.0, "error", reason[:MAX_ANSWER_CHARS], fault))

    def _give_up_job(self, job: _Job) -> None:
        """End a job past its deadline: `timeout` for a formula, `error` for code with its own limit."""
        if self._function is not None:
            reason = f"{self._function.function_ref}: no reward within {self._timeout_s} s"
            self._troubles.log_failure(
                f"{reason}; its process is ended, the row left out", "function overran"
            )
            self._fail(job, reason, "function overran")
        elif is_mathematics(job.question.code):
            self._finish(job, Judgement(0.0, "timeout", None, rule=SYMPY_RULE))
        elif find_verifier(job.question.code).sandbox_runs:
            self._fail(job, OVERRAN, "sandbox overran")
        else:
            limit = f"no verdict within {self._timeout_s} s"
            self._fail(job, f"the verifier {job.question.code}: {limit}", "function overran")

    def _finish(self, job: _Job, verdict: Judgement) -> None:
        if verdict.extracted is None:
            verdict = msgspec.structs.replace(verdict, extracted=job.extracted)
        # A timeout may be the machine's fault: it holds for these answers, not for later ones. Verifiers other than
        # mathematics may give another verdict the next time.
        is_lasting = self._function is None and is_mathematics(job.question.code)
        if verdict.status != "timeout" and is_lasting:
            self._cache[job.question] = verdict
            if len(self._cache) > MAX_CACHED:
                self._cache.popitem(last=False)
        self._settle(job, verdict)

    def _settle(self, job: _Job, verdict: Judgement) -> None:
        del self._jobs[job.question]
        self._settled.extend((key, verdict) for key in job.keys)
