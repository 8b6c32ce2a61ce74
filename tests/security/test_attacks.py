"""Attacks on a run of real processes: each is refused with a named cause, and the honest workers go on."""

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import msgspec
import pytest
import zmq

from prefixrl.common.errors import PeerLost, Refusal
from prefixrl.common.run.digests import model_digests, scorer_digests
from prefixrl.common.wire import keys
from prefixrl.common.wire.flood import MOST_SILENT
from prefixrl.common.wire.messages.fields import Role
from prefixrl.common.wire.messages.learner import (
    FromBroker,
    GetBatch,
    GetGroups,
    GetStatus,
    Published,
    Status,
    Stop,
    ToBroker,
)
from prefixrl.common.wire.messages.protocol import PROTOCOL
from prefixrl.common.wire.messages.weights import FromWeights, GetManifest, Manifest, ToWeights
from prefixrl.common.wire.messages.worker import Goodbye, Hello, PrefixTask, Reject, Unknown
from prefixrl.common.wire.transport import MAX_FRAME_BYTES, Client
from security.real_run import MIB, RealRun, real_run
from support.fakes import NOTE, Peer, offer, peers, wait_until
from support.keys import key

replace = msgspec.structs.replace
STOP = Stop("a stranger says so")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRun]:
    with real_run(tmp_path_factory.mktemp("attacked")) as started:
        yield started


def false_key(role: keys.KeyRole = "operator") -> keys.ClientKey:
    """A key that nobody let in, of one who knows the run's public half."""
    public, secret = zmq.curve_keypair()
    return replace(key(role), pair=keys.Pair(public.decode(), secret.decode()))


def hello(role: Role) -> Hello:
    return Hello(protocol=PROTOCOL, role=role, incarnation="incarnation", host="host", pid=1)


def is_told(peer: Peer, reason: str) -> None:
    assert reason in peer.hear(Reject, timeout_s=10.0).reason


def join_as_worker(peer: Peer, run: RealRun, role: Role, slots: int = 1) -> None:
    peer.join(role)
    is_rollout = role == "rollout"
    model = run.config.model_of(role)  # type: ignore[arg-type]
    digests = model_digests(model) if is_rollout else scorer_digests(run.config, model)
    version, digest = (
        (run.iteration, run.publisher.digests[run.iteration]) if is_rollout else (-1, "")
    )
    peer.say(offer(slots, digests, "simulated", version, digest))


@pytest.mark.parametrize(
    "message", [STOP, hello("operator"), hello("scorer")], ids=["stop", "hello", "stolen config"]
)
def test_a_stranger_without_a_key_gets_no_word_in_and_no_answer(
    run: RealRun, message: ToBroker
) -> None:
    client: Client[FromBroker, ToBroker] = Client(run.endpoint, FromBroker, b"stranger", None)
    with pytest.raises(PeerLost, match="no connection to"):
        client.send(message, timeout_s=1.0)
    assert client.receive(0.2) is None
    client.close()
    run.goes_on()


@pytest.mark.parametrize("message", [STOP, hello("scorer")], ids=["stop", "stolen config"])
def test_a_stranger_with_a_key_of_his_own_is_refused_by_its_name(
    run: RealRun, message: ToBroker
) -> None:
    client: Client[FromBroker, ToBroker] = Client(
        run.endpoint, FromBroker, b"stranger", false_key()
    )

    def refusal() -> str:
        try:
            client.send(message, timeout_s=0.2)
        except Refusal as error:
            return str(error)
        except PeerLost:
            return ""
        raise AssertionError("it was sent")

    assert "does not let in the key 'operator'" in wait_until(refusal, "a refusal")
    assert client.receive(0.2) is None
    client.close()
    run.goes_on()


def test_a_workers_key_does_not_stop_the_run(run: RealRun) -> None:
    with peers(run.endpoint, "w") as (peer,):
        peer.say(STOP)
        peer.hear(Unknown)
        for role in ("operator", "rank"):
            peer.say(hello(role))
            is_told(
                peer,
                f"'worker' is a key for the role worker, a {role} needs one for the role {role}",
            )
        join_as_worker(peer, run, "scorer")
        peer.say(STOP)
        peer.hear(Unknown)
        peer.say(Goodbye("it found no way in"))
    run.goes_on()


def test_a_workers_key_does_not_stop_the_run_under_the_name_of_another_peer(run: RealRun) -> None:
    with peers(run.endpoint, "known") as (operator,):
        operator.join("operator")
        with peers(run.endpoint, "known") as (thief,):
            thief.say(STOP)
            is_told(thief, "this identity belongs to a process with the key")
    run.goes_on()


def test_an_operators_key_opens_nothing_of_a_rank(run: RealRun) -> None:
    with peers(run.endpoint, "o") as (peer,):
        for message in (
            GetBatch(run.iteration, 0, 1),
            GetGroups(run.iteration, (0,)),
            Published(NOTE),
        ):
            peer.join("operator")
            peer.say(message)
            is_told(peer, f"an operator may not send {type(message).__name__}")
    run.goes_on()


