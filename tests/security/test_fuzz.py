"""Mutated messages through decoders and handlers, and hostile connections: nothing crashes, nobody honest is harmed.

PREFIXRL_HOSTILE: thousands of messages of the long form, a quarter of them in each test; 1000 (the default) come with
20,000 connections, 10000 with 100,000.
"""

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from benchmarks.hostile_peers import measure, quantile
from prefixrl.common.wire.messages.fields import Role
from prefixrl.common.wire.messages.learner import FromBroker, ToBroker
from prefixrl.common.wire.messages.weights import FromWeights, ToWeights
from prefixrl.common.wire.transport import Malformed, _decode
from prefixrl.learner.weights.server import Snapshots, answer
from support.broker.fuzzed_broker import FuzzedBroker
from support.broker.mutations import Mutator
from support.fakes import publish, run_on_disk

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
    decoder, mutator, taken = msgspec.msgpack.Decoder(union), Mutator(0, union), 0
    for _ in range(messages):
        try:
            _decode(decoder, mutator.changed(mutator.any_message()), b"peer")
            taken += 1
        except Malformed:
            pass
    assert 0 < taken < messages
    figure(f"decoder: {messages} mutated messages, {taken} of them valid still")


@pytest.mark.parametrize("messages", SIZES)
@pytest.mark.parametrize("hostile", HONEST)
def test_mutated_messages_meet_no_fault_in_the_broker(
    messages: int, hostile: str, tmp_path: Path, figure: Figure
) -> None:
    config = run_on_disk(
        tmp_path, algorithm={"iterations": 10**6}, broker={"max_failure_share": 1.0}
    )
    fuzzed = FuzzedBroker(config, 0, HONEST[hostile])
    try:
        fuzzed.run(messages)
    finally:
        fuzzed.broker.journal.close()
    assert fuzzed.log.found == []
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


@pytest.mark.parametrize("connections", CONNECTIONS)
def test_hostile_connections_harm_no_honest_worker(connections: int, figure: Figure) -> None:
    measured = measure(connections, quiet_s=0.5 if connections < 1000 else 20.0, with_other=False)
    assert measured.is_alive and measured.tracebacks == 0
    assert measured.broker_mib < 300
    assert measured.attacked, "every round trip was answered, or `measure` had failed"
    slowest = [
        f"{quantile(each, 0.99):.1f} ms" for (each,) in (measured.attacked, measured.without)
    ]
    figure(
        f"hostile connections: {connections}, p99 {' against '.join(slowest)} alone, {measured.broker_mib:.0f} MiB"
    )
