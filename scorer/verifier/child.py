"""`python -m prefixrl.scorer.verifier.child PARENT_PID [FUNCTION DIGEST LIMIT WEIGHTS]`: judge.

Started by `child_process.py`, never by hand. It is a process of its own because sympy may loop for minutes in C code
that no alarm interrupts, or take all memory: such work can only be killed from outside. Without FUNCTION it is the
template: it imports sympy, and for every two descriptors received through the socket on its stdin it forks a child that
reads and writes there. With FUNCTION, a user's `file.py:name` whose file must have DIGEST, it leads a process group and
forks once: the fork is a child that reads stdin, writes stdout, and calls that function instead of sympy. It ends with
its input.

    parent ── ChildQuestion ──▶ child ── ChildReady, then one ChildAnswer per question ──▶ parent
"""

import contextlib
import logging
import math
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Callable
from typing import BinaryIO

import msgspec
import setproctitle

from prefixrl.common.host.process import STOP_SIGNALS, die_with_parent
from prefixrl.common.prompts.extract import MAX_ANSWER_CHARS
from prefixrl.common.prompts.program_tests import read_tests
from prefixrl.common.wire.messages.fields import encodable
from prefixrl.common.wire.messages.groups import Fault
from prefixrl.scorer.sandbox.comparison import is_rounded
from prefixrl.scorer.sandbox.programs import share_passed, value_of
from prefixrl.scorer.sandbox.runner import ProgramLimits, SandboxError
from prefixrl.scorer.verifier import exchange, scoring
from prefixrl.scorer.verifier.complaints import Complaints
from prefixrl.scorer.verifier.exchange import ChildAnswer, ChildQuestion, ChildReady, Outcome
from prefixrl.scorer.verifier.rules import verify
from prefixrl.scorer.verifier.rules.arithmetic import read_rational
from prefixrl.scorer.verifier.rules.looks import normal_form

log = logging.getLogger(__name__)

MEMORY_BYTES = 2 * 2**30
WARMING = (
    ("x+1", "1+x"),
    (r"2\ln x+\sqrt{3}", r"\sqrt{3}+2\ln x"),
    (r"[1,\frac{\pi}{2})", r"[1,\frac{\pi}{3})"),
)
"""Pairs judged by the template, so that sympy and its parser are ready in every child."""
WARMING_S = 60.0
Judge = Callable[[ChildQuestion], ChildAnswer]

_complaints = Complaints(log)


def judge(question: ChildQuestion) -> ChildAnswer:
    """Ask sympy; every failure has an outcome of its own."""
    try:
        if question.is_gold:
            is_right = verify.is_readable(question.gold, question.timeout_s)
        else:
            is_right = verify.verify_with_sympy(question.gold, question.answer, question.timeout_s)
    except verify.UnparsableAnswerError:
        return ChildAnswer("parse_fail")
    except (TimeoutError, MemoryError):  # the answer used up its share
        return ChildAnswer("timeout")
    except verify.GoldError as error:
        return ChildAnswer("error", reason=str(error), fault="gold answer unreadable")
    except Exception as error:
        log.exception("gold %.100r, answer %.100r", question.gold, question.answer)
        reason = f"the verifier failed: {type(error).__name__}: {error}"
        return ChildAnswer("error", reason=reason, fault="verifier raised")
    return ChildAnswer("right" if is_right else "wrong")


def judge_program(question: ChildQuestion) -> ChildAnswer:
    """Run a program in the sandbox, whose own failure is an `error`, never a wrong answer."""
    choices = question.choices
    limits = ProgramLimits(wall_ms=1000 * question.timeout_s, cpu_s=question.timeout_s)
    try:
        if question.code == "tests":
            tests = read_tests(question.gold)
            share, is_late = share_passed(
                question.answer, tests, limits, choices.packages, choices.float_tolerance
            )
            return ChildAnswer("timeout") if is_late and not share else ChildAnswer("scored", share)
        finished, value = value_of(question.answer, limits, choices.packages)
    except (SandboxError, ValueError, OSError) as error:
        fault: Fault = (
            "gold answer unreadable" if isinstance(error, ValueError) else "sandbox failed"
        )
        fault = error.fault if isinstance(error, SandboxError) else fault
        if _complaints.is_first(("program", fault), str(error)):
            log.warning("no verdict on a program: %s", error)
        return ChildAnswer("error", reason=str(error), fault=fault)
    if finished.status == "timeout":
        return ChildAnswer("timeout")
    if value is None:
        return ChildAnswer("parse_fail")
    number = read_rational(normal_form(question.gold))
    if number is not None and is_rounded(value, number.value, choices.float_tolerance):
        return ChildAnswer("right", extracted=value)
    known = verify.judge_exactly(question.gold, value)
    if known is None:
        return msgspec.structs.replace(
            judge(ChildQuestion(question.gold, value, question.timeout_s)), extracted=value
        )
    outcome: Outcome = "parse_fail" if known.status == "parse_fail" else "wrong"
    return ChildAnswer("right" if known.reward else outcome, extracted=value)