def test_a_key_that_was_removed_is_refused_by_both_servers_which_live_on(run: RealRun) -> None:
    keys.add_client(run.directory, "node-7")
    node_7 = keys.read_client_key(keys.client_key_file(run.directory, "node-7"))
    broker: Client[FromBroker, ToBroker] = Client(run.endpoint, FromBroker, b"node-7", node_7)
    weights_at = (run.directory / "weights_endpoint").read_text()
    weights: Client[FromWeights, ToWeights] = Client(weights_at, FromWeights, b"node-7", node_7)
    weights.send(GetManifest(run.iteration))
    received = weights.receive(20.0)
    assert received is not None and isinstance(received[0], Manifest)
    broker.send(hello("scorer"))
    assert broker.receive(20.0) is not None
    keys.remove_client(run.directory, "node-7")
    broker.send(hello("scorer"))
    answer = broker.receive(20.0)
    assert answer is not None and answer[0] == Reject("its key was removed from the run's list")
    weights.send(GetManifest(run.iteration))
    assert weights.receive(0.5) is None
    broker.close()
    weights.close()
    run.goes_on()


@pytest.mark.slow
def test_long_host_names_are_not_even_decoded(run: RealRun) -> None:
    with peers(run.endpoint, *(f"long-{number}" for number in range(5))) as many:
        for _ in range(3):
            for peer in many:
                with suppress(PeerLost):  # cut off by now, with what it sent before
                    peer.say(replace(hello("scorer"), host="h" * (60 * MIB)))
        run.logs("bytes, at most 262144")
    run.goes_on()


def test_frames_without_end_of_a_worker_end_its_connection(run: RealRun) -> None:
    frame = bytes(MAX_FRAME_BYTES)
    with peers(run.endpoint, "endless") as (peer,):
        peer.join("scorer")
        # Nothing is sent before the last frame; each is the same piece of memory here.
        for _ in range(2048 * MIB // len(frame)):
            peer.client._socket.send(frame, zmq.SNDMORE, copy=False)
        peer.client._socket.send(b"")
        run.logs("MiB of it are not a whole message or not read yet")
    run.goes_on()


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00"
"""Signature and version of ZMTP 3.0; the mechanism and 32 more bytes follow."""


def frames_of_a_stranger(run: RealRun, mechanism: bytes) -> int:
    """Greet, then send frames that announce another one each; bytes sent until the server hangs up."""
    host, port = run.endpoint.removeprefix("tcp://").split(":")
    frame, sent = b"\x03" + (2**16).to_bytes(8, "big") + bytes(2**16), 0
    with socket.create_connection((host, int(port)), timeout=20.0) as raw:
        try:
            raw.sendall(GREETING + mechanism.ljust(20, b"\0") + bytes(32))
            while sent < 400 * MIB:
                raw.sendall(frame)
                sent += len(frame)
        except (ConnectionError, TimeoutError):
            pass
    return sent


@pytest.mark.parametrize(
    "mechanism", [b"NULL", b"PLAIN", b"CURVE", b""], ids=["null", "plain", "curve", "none"]
)
def test_frames_without_end_of_a_stranger_end_with_his_connection(
    run: RealRun, mechanism: bytes
) -> None:
    # What the kernel takes before the server hangs up is no memory of the broker's.
    assert frames_of_a_stranger(run, mechanism) < 32 * MIB
    run.goes_on()


def test_a_worker_that_comes_and_goes_fills_neither_the_log_nor_the_memory(run: RealRun) -> None:
    before, held_mib = len(run.log), run.broker_mib
    with peers(run.endpoint, "evil", "late") as (evil, late):
        for number in range(1500):
            evil.say(replace(hello("rollout" if number % 2 else "scorer"), number=number))
            evil.say(Goodbye("no reason " * 400))
            while evil.client.receive(0.0) is not None:
                pass
        late.join("scorer")
        late.say(Goodbye("one that others are to hear of"))
        run.logs("one that others are to hear of")
    assert len(run.log) - before < 40_000 and run.broker_mib - held_mib < 40
    run.goes_on()


@pytest.mark.slow
def test_a_worker_that_keeps_all_tasks_is_given_up(
    run: RealRun, record_property: Callable[[str, str], None]
) -> None:
    with peers(run.endpoint, "hoarder") as (peer,):
        before = run.log.count(" is ready: ")

        def join() -> None:
            join_as_worker(peer, run, "rollout", slots=4096)
            # The end of the iteration comes over another connection: handled first, it gives all work to the honest.
            wait_until(lambda: run.log.count(" is ready: ") > before, "its Ready")

        run.train(join)
        peer.hear(PrefixTask)
        run.logs("no progress for", timeout_s=30.0)
    run.goes_on()
    record_property("figure", f"attacks: the broker held {run.broker_mib:.0f} MiB at most")


def test_more_half_open_connections_than_allowed_are_cut(run: RealRun) -> None:
    host, port = run.endpoint.removeprefix("tcp://").split(":")
    with ExitStack() as opened, peers(run.endpoint, "operator") as (operator,):
        operator.join("operator")
        for number in range(MOST_SILENT + 500):
            raw = opened.enter_context(socket.create_connection((host, int(port)), timeout=20.0))
            raw.sendall(GREETING[: number % len(GREETING)])
        run.logs(f"sent no message, allowed are {MOST_SILENT}")
        operator.say(GetStatus())
        operator.hear(Status)
    run.goes_on()
