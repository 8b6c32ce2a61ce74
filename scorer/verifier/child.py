"""`python -m prefixrl.scorer.verifier.child PARENT_PID [FUNCTION DIGEST]`: judge answers.

Started by `child_process.py`, never by hand. It is a process of its own because sympy may loop for minutes in C code
that no alarm interrupts, or take all memory: such work can only be killed from outside. Without FUNCTION it is the
template: it imports sympy, and for every two descriptors received through the socket on its stdin it forks a child that
reads and writes there. With FUNCTION, a user's `file.py:name` whose file must have DIGEST, it is itself a child that
reads stdin, writes stdout, and calls that function instead of sympy. It ends with its input.

    parent ── ChildQuestion ──▶ child ── ChildReady, then one ChildAnswer per question ──▶ parent

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

from prefixrl.common.config import user_function
from prefixrl.common.digests import function_digest
from prefixrl.common.engines.extract import MAX_ANSWER_CHARS
from prefixrl.common.errors import ConfigError
from prefixrl.common.process import STOP_SIGNALS, die_with_parent
from prefixrl.common.wire.messages import CodeMode, Fault, encodable
from prefixrl.scorer.sandbox.programs import MAX_TESTS, is_value, read_tests, share_passed, value_of
from prefixrl.scorer.sandbox.runner import GRACE_S, START_S, ProgramLimits, SandboxError
from prefixrl.scorer.verifier.verify import (
    GoldError,
    UnparsableAnswerError,
    is_readable,
    judge_exactly,
    verify_with_sympy,
)

log = logging.getLogger(__name__)

LENGTH_BYTES = 4
MEMORY_BYTES = 2 * 2**30
WARMING = (("x+1", "1+x"), (r"2\ln x+\sqrt{3}", r"\sqrt{3}+2\ln x"), (r"[1,\frac{\pi}{2})", r"[1,\frac{\pi}{3})"))
"""Pairs judged by the template, so that sympy and its parser are ready in every child."""
WARMING_S = 60.0
MAX_COMPLAINTS = 20
"""Number of kinds of failures that the log distinguishes."""

Outcome = Literal["right", "wrong", "parse_fail", "timeout", "error", "scored"]
"""Result of a question; `scored`: a user's function or a program's tests gave a reward."""


class ChildQuestion(msgspec.Struct, frozen=True):
    """One answer to judge."""

    gold: str
    answer: str
    """The answer for sympy; for a user's function the whole text; else a program (`code`)."""
    timeout_s: int
    question: str = ""
    """The problem's question, for a user's function."""
    code: CodeMode = "none"
    """If not `none`, `answer` is a program."""
    is_gold: bool = False
    """True asks if sympy reads the gold answer; `answer` is not used."""


class ChildReady(msgspec.Struct, frozen=True, tag=True):
    """The child has done its imports: from here on the time is the answer's."""

    pid: int


class ChildAnswer(msgspec.Struct, frozen=True, tag=True):
    """The result of the last question."""

    outcome: Outcome
    reward: float = 0.0
    """The reward where the outcome is `scored`."""
    extracted: str | None = None
    """The value of a program."""
    reason: str = ""
    """Reason of an `error`."""
    fault: Fault = ""
    """Kind of an `error`."""


FromChild = ChildReady | ChildAnswer


