"""Asks the broker and waits for the answer: what learner ranks and operators share."""

import contextlib
import logging
import os
import secrets
import socket
import time
from typing import TypeVar, cast

from prefixrl.common.errors import PeerLost, PrefixRLError, Refusal
from prefixrl.common.messages import (
    PROTOCOL,
    FromBroker,
    Goodbye,
    Hello,
    Reject,
    Role,
    ToBroker,
    Unknown,
    Welcome,
)
from prefixrl.common.transport import Client, Malformed

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

ANSWER_S = 60.0
"""Longest wait for any answer: a restarted broker replays its journal meanwhile."""
ASK_AGAIN_S = 5.0
LINGER_S = 1.0
TAG_BYTES = 9


def is_tag(frame: bytes) -> bool:
    """Whether a payload frame is a request's number; no encoded message begins like it."""
    return len(frame) == TAG_BYTES and frame[:1] == b"#"


class Requester:
    """One connection, used by one thread. Every request may be repeated: the broker treats a repetition as the same."""

    def __init__(self, endpoint: str, role: Role, answer_s: float = ANSWER_S) -> None:
        self._endpoint = endpoint
        self._answer_s = answer_s
        self._number = 0
        identity = secrets.token_hex(8)
        self._hello = Hello(PROTOCOL, role, identity, socket.gethostname(), os.getpid())
        self._client: Client[FromBroker, ToBroker] = Client(endpoint, FromBroker, identity.encode())
        try:
            self.welcome = self.ask(self._hello, Welcome)[0]
        except PrefixRLError:
            self.close()
            raise

    def ask(self, request: ToBroker, wanted: type[Answer]) -> tuple[Answer, list[bytes]]:
        """The answer of the wanted type (a union will do) with its payload frames.

        Raises:
            PeerLost: no such answer in time.
            Refusal: the broker refuses this peer.
        """
        deadline_s = time.monotonic() + self._answer_s
        self._number += 1
        while time.monotonic() < deadline_s:
            try:
                self._client.send(request, [self._tag], timeout_s=min(ASK_AGAIN_S, self._answer_s))
                answer = self._answer(wanted)
            except (PeerLost, Malformed) as error:
                log.debug("%s", error)
                continue
            if answer is not None:
                return cast("tuple[Answer, list[bytes]]", answer)
        raise PeerLost(
            f"the broker at {self._endpoint} did not answer {type(request).__name__} within {self._answer_s:g} s"
        )

    def _answer(self, wanted: type[Answer]) -> tuple[FromBroker, list[bytes]] | None:
        """The wanted answer, or None when the request must be sent again."""
        deadline_s = time.monotonic() + min(ASK_AGAIN_S, self._answer_s)
        while (left_s := deadline_s - time.monotonic()) > 0:
            received = self._client.receive(left_s)
            if received is None:
                return None
            message = received[0]
            if isinstance(message, Reject):
                raise Refusal(message.reason)
            if isinstance(message, Unknown):
                self._client.send(self._hello, [self._tag])
                return None
            frames = received[1]
            if frames and is_tag(frames[0]):
                if frames[0] != self._tag:
                    continue  # the second answer to an earlier request that was sent twice
                frames = frames[1:]
            if isinstance(message, wanted):
                return message, frames
        return None

    @property
    def _tag(self) -> bytes:
        """Number of the request under way, echoed by the broker in a frame of its own."""
        return b"#" + self._number.to_bytes(8, "little")

    def leave(self, reason: str) -> None:
        """Say Goodbye: nothing is asked any more, the broker need not stay for this peer."""
        # A broker that is gone needs none.
        with contextlib.suppress(PeerLost):
            self._client.send(Goodbye(reason), timeout_s=0.0)

    def close(self) -> None:
        """Close the connection."""
        self._client.close(linger_s=LINGER_S)
