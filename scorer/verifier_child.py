"""`python -m prefixrl.scorer.verifier_child PARENT_PID`: judges answers until its input ends.

Started by `VerifierPool`, never by hand. A process of its own because sympy may loop for minutes in
C code that no alarm interrupts, or take all memory: such work can only be killed from outside.

    parent ── Question ──▶ stdin        stdout ── Ready, then one Answer per Question ──▶ parent

A frame is its length (4 bytes, big-endian) and a MessagePack document.
"""

import logging
import os
import resource
import signal
import sys
from typing import BinaryIO, Literal

import msgspec
import setproctitle

from prefixrl.common.process import die_with_parent
from prefixrl.scorer.verify import UnparsableAnswerError, verify_with_sympy

log = logging.getLogger(__name__)

LENGTH_BYTES = 4
MEMORY_BYTES = 2 * 2**30

Outcome = Literal["right", "wrong", "parse_fail", "timeout", "error"]


class Question(msgspec.Struct, frozen=True):
    """One answer to judge."""

    gold: str
    answer: str
    timeout_s: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Imports are done: from here on time is the answer's."""


class Answer(msgspec.Struct, frozen=True, tag=True):
    """What became of the last question."""

    outcome: Outcome


FromChild = Ready | Answer


def frame(message: msgspec.Struct) -> bytes:
    """A message as it stands in a pipe."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def deadline_s(timeout_s: int) -> int:
    """Seconds until a child is killed: two parses and a comparison at their limit, and one."""
    return 3 * timeout_s + 1


def judge(question: Question) -> Outcome:
    """Ask sympy; everything an answer can do to it has a name."""
    try:
        is_right = verify_with_sympy(question.gold, question.answer, question.timeout_s)
    except UnparsableAnswerError:
        return "parse_fail"
    except (TimeoutError, MemoryError):  # the answer used up what one answer is given
        return "timeout"
    except Exception:
        log.exception("gold %.100r, answer %.100r", question.gold, question.answer)
        return "error"
    return "right" if is_right else "wrong"


def main() -> None:
    """Judge until the parent closes the pipe or dies."""
    die_with_parent(int(sys.argv[1]))
    setproctitle.setproctitle("prefixrl-verifier")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    questions = sys.stdin.buffer
    # Whatever a library prints must not land between two frames.
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    verify_with_sympy("x+1", "1+x", 60)  # imports sympy and builds its parser
    answers.write(frame(Ready()))
    while (question := _next_question(questions)) is not None:
        _renew_cpu_limit(deadline_s(question.timeout_s))
        answers.write(frame(Answer(judge(question))))


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
