"""The messages between a pool and its verifier children.

A frame is its length (4 bytes, big-endian) and a MessagePack document.
"""

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


FromChild = ChildReady | Judgement
"""A judgement is the result of the last question; its `extracted` is None where the question has it."""


def frame(message: msgspec.Struct) -> bytes:
    """Encode a message for a pipe."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body
