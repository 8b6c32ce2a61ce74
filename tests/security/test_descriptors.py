"""Peers that take all descriptors of broker and weight server, of which each may have few."""

import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import zmq
from msgspec.structs import replace

from prefixrl.common.wire.keys import add_client, read_client_key, remove_client
from prefixrl.common.wire.messages.learner import FromBroker, ToBroker
from prefixrl.common.wire.messages.protocol import PROTOCOL
from prefixrl.common.wire.messages.worker import Hello, Reject
from prefixrl.common.wire.transport import Client
from security.real_run import RealRun, real_run
from support.fakes import peers, wait_until
from support.keys import key
from support.paths import ROOT

HELLO = Hello(protocol=PROTOCOL, role="scorer", incarnation="incarnation", host="host", pid=1)
LIMIT = 300
"""Descriptors of each server."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRun]:
    with real_run(tmp_path_factory.mktemp("crowded")) as started:
        for title in ("prefixrl-broker", "prefixrl-weights"):
            resource.prlimit(started.server(title).pid, resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
        yield started


@contextmanager
def strangers(run: RealRun, number: int) -> Iterator[None]:
    """Connections to both servers that send a byte each and come again when they are cut."""
    ports = [
        each.rpartition(":")[2].strip()
        for each in (run.endpoint, (run.directory / "weights_endpoint").read_text())
    ]
    command = [sys.executable, "-m", "benchmarks.strangers", str(number), "3600", "ff", *ports]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as flood:
        assert flood.stdout is not None and flood.stdout.readline() == b"ready\n"
        try:
            yield
        finally:
            flood.kill()


@pytest.mark.slow
def test_strangers_who_come_again_and_again_end_no_server_and_no_connection_of_a_worker(
    run: RealRun,
) -> None:
    joined = run.log.count(" joined from ")
    with strangers(run, 4 * LIMIT):
        run.logs("connections: ")
        until_s = time.monotonic() + 3.0
        while time.monotonic() < until_s:
            run.goes_on()
        late: Client[FromBroker, ToBroker] = Client(
            run.endpoint, FromBroker, b"late", key("operator")
        )
        late.send(replace(HELLO, role="operator"), timeout_s=60.0)
        assert late.receive(20.0) is not None, "who comes now gets a place"
        late.close()
    assert run.log.count(" joined from ") == joined, "no worker lost its connection"


@pytest.mark.slow
def test_a_key_is_out_within_seconds_although_no_descriptor_is_free(run: RealRun) -> None:
    evils = read_client_key(add_client(run.directory, "evil"))
    evil: Client[FromBroker, ToBroker] = Client(run.endpoint, FromBroker, b"evil", evils)
    evil.send(HELLO)
    assert evil.receive(20.0) is not None
    with strangers(run, 4 * LIMIT):
        remove_client(run.directory, "evil")

        def is_out() -> bool:
            evil.send(HELLO)
            answer = evil.receive(1.0)
            return answer is not None and isinstance(answer[0], Reject)

        wait_until(is_out, "the refusal", 10.0)
    evil.close()
    run.goes_on()


@pytest.mark.slow
def test_one_key_that_connects_again_and_again_leaves_room_for_others(run: RealRun) -> None:
    owned = key("worker")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    evil = [context.socket(zmq.DEALER) for _ in range(LIMIT)]
    for attacker in evil:
        attacker.curve_serverkey, attacker.curve_publickey = (
            owned.server.encode(),
            owned.pair.public.encode(),
        )
        attacker.curve_secretkey, attacker.linger = owned.pair.secret.encode(), 0
        attacker.connect(run.endpoint)
        attacker.send(b"it speaks, and is no stranger")
    run.logs("in all 225 are allowed")
    with peers(run.endpoint, "operator") as (operator,):
        operator.join("operator")
        run.goes_on()
    for attacker in evil:
        attacker.close()
    context.term()
