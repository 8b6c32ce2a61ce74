"""A worker's connection to the broker, kept alive by a thread of its own.

The thread owns the socket: it sends Hello, a Heartbeat on a clock with the figures of the work loop, results until they
are acknowledged, and Hello again when the broker answers Unknown. The work loop only puts messages in and takes them
out: so a long forward does not look like death, nor a hung loop like life, since `progress` comes from the loop.
"""

import contextlib
import logging
import math
import queue
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec

from prefixrl.common.errors import ConfigError, PeerLost, PrefixRLError, Refusal, RunIsOver
from prefixrl.common.host.memory_use import memory_now
from prefixrl.common.wire.address import Find
from prefixrl.common.wire.messages import worker as messages
from prefixrl.common.wire.messages.fields import Role, cut_text
from prefixrl.common.wire.messages.learner import FromBroker, ToBroker
from prefixrl.common.wire.messages.protocol import PROTOCOL
from prefixrl.common.wire.requester import hello
from prefixrl.common.wire.transport import Client, Malformed
from prefixrl.common.worker.permits import Permits

log = logging.getLogger(__name__)

Result = messages.Prefixes | messages.Scores
RESEND_S = 5.0
FIRST_CONTACT_S = 60.0
ORPHAN_S = 600.0
"""Longest silence of the broker; then the worker ends, so as not to waste an allocation."""
RENEW_S = 30.0
"""Longest time without an answer to a heartbeat; then the connection is made again."""
LOOK_S = 3.0
"""Longest silence of the broker before its address is read again: a learner may go on at another one."""
MEMORY_EVERY_S = 10.0
"""Time between two looks at this process's memory."""
TICK_S = 0.2
TURN_S = 2.0
"""Longest turn of the network thread while its process runs."""


def number_of(name: str) -> int | None:
    """Return the number in a worker's name, None where there is none."""
    number = name.rpartition("-")[2]
    return int(number) if number.isdecimal() else None


@dataclass
class Vitals:
    """Figures that the work loop writes and the network thread sends."""

    progress: int = 0
    busy_row_s: float = 0.0
    waiting_rows: int = 0
    tokens: int = 0
    activity: messages.Activity = "loading"
    state: str = "loading"
    leases: tuple[str, ...] = ()
    usage: messages.Usage | None = None


