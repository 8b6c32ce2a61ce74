"""A broker without sockets: a test hands it messages, and reads what it sends."""

import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import msgspec

from prefixrl.common.config.run import RunConfig
from prefixrl.common.wire.keys import KeyRole, Listed
from prefixrl.common.wire.messages.fields import Role
from prefixrl.common.wire.messages.learner import FromBroker, ToBroker
from prefixrl.common.wire.messages.worker import PrefixTask, ScoreTask
from prefixrl.common.wire.transport import Payload, Received, Server
from prefixrl.learner.broker.__main__ import build
from prefixrl.learner.broker.workers.identity import Start
from support.fakes import NOTE, sampled, scored


class SocketlessBroker:
    """The broker, the results of the tasks that it gave to each peer, and a count of its answers."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self._encoder = msgspec.msgpack.Encoder()
        self.results = defaultdict[bytes, list[ToBroker]](list)
        self.counts: Counter[str] = Counter()
        server = cast("Server[ToBroker, FromBroker]", self)
        self.broker = build(
            config, Path(config.directory), Start(0, "tcp://127.0.0.1:9"), lambda: server
        )
        self.broker.versions.publish(NOTE)

    def send(self, peer: bytes, message: FromBroker, payload: Sequence[Payload] = ()) -> None:
        """The broker's answer: a server's `send`."""
        self._encoder.encode(message)
        match message:
            case PrefixTask():
                self.results[peer].append(sampled(message))
            case ScoreTask():
                self.results[peer].append(scored(message))

    def handle(self, peer: bytes, role: Role, message: ToBroker) -> None:
        """Give the broker a message of a peer with the key of its role."""
        key: KeyRole = "worker" if role in ("rollout", "scorer") else cast(KeyRole, role)
        self.broker._handle_safely(Received(peer, message, b"", Listed(key, key)))

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
