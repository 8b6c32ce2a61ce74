"""`python -m prefixrl.scorer.verifier_child PARENT_PID [FUNCTION DIGEST]`: judges answers until its input ends.

Started by `child_process.py`, never by hand. A process of its own because sympy may loop for minutes in
C code that no alarm interrupts, or take all memory: such work can only be killed from outside. Without FUNCTION it is the
template: it imports sympy, and for every two descriptors that come through the socket on its stdin it forks a child that reads
and writes there. With FUNCTION, a user's `file.py:name`, it is itself a child, reads stdin, writes stdout, and asks that
function instead of sympy; DIGEST is the one its file must have.

    parent ── Question ──▶ child ── Ready, then one Answer per Question ──▶ parent

A frame is its length (4 bytes, big-endian) and a MessagePack document.
"""

import logging
import math
import os
import resource
import signal
import socket
import sys
from collections import Counter
from typing import BinaryIO, Literal

import msgspec
import setproctitle

from prefixrl.common import user_function
from prefixrl.common.digests import function_digest
from prefixrl.common.errors import ConfigError
from prefixrl.common.messages import CodeMode, Fault
from prefixrl.common.process import die_with_parent
from prefixrl.scorer.programs import (
    MAX_TESTS,
    is_value,
    read_tests,
    share_passed,
    value_of,
)
from prefixrl.scorer.sandbox import GRACE_S, START_S, Limits, SandboxError
from prefixrl.scorer.verify import (
    GoldError,
    UnparsableAnswerError,
    judge_exactly,
    verify_with_sympy,
)

log = logging.getLogger(__name__)

LENGTH_BYTES = 4
MEMORY_BYTES = 2 * 2**30
WARMING = (
    ("x+1", "1+x"),
    (r"2\ln x+\sqrt{3}", r"\sqrt{3}+2\ln x"),
    (r"[1,\frac{\pi}{2})", r"[1,\frac{\pi}{3})"),
)
"""Judged by the template, so that sympy and its parser are ready in every child."""
WARMING_S = 60.0
MAX_COMPLAINTS = 20
"""Kinds of failures that are told apart in the log."""

Outcome = Literal["right", "wrong", "parse_fail", "timeout", "error", "scored"]
"""`scored`: a user's function or a program's tests gave a reward."""


class Question(msgspec.Struct, frozen=True):
    """One answer to judge."""

    gold: str
    answer: str
    """What sympy is to compare; for a user's function the whole text."""
    timeout_s: int
    question: str = ""
    """For a user's function: what was asked."""
    code: CodeMode = "none"
    """Where it is not `none`, `answer` is a program."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Imports are done: from here on time is the answer's."""

    pid: int


class Answer(msgspec.Struct, frozen=True, tag=True):
    """What became of the last question."""

    outcome: Outcome
    reward: float = 0.0
    """Where the outcome is `scored`."""
    extracted: str | None = None
    """The value of a program."""
    reason: str = ""
    """Where it is `error`: why."""
    fault: Fault = ""
    """And the kind of that."""


FromChild = Ready | Answer


def frame(message: msgspec.Struct) -> bytes:
    """A message as it stands in a pipe."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def deadline_s(timeout_s: int, code: CodeMode = "none") -> float:
    """Seconds from a question to the end of a child that has not answered."""
    if code == "none":
        return timeout_s + GRACE_S
    runs = MAX_TESTS if code == "tests" else 1
    return runs * (timeout_s + START_S + GRACE_S) + timeout_s + GRACE_S


def judge(question: Question) -> Answer:
    """Ask sympy; everything an answer can do to it has a name."""
    try:
        is_right = verify_with_sympy(question.gold, question.answer, question.timeout_s)
    except UnparsableAnswerError:
        return Answer("parse_fail")
    except (TimeoutError, MemoryError):  # the answer used up what one answer is given
        return Answer("timeout")
    except GoldError as error:
        return Answer("error", reason=str(error), fault="gold answer unreadable")
    except Exception as error:
        log.exception("gold %.100r, answer %.100r", question.gold, question.answer)
        reason = f"the verifier failed: {type(error).__name__}: {error}"
        return Answer("error", reason=reason, fault="verifier raised")
    return Answer("right" if is_right else "wrong")


def judge_program(question: Question) -> Answer:
    """Run a program in the sandbox; a failure of the sandbox is an `error`, never a wrong answer."""
    limits = Limits(wall_ms=1000 * question.timeout_s, cpu_s=question.timeout_s)
    try:
        if question.code == "tests":
            share, is_late = share_passed(question.answer, read_tests(question.gold), limits)
            return Answer("timeout") if is_late and not share else Answer("scored", share)
        finished, value = value_of(question.answer, limits)
    except (SandboxError, ValueError, OSError) as error:
        fault: Fault = (
            "gold answer unreadable" if isinstance(error, ValueError) else "sandbox failed"
        )
        fault = error.fault if isinstance(error, SandboxError) else fault
        if _is_first(("program", fault), str(error)):
            log.warning("no verdict on a program: %s", error)
        return Answer("error", reason=str(error), fault=fault)
    if finished.status == "timeout":
        return Answer("timeout")
    if value is None:
        return Answer("parse_fail")
    if is_value(question.gold, value):
        return Answer("right", extracted=value)
    known = judge_exactly(question.gold, value)
    if known is None:
        return msgspec.structs.replace(
            judge(Question(question.gold, value, question.timeout_s)), extracted=value
        )
    outcome: Outcome = "parse_fail" if known.status == "parse_fail" else "wrong"
    return Answer("right" if known.reward else outcome, extracted=value)


def score(place: str, question: Question) -> Answer:
    """Ask a user's function; whatever it does but a number in [0, 1] is an error with its reason."""
    function, path = user_function.load(place), user_function.file_of(place)
    try:
        reward = function(question.question, question.answer, question.gold)
    except Exception as error:
        reason = user_function.explain(error, path)
        if _is_first((type(error).__name__, _last_line(error)), reason):
            log.warning("%s failed", place, exc_info=True)
        return Answer("error", reason=reason, fault="function raised")
    value = user_function.number(reward)
    if not 0.0 <= value <= 1.0:
        reason = f"{place} returned {reward!r:.100}; a reward is a finite number from 0 to 1"
        if _is_first(("returned", type(reward).__name__), reason):
            log.warning(reason)
        return Answer("error", reason=reason, fault="function returned no reward")
    return Answer("scored", value)


