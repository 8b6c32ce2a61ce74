"""Requests to the broker that wait for their answer, for learner ranks and operators."""

import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable
from typing import TypeVar, cast

from prefixrl.common.errors import PeerLost, PrefixRLError, Refusal
from prefixrl.common.wire.address import Address
from prefixrl.common.wire.messages.fields import Role, cut_text
from prefixrl.common.wire.messages.learner import FromBroker, ToBroker
from prefixrl.common.wire.messages.protocol import PROTOCOL
from prefixrl.common.wire.messages.worker import Goodbye, Hello, Reject, Unknown, Welcome
from prefixrl.common.wire.transport import Client, Malformed, is_tag

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

LOG_EVERY_S = 30.0

ANSWER_S = 60.0
ASK_AGAIN_S = 5.0
SUSPENDED = 4
"""A try that took this many times its limit was interrupted: sending, waiting and Hello take three at most."""
LINGER_S = 1.0


class WaitLog:
    """Logs what a long wait is waiting for. Enforces no deadline."""

    def __init__(self, awaited: str) -> None:
        self._awaited = awaited
        self._logged_s = 0.0

    def log_progress(self, waited_s: float) -> None:
        """Log that the wait goes on, at most every 30 s; call it on every poll."""
        if waited_s - self._logged_s >= LOG_EVERY_S:
            self._logged_s = waited_s
            log.info("waiting for %s, %.0f s so far", self._awaited, waited_s)


def hello(role: Role, incarnation: str, number: int | None = None) -> Hello:
    """Return the first message of this process."""
    return Hello(
        protocol=PROTOCOL,
        role=role,
        incarnation=incarnation,
        host=socket.gethostname(),
        pid=os.getpid(),
        number=number,
    )


class Requester:
    """One connection, used by one thread; the broker answers a repeated request as the same one."""

    def __init__(
        self,
        address: Address,
        role: Role,
        answer_s: float = ANSWER_S,
        raise_if_hopeless: Callable[[], None] = lambda: None,
    ) -> None:
        """Connect and enrol. `raise_if_hopeless` is called after every try without an answer."""
        self._endpoint = address.endpoint
        self._answer_s = answer_s
        self._try_s = min(ASK_AGAIN_S, answer_s)
        self._raise_if_hopeless = raise_if_hopeless
        self._number = 0
        identity = secrets.token_hex(8)
        self._hello = hello(role, identity)
        self._client: Client[FromBroker, ToBroker] = Client(
            address.endpoint, FromBroker, identity.encode(), address.key
        )
        try:
            self.welcome = self.ask_broker(self._hello, Welcome)[0]
        except PrefixRLError:
            self.close()
            raise

    def ask_broker(
        self, request: ToBroker, answer_type: type[Answer]
    ) -> tuple[Answer, list[bytes]]:
        """Return the wanted answer and its payload frames; raises Refusal, or PeerLost if late."""
        name = type(request).__name__
        waited_s = 0.0
        wait = WaitLog(f"the broker at {self._endpoint} to answer {name}")
        self._number += 1
        while True:
            began_s = time.monotonic()
            answer = self._try(request, answer_type)
            if answer is not None:
                return cast("tuple[Answer, list[bytes]]", answer)
            self._raise_if_hopeless()
            took_s = time.monotonic() - began_s
            waited_s += min(took_s, self._try_s)
            # A process that was suspended did not wait meanwhile: its broker is asked once more.
            was_suspended = took_s > SUSPENDED * self._try_s
            if waited_s >= self._answer_s and not was_suspended:
                raise PeerLost(
                    f"the broker at {self._endpoint} did not answer {name} within {self._answer_s:g} s: "
                    f"{self._client.why_not()}"
                )
            wait.log_progress(waited_s)

    def _try(
        self, request: ToBroker, answer_type: type[Answer]
    ) -> tuple[FromBroker, list[bytes]] | None:
        """Return the wanted answer, or None when the request must be sent again."""
        try:
            self._client.send(request, self._tag, timeout_s=self._try_s)
            deadline_s = time.monotonic() + self._try_s
            while (left_s := deadline_s - time.monotonic()) > 0:
                received = self._client.receive(left_s)
                if received is None:
                    break
                message, frames = received
                if isinstance(message, Reject):
                    raise Refusal(message.reason)
                # The broker is new, or gave this peer up: Hello first, then the request again.
                if isinstance(message, Unknown):
                    self._client.send(self._hello, self._tag, timeout_s=self._try_s)
                    break
                if frames and is_tag(frames[0]) and frames.pop(0) != self._tag:
                    continue  # the second answer to an earlier request that was sent twice
                if isinstance(message, answer_type):
                    return message, frames
        except (PeerLost, Malformed) as error:
            log.debug("%s", error)
        return None

    @property
    def _tag(self) -> bytes:
        """The number of the request under way, which the broker echoes in a frame of its own."""
        return b"#" + self._number.to_bytes(8, "little")

    def leave(self, reason: str) -> None:
        """Send Goodbye, so that the broker need not stay for this peer."""
        # A broker that is gone needs none.
        with contextlib.suppress(PeerLost):
            self._client.send(Goodbye(cut_text(reason)), timeout_s=0.0)

    def close(self) -> None:
        """Close the connection."""
        self._client.close(linger_s=LINGER_S)
