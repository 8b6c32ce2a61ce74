"""Asks the broker and waits for the answer: what learner ranks and operators share."""

import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable
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
from prefixrl.common.wait import Wait

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

ANSWER_S = 60.0
"""Longest wait for any answer, unless the asker says otherwise."""
ASK_AGAIN_S = 5.0
SUSPENDED = 4
"""A try that took so many times its limit was interrupted; it sends, waits and says Hello within three."""
LINGER_S = 1.0
TAG_BYTES = 9


def is_tag(frame: bytes) -> bool:
    """Whether a payload frame is a request's number; no encoded message begins like it."""
    return len(frame) == TAG_BYTES and frame[:1] == b"#"


class Requester:
    """One connection, used by one thread. Every request may be repeated: the broker treats a repetition as the same."""

    def __init__(
        self,
        endpoint: str,
        role: Role,
        answer_s: float = ANSWER_S,
        watch: Callable[[], None] = lambda: None,
    ) -> None:
        """`watch`: called after every try that had no answer; may raise what makes waiting useless."""
        self._endpoint = endpoint
        self._answer_s = answer_s
        self._try_s = min(ASK_AGAIN_S, answer_s)
        self._watch = watch
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
        name, waited_s = type(request).__name__, 0.0
        wait = Wait(f"the broker at {self._endpoint} to answer {name}")
        self._number += 1
        while True:
            began_s = time.monotonic()
            answer = self._try(request, wanted)
            if answer is not None:
                return cast("tuple[Answer, list[bytes]]", answer)
            self._watch()
            took_s = time.monotonic() - began_s
            waited_s += min(took_s, self._try_s)
            # A process that was suspended did not wait meanwhile: its broker is asked once more.
            was_suspended = took_s > SUSPENDED * self._try_s
            if waited_s >= self._answer_s and not was_suspended:
                raise PeerLost(
                    f"the broker at {self._endpoint} did not answer {name} within {self._answer_s:g} s"
                )
            wait.tell(waited_s)

    def _try(
        self, request: ToBroker, wanted: type[Answer]
    ) -> tuple[FromBroker, list[bytes]] | None:
        try:
            self._client.send(request, [self._tag], timeout_s=self._try_s)
            return self._answer(wanted)
        except (PeerLost, Malformed) as error:
            log.debug("%s", error)
            return None

    def _answer(self, wanted: type[Answer]) -> tuple[FromBroker, list[bytes]] | None:
        """The wanted answer, or None when the request must be sent again."""
        deadline_s = time.monotonic() + self._try_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            received = self._client.receive(left_s)
            if received is None:
                return None
            message = received[0]
            if isinstance(message, Reject):
                raise Refusal(message.reason)
            if isinstance(message, Unknown):
                self._client.send(self._hello, [self._tag], timeout_s=self._try_s)
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