def main() -> None:
    """Judge, or fork children that judge, until the parent closes the pipe or dies."""
    function = sys.argv[2:6]
    if not function:
        die_with_parent(int(sys.argv[1]))
    setproctitle.setproctitle("prefixrl-verifier")
    # The parent handles Ctrl-C and signals of a batch system; it needs its children while it drains, and the programs
    # that they judge. A user's function may end what it started by SIGTERM, which a program would inherit as ignored.
    for number in STOP_SIGNALS:
        signal.signal(number, (lambda *_: None) if function else signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Nothing that a library reads or prints may be, or fall between, frames.
    given, answers = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    logging.getLogger("math_verify").setLevel(
        logging.ERROR
    )  # it warns about its own time limit, which is off
    if function:
        function_ref, digest, timeout_s, weights = function
        guard_group(given, int(sys.argv[1]))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        with scoring.loaded(
            function_ref, digest, int(timeout_s), msgspec.json.decode(weights)
        ) as users:
            serve(users.score, ChildReady(os.getpid(), users.takes_verdict), given, answers)
        return
    for gold, answer in WARMING:
        verify.verify_with_sympy(gold, answer, WARMING_S)
    fork_children(socket.socket(fileno=given))


def guard_group(questions: int, parent: int) -> None:
    """Return in a fork; this process stays, and kills their group once fork or parent has ended.

    The kernel ends a child with its parent, but not what a user's function started: that would run for ever.
    """
    guard = os.getpid()
    if (child := os.fork()) == 0:
        die_with_parent(guard)
        return
    ends = select.poll()
    ends.register(questions, 0)  # no event but its hang-up: the parent closed it
    ends.register(os.pidfd_open(child))
    with contextlib.suppress(ProcessLookupError):
        # What the parent forked may hold the pipe open after its end.
        ends.register(os.pidfd_open(parent))
        if os.getppid() == parent:
            ends.poll()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)  # the first process of a container may reap nothing
    os.killpg(guard, signal.SIGKILL)


def fork_children(link: socket.socket) -> None:
    """Be the template until the parent closes the link; never returns in a child."""
    template = os.getpid()
    signal.signal(
        signal.SIGCHLD, signal.SIG_IGN
    )  # no process waits for a child: the kernel reaps it
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
                serve(judge_any, ChildReady(os.getpid()), *pipes)
            finally:
                os._exit(0)
        for each in pipes:
            os.close(each)


def serve(judge_one: Judge, ready: ChildReady, questions: int, answers: int) -> None:
    """Judge the questions of one pipe into the other, until the first is closed."""
    with os.fdopen(questions, "rb") as asked, os.fdopen(answers, "wb", buffering=0) as answered:
        answered.write(exchange.frame(ready))
        while (question := _next_question(asked)) is not None:
            _renew_cpu_limit(math.ceil(exchange.deadline_s(question.timeout_s, question.code)))
            answer = judge_one(question)
            # What an answer or a program wrote is cut: a long frame looks like the end of this process.
            extracted = (
                None if answer.extracted is None else encodable(answer.extracted[:MAX_ANSWER_CHARS])
            )
            reason = encodable(answer.reason[:MAX_ANSWER_CHARS])
            answered.write(
                exchange.frame(msgspec.structs.replace(answer, extracted=extracted, reason=reason))
            )


def judge_any(question: ChildQuestion) -> ChildAnswer:
    """Judge a formula or a program."""
    return judge(question) if question.code == "none" else judge_program(question)


def _next_question(pipe: BinaryIO) -> ChildQuestion | None:
    head = pipe.read(exchange.LENGTH_BYTES)
    if len(head) < exchange.LENGTH_BYTES:
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