class Link:
    """One worker's connection; the work loop writes its `vitals`."""

    def __init__(
        self, find: Find, role: Role, heartbeat_s: float = 1.0, number: int | None = None
    ) -> None:
        self._find = find
        self.address = find()
        """The broker's address, as far as this process knows."""
        self.name: str = role
        self.vitals = Vitals()
        self.permits: Permits | None = None
        """Requests that the worker may make; None where its engine uses no endpoint."""
        self.is_drained = False
        """True once the operator wants this worker to leave."""
        self.inbox = queue.SimpleQueue[FromBroker]()
        self._incarnation = secrets.token_hex(8)
        self._hello = hello(role, self._incarnation, number)
        self._client = self._connected()
        self._outgoing = queue.SimpleQueue[ToBroker]()
        self._unacknowledged: dict[str, tuple[Result, float]] = {}
        self._welcome: queue.SimpleQueue[messages.Welcome | messages.Reject | messages.Done] = (
            queue.SimpleQueue()
        )
        self.heartbeat_s = heartbeat_s
        """The run's interval, once it is known."""
        self._known = False
        self._run_id = ""
        """The run that it is in; "" before the first Welcome."""
        self._heard_s = self._turned_s = self._renewed_s = time.monotonic()
        self._memory: messages.MemoryUse | None = None
        self._measured_s = -math.inf
        """Time at which the memory was looked at."""
        self._handed_over: set[str] = set()
        """Received tasks that the vitals of the work loop do not list yet."""
        self._closing = threading.Event()
        self._failure: BaseException | None = None
        self._why_silent = ""
        """Cause of the broker's silence that was logged last."""
        # Last: the thread uses all of the above.
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """The endpoint of that address."""
        return self.address.endpoint

    def _connected(self) -> Client[FromBroker, ToBroker]:
        return Client(self.endpoint, FromBroker, self._incarnation.encode(), self.address.key)

    # --- for the work loop -------------------------------------------------------------------------------------------

    def welcome(
        self, timeout_s: float = FIRST_CONTACT_S, stopping: Callable[[], bool] = lambda: False
    ) -> messages.Welcome:
        """Wait for the broker's Welcome; raises PeerLost, Refusal or RunIsOver."""
        answer = None
        deadline_s = time.monotonic() + timeout_s
        while answer is None:
            if self._failure is not None:
                raise self._failure
            if stopping():
                raise RunIsOver("asked to stop before a broker had answered")
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise PeerLost(
                    f"no broker answered at {self.endpoint} within {timeout_s:g} s; {self._why_silent}"
                )
            # In short waits, so that a stop signal or a failure of the thread ends them.
            with contextlib.suppress(queue.Empty):
                answer = self._welcome.get(timeout=min(left_s, TICK_S))
        if isinstance(answer, messages.Reject):
            raise Refusal(answer.reason)
        if isinstance(answer, messages.Done):
            raise RunIsOver(f"there is nothing to do: {answer.reason}")
        if answer.protocol != PROTOCOL:
            raise Refusal(
                f"the broker speaks protocol {answer.protocol}, this process {PROTOCOL}; use one release"
            )
        return answer

    def send(self, message: ToBroker) -> None:
        """Send a message; results are sent again until the broker acknowledges them."""
        self._outgoing.put(message)
        self._client.wake()

    def receive(self, timeout_s: float) -> FromBroker | None:
        """Return the next message, or None; raises Refusal, PeerLost or another end of the link."""
        if self._failure is not None:
            raise self._failure
        try:
            message = self.inbox.get(timeout_s > 0, timeout_s)
        except queue.Empty:
            return None
        if isinstance(message, messages.Reject):
            raise Refusal(f"the broker refused this worker: {message.reason}")
        return message

    def close(self, reason: str, patience_s: float = 2.0) -> None:
        """Send Goodbye once every result is acknowledged or the patience is over."""
        deadline_s = time.monotonic() + patience_s
        while (
            self._unacknowledged or not self._outgoing.empty()
        ) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        self._outgoing.put(messages.Goodbye(cut_text(reason)))
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
                    next_beat_s = now_s + self.heartbeat_s
                self._send_waiting(now_s)
                self._receive(max(0.0, min(next_beat_s - time.monotonic(), 0.2)))
        except BaseException as error:
            # Unnoticed, it would leave a worker that works on and reaches no broker.
            if not isinstance(error, PrefixRLError):
                log.exception("the connection to %s failed", self.endpoint)
            self._failure = error
        finally:
            self._client.close(linger_s=1.0 if self._closing.is_set() else 0.0)

    def _turn(self) -> float:
        """Return the time; the time of a suspended process does not count as silence."""
        now_s = time.monotonic()
        self._heard_s += max(0.0, now_s - self._turned_s - TURN_S)
        self._turned_s = now_s
        return now_s

    def _beat(self, now_s: float) -> None:
        if now_s - self._heard_s > ORPHAN_S:
            raise PeerLost(
                f"the broker at {self.endpoint} has been silent for {now_s - self._heard_s:.0f} s"
            )
        self._reconnect(now_s)
        vitals = replace(self.vitals)
        self._handed_over.difference_update(vitals.leases)
        # A task that waits for the end of a long engine step is listed, too, or another worker would get it.
        vitals.leases = (*vitals.leases, *self._handed_over)
        vitals.state = cut_text(vitals.state)
        if now_s - self._measured_s >= MEMORY_EVERY_S:
            self._memory = memory_now()
            self._measured_s = now_s
        if not self._known:
            self._try_send(self._hello)
            return
        demand = self.permits.demand(now_s) if self.permits else None
        self._try_send(messages.Heartbeat(**vars(vitals), memory=self._memory, demand=demand))

    def _reconnect(self, now_s: float) -> None:
        """Connect again while the broker is silent: where it moved to, or where it was."""
        address = self.address
        if now_s - self._heard_s > LOOK_S:
            with contextlib.suppress(OSError, ConfigError):  # a file that is half there
                address = self._find()
        if address != self.address:
            log.info("the broker has moved from %s to %s", self.endpoint, address.endpoint)
            old = self._client
            self.address = address
            self._client = self._connected()
            self._renewed_s = now_s
            old.close()
        elif now_s - max(self._heard_s, self._renewed_s) > RENEW_S:
            self._renewed_s = now_s
            self._client.renew()

    def _send_waiting(self, now_s: float) -> None:
        while self._known:
            try:
                message = self._outgoing.get_nowait()
            except queue.Empty:
                break
            if isinstance(message, Result | messages.Refused):
                self._handed_over.discard(message.task)
            if isinstance(message, Result):
                self._unacknowledged[message.task] = (message, now_s)
                if self.vitals.usage is not None:
                    self._beat(now_s)  # a result must not arrive before its cost
            if not self._try_send(message) and not isinstance(message, Result):
                self._outgoing.put(message)
                break
            if isinstance(message, messages.Ready):
                self._resend(now_s, 0.0)  # a restarted broker may have missed any of them
        if not self._known and self._closing.is_set():
            while not self._outgoing.empty():
                self._outgoing.get_nowait()
        if self._known:
            self._resend(now_s, RESEND_S)

    def _try_send(self, message: ToBroker) -> bool:
        try:
            self._client.send(message, timeout_s=0.2)
        except PeerLost as error:
            why = str(error)
            if time.monotonic() - self._heard_s > LOOK_S and self._why_silent != why:
                self._why_silent = why
                log.warning("%s", why)
            return False
        return True

    def _receive(self, timeout_s: float) -> None:
        try:
            while (received := self._client.receive(timeout_s)) is not None:
                self._heard_s = time.monotonic()
                self._why_silent = ""
                self._take_message(received[0])
                timeout_s = 0.0
        except Malformed as error:
            log.warning("ignored a malformed message: %s", error)

    def _take_message(self, message: FromBroker) -> None:
        match message:
            case messages.Welcome():
                self._take_welcome(message)
            case messages.Unknown():
                # Else it answers a message that was sent before the current Hello.
                if self._known:
                    log.info("the broker does not know this worker (any more): sending Hello again")
                    self._known = False
                    self._try_send(self._hello)
            case messages.Beat():
                self._take_beat(message)
            case messages.Done() if not self._run_id:
                self._welcome.put(message)
            case messages.Leave():
                if not self.is_drained:
                    log.info("the operator wants this worker to leave")
                self.is_drained = True
            case messages.Ack(task):
                self._unacknowledged.pop(task, None)
            case messages.Reject() if not self._known:
                self._welcome.put(message)
                self.inbox.put(message)
            case messages.PrefixTask(task) | messages.ScoreTask(task):
                # One that is open already is being done.
                if task not in self._handed_over.union(self.vitals.leases, self._unacknowledged):
                    self._handed_over.add(task)
                    self.inbox.put(message)
            case _:
                self.inbox.put(message)

    def _take_welcome(self, welcome: messages.Welcome) -> None:
        if self._run_id not in ("", welcome.run_id):
            raise PeerLost(
                f"at {self.endpoint} is another run now, {welcome.run_id}; this worker is of {self._run_id}"
            )
        is_first = not self._run_id
        self._run_id = welcome.run_id
        # The next broker of the run is to know it under the same name.
        self._hello = msgspec.structs.replace(self._hello, number=number_of(welcome.worker))
        self._known = True
        # The work loop answers a later Welcome with Ready.
        (self._welcome if is_first else self.inbox).put(welcome)

    def _take_beat(self, beat: messages.Beat) -> None:
        if self.permits is not None and beat.grant is not None:
            self.permits.add(beat.grant, self._heard_s)
        if beat.latest is not None:
            self.inbox.put(beat)

    def _resend(self, now_s: float, after_s: float) -> None:
        for key, (result, sent_s) in list(self._unacknowledged.items()):
            if now_s - sent_s >= after_s:
                self._unacknowledged[key] = (result, now_s)
                self._try_send(result)
