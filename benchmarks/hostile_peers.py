"""Round trips of an honest worker while strangers and false peers connect as fast as they can.

A real broker process; one honest worker sends heartbeats and waits for each answer. Attackers are one process more, the
kinds of `KINDS` in turn. The baseline is the same worker while the same attack goes to another broker on this machine:
on few cores an attacker takes time from everybody, whomever it attacks. The worker without any attack is measured too.
"""

import contextlib
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import TypeVar

import click
import msgspec
import zmq

from benchmarks.results import ROOT, Figure, Report, commit, options
from benchmarks.simulated import simulated_run
from prefixrl.common.host.serving import command as command_of
from prefixrl.common.run.status import StatusDocument
from prefixrl.common.wire.address import Address, address_in
from prefixrl.common.wire.keys import ClientKey, Pair, make_keys
from prefixrl.common.wire.messages.fields import Role
from prefixrl.common.wire.messages.learner import FromBroker, GetStatus, Status, ToBroker
from prefixrl.common.wire.messages.protocol import PROTOCOL
from prefixrl.common.wire.messages.worker import Beat, Heartbeat, Hello, Welcome
from prefixrl.common.wire.transport import Client
from prefixrl.learner.broker.workers.identity import Start

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00"
"""Signature and version of ZMTP 3.0; the mechanism, in 20 bytes, and 32 more follow."""
MESSAGES = 3
"""Messages of garbage by each who is let in."""
KEPT_OPEN = 200
"""Connections that the attackers leave open, so that the broker has to end them."""
BEAT = Heartbeat(progress=0, busy_row_s=0.0, leases=(), state="loading", activity="loading")
Answer = TypeVar("Answer", bound=FromBroker)
QUICK = 2_000, 4.0, 1
"""Connections, seconds without attack and rounds of the small form."""
EVERY_S = 0.002
"""Pause between two round trips."""


def _raw(address: Address, content: bytes) -> socket.socket:
    host, port = address.endpoint.removeprefix("tcp://").split(":")
    raw = socket.create_connection((host, int(port)), timeout=10.0)
    raw.sendall(content)
    return raw


def _garbage(address: Address, draw: random.Random) -> socket.socket:
    return _raw(address, draw.randbytes(draw.randrange(1, 4096)))


def _half(address: Address, draw: random.Random) -> socket.socket:
    """A handshake that stops somewhere, or goes on with garbage."""
    whole = (
        GREETING
        + b"CURVE".ljust(20, b"\0")
        + bytes(32)
        + b"\x04\xc8\x05HELLO"
        + draw.randbytes(194)
    )
    return _raw(
        address, whole[: draw.randrange(len(whole))] + draw.randbytes(draw.choice([0, 0, 300]))
    )


def _wrong_mechanism(address: Address, draw: random.Random) -> socket.socket:
    mechanism = draw.choice([b"NULL", b"PLAIN", b"GSSAPI", draw.randbytes(20)])
    return _raw(address, GREETING + mechanism.ljust(20, b"\0") + bytes(32) + b"\x04\x06\x05READY")


def _client(address: Address, key: ClientKey) -> zmq.Socket[bytes]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.CURVE_SERVERKEY, key.server.encode())
    dealer.setsockopt(zmq.CURVE_PUBLICKEY, key.pair.public.encode())
    dealer.setsockopt(zmq.CURVE_SECRETKEY, key.pair.secret.encode())
    dealer.setsockopt(zmq.IMMEDIATE, 1)
    dealer.setsockopt(zmq.LINGER, 1000)
    dealer.connect(address.endpoint)
    return dealer


def _false_key(address: Address, draw: random.Random) -> zmq.Socket[bytes]:
    public, secret = zmq.curve_keypair()
    pair = Pair(public.decode(), secret.decode())
    return _client(address, msgspec.structs.replace(address.key, pair=pair))


def _true_key(address: Address, draw: random.Random) -> zmq.Socket[bytes]:
    """Let in, and says nothing but garbage."""
    dealer = _client(address, address.key)
    if dealer.poll(1000, zmq.POLLOUT):
        for _ in range(MESSAGES):
            dealer.send_multipart(
                [draw.randbytes(draw.randrange(2000)) for _ in range(draw.randrange(1, 4))]
            )
    return dealer


