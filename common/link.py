"""A worker's connection to the broker, kept alive by a thread of its own.

The thread owns the socket: it says Hello, sends a Heartbeat on a clock with the figures the work loop left, resends results
until they are acknowledged, and says Hello again whenever the broker does not know it (any more). The work loop only puts
messages in and takes messages out, so that a long forward never looks like death, and a hung loop never looks like life:
`progress` comes from the loop.
"""

import logging
import os
import queue
import secrets
import socket
import threading
import time
from dataclasses import dataclass

from prefixrl.common.errors import PeerLost, PrefixRLError, Refusal, RunIsOver
from prefixrl.common.messages import (
    PROTOCOL,
    Ack,
    Beat,
    Done,
    FromBroker,
    Goodbye,
    Heartbeat,
    Hello,
    Prefixes,
    PrefixTask,
    Ready,
    Refused,
    Reject,
    Role,
    Scores,
    ScoreTask,
    ToBroker,
    Unknown,
    Usage,
    Welcome,
)
from prefixrl.common.transport import Client, Malformed

log = logging.getLogger(__name__)

RESEND_S = 5.0
FIRST_CONTACT_S = 60.0
ORPHAN_S = 600.0
"""A worker whose broker says nothing for this long ends, so as not to burn an allocation."""
RENEW_S = 30.0
"""A broker that is there answers every heartbeat: after this long without an answer the connection is made anew."""
TURN_S = 2.0
"""Longest turn of the network thread while its process runs."""


@dataclass
class Vitals:
    """What the work loop says of itself; written by the loop, read by the network thread."""

    progress: int = 0
    busy_slot_s: float = 0.0
    state: str = "loading"
    leases: tuple[str, ...] = ()
    usage: Usage | None = None


