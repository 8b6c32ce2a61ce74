"""The messages between a pool and its verifier children.

A frame is its length (4 bytes, big-endian) and a MessagePack document.
"""

from typing import Literal

import msgspec

from prefixrl.common.wire.messages.groups import CodeMode
from prefixrl.scorer.verifier.rules.verify import Judgement

LENGTH_BYTES = 4


class Choices(msgspec.Struct, frozen=True):
    """The keys `scorer.boxes`, `data.float_tolerance`, `scorer.program_packages` and `data.code`."""

    joins_boxes: bool = False
    float_tolerance: float = 1e-9
    packages: tuple[str, ...] = ()
    verifiers: tuple[str, ...] = ()
    """Verifiers of packages that the run names; children import them before they are ready."""


STANDARD = Choices()


class AnswerFacts(msgspec.Struct, frozen=True):
    """Facts about an answer that its text does not tell, for a user's function or server."""

    tokens: int = 0
    """Tokens of the completion, in direct mode of the answer, as its limit counts them: a stop that ended it is one."""
    finish: Literal["stop", "length"] = "stop"
    """`length`: the limit cut it."""
    prefix: str = ""
    """Text of the prefix, or of the advice; "" in direct mode, or without one."""
    source: str = ""
    """Name under which figures list its problem: the source, and `/FAMILY` where these are few."""
    is_zero_if_cut: bool = False
    """True: where the limit cut it, only a function that takes `finish` judges it. Else its reward is 0."""


NO_FACTS = AnswerFacts()


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
    facts: AnswerFacts = NO_FACTS
    """For a function."""
    is_gold: bool = False
    """True asks if sympy reads the gold answer; `answer` is not used."""


class ChildReady(msgspec.Struct, frozen=True, tag=True):
    """The child has done its imports: from here on the time is the answer's."""

    pid: int
    takes: tuple[str, ...] = ()
    """Names of what a user's function is handed by name."""


FromChild = ChildReady | Judgement
"""A judgement is the result of the last question; its `extracted` is None where the question has it."""


def frame(message: msgspec.Struct) -> bytes:
    """Encode a message for a pipe."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body
