"""`python -m prefixrl.scorer.verifier.child PARENT_PID template ... | function ...`: judge answers.

Started by `child_process.py`, never by hand. It is a process of its own because sympy may loop for
minutes in C code that no alarm interrupts, or take all memory: such work can only be killed from
outside.

    template NAME...
        imports sympy and the named verifiers of packages, and for every two descriptors received
        through the socket on its stdin forks a child that reads and writes there
    function REF DIGEST LIMIT WEIGHTS
        REF is a user's `file.py:name` whose file must have DIGEST. It leads a process group and
        forks once; the fork reads stdin, writes stdout, and calls that function instead of sympy

Both end with their input.

    parent ── ChildQuestion ──▶ child ── ChildReady, then one Judgement per question ──▶ parent
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
from prefixrl.common.wire.messages.fields import MOST_NAME_CHARS, encodable
from prefixrl.scorer.verifier import exchange, scoring
from prefixrl.scorer.verifier.child_process import FUNCTION
from prefixrl.scorer.verifier.exchange import ChildQuestion, ChildReady
from prefixrl.scorer.verifier.rules import verify
from prefixrl.scorer.verifier.rules.verify import Judgement
from prefixrl.scorer.verifier.verifiers import (
    deadline_s,
    find_verifier,
    is_mathematics,
    judge_formula,
    judge_with,
)

MEMORY_BYTES = 2 * 2**30
WARMING = (
    ("x+1", "1+x"),
    (r"2\ln x+\sqrt{3}", r"\sqrt{3}+2\ln x"),
    (r"[1,\frac{\pi}{2})", r"[1,\frac{\pi}{3})"),
)
"""Pairs judged by the template, so that sympy and its parser are ready in every child."""
WARMING_S = 60.0
Judge = Callable[[ChildQuestion], Judgement]


def main() -> None:
    """Judge, or fork children that judge, until the parent closes the pipe or dies."""
    parent, kind, *words = sys.argv[1:]
    is_function = kind == FUNCTION
    if not is_function:
        die_with_parent(int(parent))
    setproctitle.setproctitle("prefixrl-verifier")
    # The parent handles Ctrl-C and signals of a batch system; it needs its children while it drains, and the programs
    # that they judge. A user's function may end what it started by SIGTERM, which a program would inherit as ignored.
    for number in STOP_SIGNALS:
        signal.signal(number, (lambda *_: None) if is_function else signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Nothing that a library reads or prints may be, or fall between, frames.
    questions, answers = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    # It warns about its own time limit, which is off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    if is_function:
        function_ref, digest, timeout_s, weights = words
        guard_group(questions, int(parent))
        _limit_memory()
        with scoring.loaded(
            function_ref, digest, int(timeout_s), msgspec.json.decode(weights)
        ) as function:
            ready = ChildReady(os.getpid(), function.takes)
            serve(function.score, ready, questions, answers)
        return
    for gold, answer in WARMING:
        verify.verify_with_sympy(gold, answer, WARMING_S)
    for name in words:
        find_verifier(name)
    fork_children(socket.socket(fileno=questions))


def _limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))


def guard_group(questions: int, parent: int) -> None:
    """Return in a fork; this process stays, and kills their group once fork or parent has ended.

    The kernel ends a child with its parent, but not what a user's function started: that would run
    for ever.
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
    # No process waits for a child: the kernel reaps it.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        received, pipes, _, _ = socket.recv_fds(link, 1, 2)
        if not received:
            return
        if os.fork() == 0:
            try:
                die_with_parent(template)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _limit_memory()
                link.close()
                serve(judge_any, ChildReady(os.getpid()), *pipes)
            finally:
                os._exit(0)
        for descriptor in pipes:
            os.close(descriptor)


def serve(judge_one: Judge, ready: ChildReady, questions: int, answers: int) -> None:
    """Judge the questions of one pipe into the other, until the first is closed."""
    with os.fdopen(questions, "rb") as inbox, os.fdopen(answers, "wb", buffering=0) as outbox:
        outbox.write(exchange.frame(ready))
        while (question := _next_question(inbox)) is not None:
            _renew_cpu_limit(math.ceil(deadline_s(question.timeout_s, question.code)))
            outbox.write(exchange.frame(_short_verdict(judge_one(question))))


def _short_verdict(verdict: Judgement) -> Judgement:
    """Cut what an answer or a program wrote: a long frame looks like the end of this process."""
    extracted = verdict.extracted
    if extracted is not None:
        extracted = encodable(extracted[:MAX_ANSWER_CHARS])
    rule = encodable(verdict.rule[:MOST_NAME_CHARS])
    return msgspec.structs.replace(verdict, extracted=extracted, rule=rule)


def judge_any(question: ChildQuestion) -> Judgement:
    """Judge a formula, or have the verifier judge that the question names."""
    if is_mathematics(question.code):
        return judge_formula(question)
    return judge_with(find_verifier(question.code), question)


def _next_question(pipe: BinaryIO) -> ChildQuestion | None:
    head = pipe.read(exchange.LENGTH_BYTES)
    if len(head) < exchange.LENGTH_BYTES:
        return None
    return msgspec.msgpack.decode(pipe.read(int.from_bytes(head, "big")), type=ChildQuestion)


def _renew_cpu_limit(budget_s: int) -> None:
    # Strikes only where the parent cannot: it is stopped, or too busy to look at its deadlines.
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit_s = int(used.ru_utime + used.ru_stime) + budget_s + 1
    _, hard_limit = resource.getrlimit(resource.RLIMIT_CPU)
    if hard_limit != resource.RLIM_INFINITY:
        limit_s = min(limit_s, hard_limit)
    resource.setrlimit(resource.RLIMIT_CPU, (limit_s, hard_limit))


if __name__ == "__main__":
    main()
