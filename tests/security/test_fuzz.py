"""Mutated messages through decoders and handlers, and hostile connections: nothing crashes, nobody honest is harmed.

PREFIXRL_HOSTILE: thousands of messages of the long form, a quarter of them in each test; 1000 (the default) come with
20,000 connections, 10000 with 100,000.
"""

import logging
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import msgspec
import pytest

from benchmarks.hostile_peers import measure, quantile
from prefixrl.common.config.run import RunConfig
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
from prefixrl.common.wire.messages.weights import FromWeights, ToWeights, WeightsNote
from prefixrl.common.wire.messages.worker import Done, Goodbye, Heartbeat, Hello, Reject, Unknown
from prefixrl.common.wire.packing import pack_logprobs, pack_tokens
from prefixrl.common.wire.transport import Malformed, Payload, _decode
from prefixrl.learner.weights.server import Snapshots, answer
from security.mutations import Mutator
from security.socketless_broker import SocketlessBroker
from support.fakes import publish, ready, run_on_disk

THOUSANDS = int(os.environ.get("PREFIXRL_HOSTILE", "1000"))
SIZES = [
    pytest.param(1_000, id="short"),
    pytest.param(THOUSANDS * 250, id="long", marks=[pytest.mark.chaos, pytest.mark.timeout(3600)]),
]
CONNECTIONS = [
    pytest.param(300, id="short"),
    pytest.param(
        min(THOUSANDS * 20, 100_000),
        id="long",
        marks=[pytest.mark.chaos, pytest.mark.timeout(3600)],
    ),
]
HONEST: dict[str, tuple[Role, ...]] = {"all": (), "workers": ("rank", "operator")}
"""Peers that are hostile, and those that are not then: a rank that says anything soon halts the run."""
Figure = Callable[[str], None]


@pytest.fixture
def figure(record_property: Callable[[str, str], None]) -> Figure:
    return lambda text: record_property("figure", text)


@pytest.mark.parametrize("messages", SIZES)
@pytest.mark.parametrize(
    "union", [ToBroker, FromBroker | FromWeights], ids=["to servers", "to clients"]
)
def test_mutated_bytes_are_a_message_or_malformed(
    union: object, messages: int, figure: Figure
) -> None:
    decoder, mutator, valid = msgspec.msgpack.Decoder(union), Mutator(0, union), 0
    for _ in range(messages):
        try:
            _decode(decoder, mutator.changed(mutator.any_message()), b"peer")
            valid += 1
        except Malformed:
            pass
    assert 0 < valid < messages
    figure(f"decoder: {messages} mutated messages, {valid} of them valid still")


ROLES: tuple[Role, ...] = ("rollout", "rollout", "scorer", "scorer", "rank", "operator")
MOST_REPEATS = 4
VALID_SHARE = 0.5
"""Messages that are left as they should be, so that there is work to get wrong."""


class Faults(logging.Handler):
    """Records with a trace: the broker met something that nobody foresaw."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.texts.append(self.format(record))


class FuzzedBroker(SocketlessBroker):
    """A broker whose peers say what a `Mutator` makes of what they should say."""

    def __init__(self, config: RunConfig, honest: tuple[Role, ...]) -> None:
        super().__init__(config)
        self._draw, self._honest = random.Random(0), honest
        self._mutator = Mutator(0, ToBroker)
        self._decoder = msgspec.msgpack.Decoder(ToBroker)
        self._peers: dict[bytes, Role] = {
            f"{role}{n}".encode(): role for n, role in enumerate(ROLES)
        }
        self._said_hello: set[bytes] = set()
        self.log = Faults()

    def send(self, peer: bytes, message: FromBroker, payload: Sequence[Payload] = ()) -> None:
        super().send(peer, message, payload)
        if isinstance(message, Reject | Unknown | Done):
            self._said_hello.discard(peer)
            self.results[peer].clear()

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
        self.counts[type(message).__name__] += 1
        if isinstance(message, Hello | Goodbye):
            (self._said_hello.add if isinstance(message, Hello) else self._said_hello.discard)(peer)
            self.results[peer].clear()
        self.handle(peer, role, message)
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
            return ready(self.config, role, slots=4, version=latest.version if latest else 0)
        results = self.results[peer]
        if results and self._draw.random() < 0.7:
            return results.pop(self._draw.randrange(len(results)))
        leases = tuple(worker.leases)
        return Heartbeat(
            progress=self._draw.randrange(100), busy_row_s=1.0, leases=leases, state="sampling"
        )


@pytest.mark.parametrize("messages", SIZES)
@pytest.mark.parametrize("hostile", HONEST)
def test_mutated_messages_meet_no_fault_in_the_broker(
    messages: int, hostile: str, tmp_path: Path, figure: Figure
) -> None:
    config = run_on_disk(
        tmp_path, algorithm={"iterations": 10**6}, broker={"max_failure_share": 1.0}
    )
    fuzzed = FuzzedBroker(config, HONEST[hostile])
    try:
        fuzzed.run(messages)
        # Among so few hostile messages it is chance how soon a batch is whole.
        for _ in range(MOST_REPEATS):
            if not fuzzed.counts["answered Batch"]:
                fuzzed.run(messages)
    finally:
        fuzzed.broker.journal.close()
    assert fuzzed.log.texts == []
    # It went on beside all that: batches were handed over.
    assert fuzzed.counts["malformed"] and fuzzed.counts["answered Batch"], fuzzed.counts
    figure(f"broker, {hostile} hostile: {messages} messages, of them {dict(fuzzed.counts)}")


@pytest.mark.parametrize("messages", SIZES)
def test_mutated_requests_meet_no_fault_in_the_weight_server(
    messages: int, tmp_path: Path, figure: Figure
) -> None:
    publish(tmp_path, 1)
    snapshots, mutator, decoder = (
        Snapshots(tmp_path),
        Mutator(2, ToWeights),
        msgspec.msgpack.Decoder(ToWeights),
    )
    for _ in range(messages):
        try:
            request = _decode(decoder, mutator.changed(mutator.any_message()), b"peer")
        except Malformed:
            continue
        reply, payload = answer(snapshots, request)  # type: ignore[arg-type]
        msgspec.msgpack.encode(reply)
        assert sum(map(len, payload)) <= 2**20
    figure(f"weight server: {messages} mutated requests")


@pytest.mark.slow
@pytest.mark.parametrize("connections", CONNECTIONS)
def test_hostile_connections_harm_no_honest_worker(connections: int, figure: Figure) -> None:
    measured = measure(connections, quiet_s=0.5 if connections < 1000 else 20.0, with_other=False)
    assert measured.is_alive and measured.tracebacks == 0
    assert measured.broker_mib < 300
    assert measured.attacked, "every round trip was answered, or `measure` had failed"
    slowest = [
        f"{quantile(times_ms, 0.99):.1f} ms"
        for (times_ms,) in (measured.attacked, measured.without)
    ]
    figure(
        f"hostile connections: {connections}, p99 {' against '.join(slowest)} alone, {measured.broker_mib:.0f} MiB"
    )