def frame(message: msgspec.Struct) -> bytes:
    """Encode a message for a pipe."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def deadline_s(timeout_s: int, code: CodeMode = "none") -> float:
    """Return the seconds from a question after which a silent child is killed."""
    if code == "none":
        return timeout_s + GRACE_S
    runs = MAX_TESTS if code == "tests" else 1
    return runs * (timeout_s + START_S + GRACE_S) + timeout_s + GRACE_S


def judge(question: ChildQuestion) -> ChildAnswer:
    """Ask sympy; every failure has an outcome of its own."""
    try:
        if question.is_gold:
            is_right = is_readable(question.gold, question.timeout_s)
        else:
            is_right = verify_with_sympy(question.gold, question.answer, question.timeout_s)
    except UnparsableAnswerError:
        return ChildAnswer("parse_fail")
    except (TimeoutError, MemoryError):  # the answer used up its share
        return ChildAnswer("timeout")
    except GoldError as error:
        return ChildAnswer("error", reason=str(error), fault="gold answer unreadable")
    except Exception as error:
        log.exception("gold %.100r, answer %.100r", question.gold, question.answer)
        reason = f"the verifier failed: {type(error).__name__}: {error}"
        return ChildAnswer("error", reason=reason, fault="verifier raised")
    return ChildAnswer("right" if is_right else "wrong")


def judge_program(question: ChildQuestion) -> ChildAnswer:
    """Run a program in the sandbox, whose own failure is an `error`, never a wrong answer."""
    limits = ProgramLimits(wall_ms=1000 * question.timeout_s, cpu_s=question.timeout_s)
    try:
        if question.code == "tests":
            share, is_late = share_passed(question.answer, read_tests(question.gold), limits)
            return ChildAnswer("timeout") if is_late and not share else ChildAnswer("scored", share)
        finished, value = value_of(question.answer, limits)
    except (SandboxError, ValueError, OSError) as error:
        fault: Fault = "gold answer unreadable" if isinstance(error, ValueError) else "sandbox failed"
        fault = error.fault if isinstance(error, SandboxError) else fault
        if _is_first(("program", fault), str(error)):
            log.warning("no verdict on a program: %s", error)
        return ChildAnswer("error", reason=str(error), fault=fault)
    if finished.status == "timeout":
        return ChildAnswer("timeout")
    if value is None:
        return ChildAnswer("parse_fail")
    if is_value(question.gold, value):
        return ChildAnswer("right", extracted=value)
    known = judge_exactly(question.gold, value)
    if known is None:
        return msgspec.structs.replace(judge(ChildQuestion(question.gold, value, question.timeout_s)), extracted=value)
    outcome: Outcome = "parse_fail" if known.status == "parse_fail" else "wrong"
    return ChildAnswer("right" if known.reward else outcome, extracted=value)


def score(function_ref: str, question: ChildQuestion) -> ChildAnswer:
    """Call a user's function; anything but a number in [0, 1] is an error with its reason."""
    function, path = user_function.load(function_ref), user_function.file_of(function_ref)
    try:
        reward = function(question.question, question.answer, question.gold)
    except Exception as error:
        reason = user_function.explain(error, path)
        if _is_first((type(error).__name__, _last_line(error)), reason):
            log.warning("%s failed", function_ref, exc_info=True)
        return ChildAnswer("error", reason=reason, fault="function raised")
    value = user_function.number(reward)
    if not 0.0 <= value <= 1.0:
        reason = f"{function_ref} returned {reward!r:.100}; a reward is a finite number from 0 to 1"
        if _is_first(("returned", type(reward).__name__), reason):
            log.warning(reason)
        return ChildAnswer("error", reason=reason, fault="function returned no reward")
    return ChildAnswer("scored", value)


_complaints: Counter[tuple[str, object]] = Counter()
"""Failures of a user's function or the sandbox so far, by kind and line."""


def _is_first(kind: tuple[str, object], reason: str) -> bool:
    """Count a failure; return True for the first of its kind, log the 10th, 100th and so on."""
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


def load_function(function_ref: str, digest: str) -> None:
    """Import a user's function; raises ConfigError when it fails, or its file has changed."""
    if function_digest(function_ref) != digest:
        raise ConfigError(
            f"{user_function.file_of(function_ref)} has changed since this run began; restore the file, or start "
            f"a run in another directory"
        )
    user_function.load(function_ref)


def main() -> None:
    """Judge, or fork children that judge, until the parent closes the pipe or dies."""
    die_with_parent(int(sys.argv[1]))
    setproctitle.setproctitle("prefixrl-verifier")
    # The parent handles Ctrl-C and signals of a batch system; it needs its children while it drains.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Nothing that a library reads or prints may be, or fall between, frames.
    given, answers = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns about its own time limit, which is off
    if len(sys.argv) > 2:
        function_ref, digest = sys.argv[2:4]
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        load_function(function_ref, digest)
        serve(function_ref, given, answers)
        return
    for gold, answer in WARMING:
        verify_with_sympy(gold, answer, WARMING_S)
    fork_children(socket.socket(fileno=given))


def fork_children(link: socket.socket) -> None:
    """Be the template until the parent closes the link; never returns in a child."""
    template = os.getpid()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a child: the kernel reaps it
    while True:
        received, pipes, _, _ = socket.recv_fds(link, 1, 2)
        if not received:
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


def serve(function_ref: str, questions: int, answers: int) -> None:
    """Judge the questions of one pipe into the other, until the first is closed."""
    with os.fdopen(questions, "rb") as asked, os.fdopen(answers, "wb", buffering=0) as answered:
        answered.write(frame(ChildReady(os.getpid())))
        while (question := _next_question(asked)) is not None:
            _renew_cpu_limit(math.ceil(deadline_s(question.timeout_s, question.code)))
            answered.write(frame(_short(_answer(function_ref, question))))


def _answer(function_ref: str, question: ChildQuestion) -> ChildAnswer:
    if function_ref:
        return score(function_ref, question)
    return judge(question) if question.code == "none" else judge_program(question)


def _short(answer: ChildAnswer) -> ChildAnswer:
    """Cut what an answer or a program wrote: a long frame looks like the end of this process."""
    extracted = None if answer.extracted is None else encodable(answer.extracted[:MAX_ANSWER_CHARS])
    return msgspec.structs.replace(answer, extracted=extracted, reason=encodable(answer.reason[:MAX_ANSWER_CHARS]))


def _next_question(pipe: BinaryIO) -> ChildQuestion | None:
    head = pipe.read(LENGTH_BYTES)
    if len(head) < LENGTH_BYTES:
        return None
    return msgspec.msgpack.decode(pipe.read(int.from_bytes(head, "big")), type=ChildQuestion)


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