_complaints: Counter[tuple[str, object]] = Counter()
"""How often a user's function or the sandbox has failed, by kind and line."""


def _is_first(kind: tuple[str, object], reason: str) -> bool:
    """Count a failure; of the later ones of a kind the log tells only how many there are, at 10, 100 and so on."""
    if kind not in _complaints and len(_complaints) >= MAX_COMPLAINTS:
        kind = ("other", 0)
    _complaints[kind] += 1
    count = _complaints[kind]
    if count > 1 and str(count).strip("0") == "1":
        log.warning("%d times so far: %s", count, reason)
    return count == 1


def _last_line(error: Exception) -> int:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_lineno if trace is not None else 0


def load_function(place: str, digest: str) -> None:
    """Import a user's function; raises ConfigError when it cannot be, or is not the one the run means."""
    if function_digest(place) != digest:
        raise ConfigError(
            f"{user_function.file_of(place)} has changed since this run began; give the file back as it was, or start a run "
            "in another directory"
        )
    user_function.load(place)


def main() -> None:
    """Judge, or fork those that do, until the parent closes the pipe or dies."""
    die_with_parent(int(sys.argv[1]))
    setproctitle.setproctitle("prefixrl-verifier")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Whatever a library reads or prints must not be a frame, nor land between two.
    given, answers = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that the limit is ours
    if len(sys.argv) > 2:
        place, digest = sys.argv[2:4]
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        load_function(place, digest)
        serve(place, given, answers)
        return
    for gold, answer in WARMING:
        verify_with_sympy(gold, answer, WARMING_S)
    fork_children(socket.socket(fileno=given))


def fork_children(link: socket.socket) -> None:
    """Be the template, until the parent closes the link. Returns in no child."""
    template = os.getpid()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a child: the kernel reaps it
    while True:
        said, pipes, _, _ = socket.recv_fds(link, 1, 2)
        if not said:
            return
        if os.fork() == 0:
            try:
                die_with_parent(template)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
                link.close()
                serve("", *pipes)
            finally:
                os._exit(0)
        for each in pipes:
            os.close(each)


def serve(place: str, questions: int, answers: int) -> None:
    """Judge what comes through one pipe into the other, until the first is closed."""
    with os.fdopen(questions, "rb") as asked, os.fdopen(answers, "wb", buffering=0) as answered:
        answered.write(frame(Ready(os.getpid())))
        while (question := _next_question(asked)) is not None:
            _renew_cpu_limit(math.ceil(deadline_s(question.timeout_s, question.code)))
            answered.write(frame(_answer(place, question)))


def _answer(place: str, question: Question) -> Answer:
    if place:
        return score(place, question)
    return judge(question) if question.code == "none" else judge_program(question)


def _next_question(pipe: BinaryIO) -> Question | None:
    head = pipe.read(LENGTH_BYTES)
    if len(head) < LENGTH_BYTES:
        return None
    return msgspec.msgpack.decode(pipe.read(int.from_bytes(head, "big")), type=Question)


def _renew_cpu_limit(budget_s: int) -> None:
    # Strikes only where the parent cannot: it is stopped, or too busy to look at its deadlines.
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime) + budget_s + 1
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, hard))


if __name__ == "__main__":
    main()
