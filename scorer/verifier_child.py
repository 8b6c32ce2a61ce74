"""`python -m prefixrl.scorer.verifier_child PARENT_PID [FUNCTION DIGEST]`: judges answers until its input ends.

Started by `VerifierPool`, never by hand. A process of its own because sympy may loop for minutes in
C code that no alarm interrupts, or take all memory: such work can only be killed from outside. With FUNCTION, a user's
`file.py:name`, that function is asked instead of sympy; DIGEST is the one its file must have.

    parent ── Question ──▶ stdin        stdout ── Ready, then one Answer per Question ──▶ parent

A frame is its length (4 bytes, big-endian) and a MessagePack document.
"""

import logging
import math
import os
import resource
import signal
import sys
from typing import BinaryIO, Literal

import msgspec
import setproctitle

from prefixrl.common import user_function
from prefixrl.common.digests import function_digest
from prefixrl.common.errors import ConfigError
from prefixrl.common.messages import CodeMode
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


class Answer(msgspec.Struct, frozen=True, tag=True):
    """What became of the last question."""

    outcome: Outcome
    reward: float = 0.0
    """Where the outcome is `scored`."""
    extracted: str | None = None
    """The value of a program."""
    reason: str = ""
    """Where it is `error`: why."""


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
        return Answer("error", reason=str(error))
    except Exception as error:
        log.exception("gold %.100r, answer %.100r", question.gold, question.answer)
        return Answer("error", reason=f"the verifier failed: {type(error).__name__}: {error}")
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
        log.warning("no verdict on a program: %s", error)
        return Answer("error", reason=str(error))
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
        log.warning("%s failed", place, exc_info=True)
        return Answer("error", reason=user_function.explain(error, path))
    value = user_function.number(reward)
    if not 0.0 <= value <= 1.0:
        reason = f"{place} returned {reward!r:.100}; a reward is a finite number from 0 to 1"
        log.warning(reason)
        return Answer("error", reason=reason)
    return Answer("scored", value)


def load_function(place: str, digest: str) -> None:
    """Import a user's function; raises ConfigError when it cannot be, or is not the one the run means."""
    if function_digest(place) != digest:
        raise ConfigError(
            f"{user_function.file_of(place)} has changed since this scorer started; start it again"
        )
    user_function.load(place)


def main() -> None:
    """Judge until the parent closes the pipe or dies."""
    die_with_parent(int(sys.argv[1]))
    setproctitle.setproctitle("prefixrl-verifier")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    # Whatever a library reads or prints must not be a frame, nor land between two.
    questions = os.fdopen(os.dup(0), "rb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that the limit is ours
    place = sys.argv[2] if len(sys.argv) > 2 else ""
    if place:
        load_function(place, sys.argv[3])
    else:
        verify_with_sympy("x+1", "1+x", 60)  # imports sympy and builds its parser
    answers.write(frame(Ready()))
    while (question := _next_question(questions)) is not None:
        _renew_cpu_limit(math.ceil(deadline_s(question.timeout_s, question.code)))
        answers.write(frame(_answer(place, question)))


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