KINDS: tuple[Callable[[Address, random.Random], "socket.socket | zmq.Socket[bytes]"], ...] = (
    _garbage,
    _half,
    _wrong_mechanism,
    _false_key,
    _true_key,
)


def attack(directory: Path, connections: int) -> None:
    """Say that it can begin, wait for the end of the input, connect so many times, each kind in turn."""
    address = address_in(directory, "worker")
    print("ready", flush=True)
    sys.stdin.read()
    draw, opened = random.Random(0), deque[socket.socket | zmq.Socket[bytes]]()
    for number in range(connections):
        with contextlib.suppress(OSError):  # the broker hung up
            opened.append(KINDS[number % len(KINDS)](address, draw))
        if len(opened) > KEPT_OPEN:
            opened.popleft().close()
    for each in opened:
        each.close()


@contextmanager
def attackers(directory: Path, connections: int) -> Iterator["subprocess.Popen[bytes]"]:
    """The process of `attack`, which is ready and waits for the end of its input."""
    code = (
        f"from benchmarks.hostile_peers import *; attack(Path({str(directory)!r}), {connections})"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        try:
            yield child
        finally:
            child.kill()


class HonestPeer:
    """A peer that is enrolled, and the time of its round trips."""

    def __init__(self, address: Address, role: Role = "scorer") -> None:
        self._client: Client[FromBroker, ToBroker] = Client(
            address.endpoint, FromBroker, role.encode(), address.key
        )
        self._ask(
            Hello(protocol=PROTOCOL, role=role, incarnation="honest", host="host", pid=1), Welcome
        )

    def _ask(self, message: ToBroker, wanted: type[Answer]) -> Answer:
        self._client.send(message)
        received = self._client.receive(30.0)
        assert received is not None and isinstance(received[0], wanted), received
        return received[0]

    def status(self) -> StatusDocument:
        """The broker's status, for an operator."""
        return msgspec.json.decode(self._ask(GetStatus(), Status).document, type=StatusDocument)

    def round_trips(self, until: Callable[[], bool]) -> list[float]:
        """Milliseconds of round trips, one after the other."""
        found = []
        while not until():
            began_s = time.perf_counter()
            self._ask(BEAT, Beat)
            found.append((time.perf_counter() - began_s) * 1e3)
            time.sleep(EVERY_S)
        return found

    def close(self) -> None:
        self._client.close()


@contextmanager
def broker(folder: Path) -> Iterator[tuple[Path, "subprocess.Popen[bytes]", Path]]:
    """A broker process: its run directory, itself, its log."""
    config = simulated_run(folder, 1, 0.002, 0.01)
    directory, log_file = Path(config.directory), folder / "log"
    make_keys(directory)
    with log_file.open("wb") as log:
        start = Start(0, "tcp://127.0.0.1:9")
        child = subprocess.Popen(
            command_of("prefixrl.learner.broker", directory, start), stderr=log
        )
    try:
        while not (directory / "endpoint").exists():
            assert child.poll() is None, log_file.read_text()
            time.sleep(0.01)
        yield directory, child, log_file
    finally:
        child.kill()
        child.wait()


class Measured(msgspec.Struct):
    """Round trips in milliseconds, round by round, and what became of the broker."""

    without: list[list[float]]
    attacked: list[list[float]]
    elsewhere: list[list[float]]
    """While the same attack went to another broker on this machine: what attacker and defence take from the cores."""
    attack_s: float
    broker_mib: float
    """The most memory it ever held."""
    malformed: int
    """Messages of garbage that came through a handshake."""
    tracebacks: int
    is_alive: bool


def measure(connections: int, quiet_s: float, with_other: bool, rounds: int = 1) -> Measured:
    """In each round: the honest worker alone, `with_other` while another broker is attacked, and attacked.

    The rounds share `connections` and `quiet_s`; other load on the machine meets all three alike.
    """
    found = Measured([], [], [], 0.0, 0.0, 0, 0, False)
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder, ExitStack() as stack:
        directory, child, log_file = stack.enter_context(broker(Path(folder)))
        other = Path(folder) / "other"
        other.mkdir()
        other_directory = stack.enter_context(broker(other))[0] if with_other else other
        honest = HonestPeer(address_in(directory, "worker"))

        def alone() -> list[float]:
            end_s = time.monotonic() + quiet_s / rounds
            return honest.round_trips(lambda: time.monotonic() > end_s)

        def during(attacked: Path) -> list[float]:
            with attackers(attacked, connections // rounds) as child:
                assert child.stdin is not None
                child.stdin.close()
                found = honest.round_trips(lambda: child.poll() is not None)
            assert child.returncode == 0
            return found

        for _ in range(rounds):
            found.without.append(alone())
            if with_other:
                found.elsewhere.append(during(other_directory))
            began_s = time.monotonic()
            found.attacked.append(during(directory))
            found.attack_s += time.monotonic() - began_s
        honest.close()
        operator = HonestPeer(address_in(directory, "operator"), "operator")
        found.malformed = operator.status().malformed_messages
        operator.close()
        status = Path(f"/proc/{child.pid}/status").read_text(encoding="utf-8").splitlines()
        found.broker_mib = (
            next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024
        )
        found.tracebacks = log_file.read_text(encoding="utf-8").count("Traceback")
        found.is_alive = child.poll() is None
    return found


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def figures_of(measured: Measured) -> list[Figure]:
    """Quantiles beside the attack, and beside the same attack on another broker: medians of the rounds."""
    found, kind = [], "smallest and largest of the rounds"
    for share, name in ((0.5, "median"), (0.99, "99th percentile")):

        def of(
            rounds: list[list[float]], share: float = share
        ) -> tuple[float, int, tuple[float, float]]:
            each = [quantile(values, share) for values in rounds]
            return median(each), sum(map(len, rounds)), (min(each), max(each))

        without, elsewhere, attacked = (
            of(measured.without),
            of(measured.elsewhere),
            of(measured.attacked),
        )
        label = f"round trip while another broker is attacked, {name}"
        found.append(
            Figure(
                label,
                "ms",
                *elsewhere,
                without[0],
                "without attack",
                elsewhere[0] / without[0],
                name,
                kind,
            )
        )
        label, beside = (
            f"round trip of an honest worker, {name}",
            "while another broker is attacked",
        )
        found.append(
            Figure(
                label, "ms", *attacked, elsewhere[0], beside, attacked[0] / elsewhere[0], name, kind
            )
        )
    most = measured.broker_mib
    found.append(Figure("memory of the broker", "MiB", most, 1, (most, most), statistic="largest"))
    return found


@click.command()
@options
@click.option("--connections", type=int, default=20_000, show_default=True)
@click.option(
    "--quiet-s", type=float, default=20.0, show_default=True, help="Time without attack, in all."
)
@click.option(
    "--rounds",
    type=int,
    default=5,
    show_default=True,
    help="They share connections and quiet time.",
)
def main(path: Path, quick: bool, connections: int, quiet_s: float, rounds: int) -> None:
    """Measure and write the figures."""
    if quick:
        connections, quiet_s, rounds = QUICK
    at, started_s = commit(), time.monotonic()
    measured = measure(connections, quiet_s, with_other=True, rounds=rounds)
    details = {
        "attack_s": measured.attack_s,
        "connections_per_s": connections / measured.attack_s,
        "malformed_messages": measured.malformed,
        "tracebacks": measured.tracebacks,
        "broker_is_alive": measured.is_alive,
        "honest_round_trips": {
            "without": sum(map(len, measured.without)),
            "attacked": sum(map(len, measured.attacked)),
            "lost": 0,
        },
    }
    settings = {
        "connections": connections,
        "quiet_s": quiet_s,
        "rounds": rounds,
        "kinds": [each.__name__[1:] for each in KINDS],
    }
    Report("hostile_peers", quick, settings, figures_of(measured), details, at).finish(
        path, started_s
    )


if __name__ == "__main__":
    main()