class Link:
    """One worker's connection. `vitals` is the work loop's to write."""

    def __init__(self, endpoint: str, role: Role, heartbeat_s: float = 1.0) -> None:
        self.endpoint = endpoint
        self.name: str = role
        self.vitals = Vitals()
        self.inbox: queue.SimpleQueue[FromBroker] = queue.SimpleQueue()
        self._incarnation = secrets.token_hex(8)
        self._hello = Hello(PROTOCOL, role, self._incarnation, socket.gethostname(), os.getpid())
        self._client: Client[FromBroker, ToBroker] = Client(
            endpoint, FromBroker, self._incarnation.encode()
        )
        self._outgoing: queue.SimpleQueue[ToBroker] = queue.SimpleQueue()
        self._unacknowledged: dict[tuple[str, int], tuple[Prefixes | Scores, float]] = {}
        self._welcome: queue.SimpleQueue[Welcome | Reject | Done] = queue.SimpleQueue()
        self._heartbeat_s = heartbeat_s
        self._known = False
        self._greeted = False
        self._heard_s = self._turned_s = self._renewed_s = time.monotonic()
        self._handed_over: set[str] = set()
        """Tasks in the inbox, or not yet in the vitals of the work loop."""
        self._closing = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)
        self._thread.start()

    # --- for the work loop -------------------------------------------------------------------------------------------

    def welcome(self, timeout_s: float = FIRST_CONTACT_S) -> Welcome:
        """Wait for the broker's Welcome; raises PeerLost, Refusal or RunIsOver."""
        try:
            answer = self._welcome.get(timeout=timeout_s)
        except queue.Empty:
            raise PeerLost(
                f"no broker answered at {self.endpoint} within {timeout_s:g} s; is the learner running there?"
            ) from None
        if isinstance(answer, Reject):
            raise Refusal(answer.reason)
        if isinstance(answer, Done):
            raise RunIsOver(f"there is nothing to do: {answer.reason}")
        if answer.protocol != PROTOCOL:
            raise Refusal(
                f"the broker speaks protocol {answer.protocol}, this process {PROTOCOL}; use one release"
            )
        return answer

    def use_heartbeat(self, heartbeat_s: float) -> None:
        """Take over the run's own heartbeat interval."""
        self._heartbeat_s = heartbeat_s

    def send(self, message: ToBroker) -> None:
        """Hand a message over; results are kept and sent again until the broker holds them."""
        self._outgoing.put(message)
        self._client.wake()

    def receive(self, timeout_s: float) -> FromBroker | None:
        """Next message for the work loop, or None; raises Refusal, PeerLost or whatever else ended the connection."""
        if self._failure is not None:
            raise self._failure
        try:
            message = (
                self.inbox.get(timeout=timeout_s) if timeout_s > 0 else self.inbox.get_nowait()
            )
        except queue.Empty:
            return None
        if isinstance(message, Reject):
            raise Refusal(f"the broker refused this worker: {message.reason}")
        return message

    @property
    def unacknowledged(self) -> int:
        """Results the broker has not confirmed."""
        return len(self._unacknowledged)

    def close(self, reason: str, patience_s: float = 2.0) -> None:
        """Say Goodbye once every result is acknowledged or the patience is over."""
        deadline_s = time.monotonic() + patience_s
        while (
            self._unacknowledged or not self._outgoing.empty()
        ) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        self._outgoing.put(Goodbye(reason))
        self._closing.set()
        self._client.wake()
        self._thread.join(timeout=patience_s)

    # --- the network thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            next_beat_s = 0.0
            while not (self._closing.is_set() and self._outgoing.empty()):
                now_s = self._turn()
                if now_s >= next_beat_s:
                    self._beat(now_s)
                    next_beat_s = now_s + self._heartbeat_s
                self._send_waiting(now_s)
                self._receive(max(0.0, min(next_beat_s - time.monotonic(), 0.2)))
        except BaseException as error:
            # Unseen, it would leave a worker that works on and is heard by nobody.
            if not isinstance(error, PrefixRLError):
                log.exception("the connection to %s failed", self.endpoint)
            self._failure = error
        finally:
            self._client.close(linger_s=1.0 if self._closing.is_set() else 0.0)

    def _turn(self) -> float:
        """The time; what passed while this process was suspended counts as nobody's silence."""
        now_s = time.monotonic()
        self._heard_s += max(0.0, now_s - self._turned_s - TURN_S)
        self._turned_s = now_s
        return now_s

    def _beat(self, now_s: float) -> None:
        if now_s - self._heard_s > ORPHAN_S:
            raise PeerLost(
                f"the broker at {self.endpoint} has been silent for {now_s - self._heard_s:.0f} s"
            )
        if now_s - max(self._heard_s, self._renewed_s) > RENEW_S:
            self._renewed_s = now_s
            self._client.renew()
        vitals, leases = self.vitals, self.vitals.leases
        self._handed_over.difference_update(leases)
        # A task that waits for a long engine step to end is held, too: taken back, it would be worked twice.
        held = (*leases, *self._handed_over)
        beat = Heartbeat(vitals.progress, vitals.busy_slot_s, held, vitals.state, vitals.usage)
        self._try_send(beat if self._known else self._hello)

    def _send_waiting(self, now_s: float) -> None:
        while self._known:
            try:
                message = self._outgoing.get_nowait()
            except queue.Empty:
                break
            if isinstance(message, (Prefixes, Scores, Refused)):
                self._handed_over.discard(message.task)
            if isinstance(message, (Prefixes, Scores)):
                self._unacknowledged[message.task, message.attempt] = (message, now_s)
                if self.vitals.usage is not None:
                    self._beat(now_s)  # a result must not be there before what it cost
            if not self._try_send(message) and not isinstance(message, (Prefixes, Scores)):
                self._outgoing.put(message)
                break
            if isinstance(message, Ready):
                self._resend_all(now_s)
        if not self._known and self._closing.is_set():
            while not self._outgoing.empty():
                self._outgoing.get_nowait()
        for key, (result, sent_s) in list(self._unacknowledged.items()):
            if self._known and now_s - sent_s > RESEND_S:
                self._unacknowledged[key] = (result, now_s)
                self._try_send(result)

    def _try_send(self, message: ToBroker) -> bool:
        try:
            self._client.send(message, timeout_s=0.2)
        except PeerLost:
            return False
        return True

    def _receive(self, timeout_s: float) -> None:
        try:
            received = self._client.receive(timeout_s)
        except Malformed as error:
            log.warning("ignored a malformed message: %s", error)
            return
        while received is not None:
            self._heard_s = time.monotonic()
            self._take(received[0])
            try:
                received = self._client.receive(0.0)
            except Malformed as error:
                log.warning("ignored a malformed message: %s", error)
                received = None

    def _take(self, message: FromBroker) -> None:
        match message:
            case Welcome():
                first, self._known = not self._greeted, True
                self._greeted = True
                # The work loop answers a later Welcome with what it has loaded now.
                if first:
                    self._welcome.put(message)
                else:
                    self.inbox.put(message)
            case Unknown() if self._known:
                log.info("the broker does not know this worker (any more): saying Hello again")
                self._known = False
                self._try_send(self._hello)
            case Unknown():
                pass  # an answer to what was sent before the Hello that is under way
            case Done() if not self._greeted:
                self._welcome.put(message)
            case Ack(task, attempt):
                self._unacknowledged.pop((task, attempt), None)
            case Reject() if not self._known:
                self._welcome.put(message)
                self.inbox.put(message)
            case Beat(latest) if latest is None:
                pass
            case _:
                if isinstance(message, (PrefixTask, ScoreTask)):
                    self._handed_over.add(message.task)
                self.inbox.put(message)

    def _resend_all(self, now_s: float) -> None:
        """Known again after the broker was restarted: deliver what it may have missed."""
        for key, (result, _) in list(self._unacknowledged.items()):
            self._unacknowledged[key] = (result, now_s)
            self._try_send(result)
