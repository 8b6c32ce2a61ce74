"""The messages between a pool and its verifier children.

A frame is its length (4 bytes, big-endian) and a MessagePack document.
"""

from typing import Literal

import msgspec

from prefixrl.common.wire.messages.groups import CodeMode, Fault
from prefixrl.scorer.verifier.rules.verify import Judgement

LENGTH_BYTES = 4

Outcome = Literal["right", "wrong", "no_answer", "parse_fail", "timeout", "error", "scored"]
"""Result of a question; `scored`: a function or a program's tests gave a reward."""


class Choices(msgspec.Struct, frozen=True):
    """The keys `scorer.boxes`, `data.float_tolerance`, `scorer.program_packages` and `data.code`."""

    joins_boxes: bool = False
    float_tolerance: float = 1e-9
    packages: tuple[str, ...] = ()
    verifiers: tuple[str, ...] = ()
    """Verifiers of packages that the run names; children import them before they are ready."""


STANDARD = Choices()


class ChildQuestion(msgspec.Struct, frozen=True):
    """One answer to judge."""

    gold: str
    answer: str
    """For sympy the answer; else what the verifier judges: a program, or the whole text."""
    timeout_s: int
    question: str = ""
    """The problem's question, for a function."""
    code: CodeMode = "none"
    """Name of the verifier that judges it; `none`: sympy."""
    choices: Choices = STANDARD
    verdict: Judgement | None = None
    """The verifier's own, for a user's function that takes it."""
    is_gold: bool = False
    """True asks if sympy reads the gold answer; `answer` is not used."""


class ChildReady(msgspec.Struct, frozen=True, tag=True):
    """The child has done its imports: from here on the time is the answer's."""

    pid: int
    takes_verdict: bool = False
    """True of a user's function that is handed the verifier's verdict."""


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
    parts: dict[str, float] = {}
    """Other numbers that a user's function gave, by name."""
    rule: str = ""
    """The rule that decided; see `Judgement.rule`."""


FromChild = ChildReady | ChildAnswer


def frame(message: msgspec.Struct) -> bytes:
    """Encode a message for a pipe."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body
