"""A broker without sockets whose peers say what a `Mutator` makes of what they should say."""

import logging
import random
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import msgspec

from prefixrl.common.config.run import RunConfig
from prefixrl.common.wire.keys import KeyRole, Listed
from prefixrl.common.wire.messages.fields import Role
from prefixrl.common.wire.messages.learner import (
    FromBroker,
    GetBatch,
    GetGroups,
    GetStatus,
    HaltRun,
    IterationDone,
    Published,
    ToBroker,
)
from prefixrl.common.wire.messages.protocol import PROTOCOL
from prefixrl.common.wire.messages.weights import WeightsNote
from prefixrl.common.wire.messages.worker import (
    Done,
    Goodbye,
    Heartbeat,
    Hello,
    PrefixTask,
    Reject,
    ScoreTask,
    Unknown,
)
from prefixrl.common.wire.packing import pack_logprobs, pack_tokens
from prefixrl.common.wire.transport import Malformed, Payload, Received, Server, _decode
from prefixrl.learner.broker.__main__ import build
from prefixrl.learner.broker.workers.identity import Start
from support.broker.mutations import Mutator
from support.fakes import NOTE, ready, sampled, scored

ROLES: tuple[Role, ...] = ("rollout", "rollout", "scorer", "scorer", "rank", "operator")
VALID_SHARE = 0.5
"""Messages that are left as they should be, so that there is work to get wrong."""


class _Faults(logging.Handler):
    """Records with a trace: the broker met something that nobody foresaw."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.found.append(self.format(record))


class FuzzedBroker:
    """The broker, its peers, and what happened."""

    def __init__(self, config: RunConfig, seed: int, honest: tuple[Role, ...] = ()) -> None:
        self._config, self._draw, self._honest = config, random.Random(seed), honest
        self._mutator = Mutator(seed, ToBroker)
        self._decoder = msgspec.msgpack.Decoder(ToBroker)
        self._out = msgspec.msgpack.Encoder()
        self._peers: dict[bytes, Role] = {
            f"{role}{n}".encode(): role for n, role in enumerate(ROLES)
        }
        self._said_hello: set[bytes] = set()
        self.tasks = defaultdict[bytes, list[ToBroker]](list)
        self.counts: Counter[str] = Counter()
        self.log = _Faults()
        server = cast("Server[ToBroker, FromBroker]", self)
        self.broker = build(
            config, Path(config.directory), Start(0, "tcp://127.0.0.1:9"), lambda: server
        )
        self.broker.versions.publish(NOTE)

    def send(self, peer: bytes, message: FromBroker, payload: Sequence[Payload] = ()) -> None:
        """The broker's answer: a server's `send`."""
        self._out.encode(message)
        match message:
            case Reject() | Unknown() | Done():
                self._said_hello.discard(peer)
                self.tasks[peer].clear()
            case PrefixTask():
                self.tasks[peer].append(sampled(message))
            case ScoreTask():
                self.tasks[peer].append(scored(message))

    def run(self, messages: int) -> None:
        """Handle so many, with the turns of the broker's loop in between."""
        logger = logging.getLogger("prefixrl")
        logger.addHandler(self.log)
        logger.propagate = False
        try:
            for number in range(messages):
                self._handle_one()
                if number % 16 == 0:
                    self.turn()
                if number % 1000 == 0:
                    self.broker.ledger.check()
        finally:
            logger.removeHandler(self.log)
            logger.propagate = True
        self.broker.ledger.check()

    def _handle_one(self) -> None:
        peer = self._draw.choice(list(self._peers))
        role = self._peers[peer]
        valid = self._valid(peer, role)
        raw = msgspec.msgpack.encode(valid) if valid is not None else self._mutator.any_message()
        if role not in self._honest and (valid is None or self._draw.random() > VALID_SHARE):
            raw = self._mutator.changed(raw)
        try:
            message = cast(ToBroker, _decode(self._decoder, raw, peer))
        except Malformed:
            self.counts["malformed"] += 1
            return
        key: KeyRole = "worker" if role in ("rollout", "scorer") else cast(KeyRole, role)
        self.counts[type(message).__name__] += 1
        if isinstance(message, Hello | Goodbye):
            (self._said_hello.add if isinstance(message, Hello) else self._said_hello.discard)(peer)
            self.tasks[peer].clear()
        self.broker._handle_safely(Received(peer, message, b"", Listed(key, key)))
        self.broker._stopping = None  # a rank or operator may stop the run; this one goes on
        if isinstance(message, HaltRun):
            self.broker.batches.is_halting = False

    def _valid(self, peer: bytes, role: Role) -> ToBroker | None:
        """A message that the peer could well send now; None for any at all."""
        if role not in self._honest and self._draw.random() < 0.2:
            return None
        if peer not in self._said_hello:
            return Hello(protocol=PROTOCOL, role=role, incarnation="i", host="h", pid=1)
        iteration = self.broker.ledger.completed
        if role == "rank":
            note = WeightsNote(
                iteration, f"d{iteration}", pack_tokens([1, 2, 3]), pack_logprobs([-1.0, -2.0])
            )
            expected = tuple(range(self._draw.randrange(4)))
            requests = (
                GetBatch(iteration, 0, 1),
                GetGroups(iteration, expected),
                IterationDone(iteration, iteration),
                Published(note),
            )
            return self._draw.choice(requests)
        if role == "operator":
            return GetStatus()
        worker = self.broker.dispatcher.registry.by_identity.get(peer)
        if worker is not None and role == "rollout" and self._draw.random() < 0.05:
            return Goodbye("another one has the newest version")
        if worker is None or not worker.has_said_ready:
            latest = self.broker.versions.latest
            return ready(self._config, role, slots=4, version=latest.version if latest else 0)
        tasks = self.tasks[peer]
        if tasks and self._draw.random() < 0.7:
            return tasks.pop(self._draw.randrange(len(tasks)))
        held = tuple(worker.leases)
        return Heartbeat(
            progress=self._draw.randrange(100), busy_row_s=1.0, leases=held, state="sampling"
        )

    def turn(self) -> None:
        """The rest of a turn of the broker's loop."""
        broker, now_s = self.broker, time.monotonic()
        broker._give_up_lost(now_s)
        answers = broker.batches.answers(now_s)
        broker.outbox.add_batches(answers)
        broker.dispatcher.dispatch(now_s)
        broker._write_records(now_s)
        for message, _ in answers.values():
            self.counts[f"answered {type(message).__name__}"] += 1
        for outgoing in broker.outbox.after_sync():
            broker._send(*outgoing)
