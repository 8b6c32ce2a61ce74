"""Workers without engines: one process, an encrypted socket per worker, results of the usual size after a given time.

    Hello ─▶ Welcome ─▶ Ready ─▶ PrefixTask | ScoreTask ─▶ (rows end, RowsLeft) ─▶ Prefixes | Scores ─▶ Ack
                           Heartbeat on a clock ─▶ Beat;  Staged ─▶ Swap ─▶ Installed ─▶ Probed

They send all that real workers send, as often as these do. `python -m benchmarks.fake_fleet` reads a `FleetPlan` in
JSON from the first line of its input, works until the input ends, and prints a `Timings`.
"""

import heapq
import os
import select
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, count, repeat
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
import zmq

from prefixrl.common.host.process import allow_many_files
from prefixrl.common.wire.address import Address, address_in
from prefixrl.common.wire.messages.fields import UNPROVED, Role
from prefixrl.common.wire.messages.groups import (
    GroupPrefixes,
    GroupTask,
    Row,
    ScoredGroup,
    Verdict,
    VersionSpan,
)
from prefixrl.common.wire.messages.learner import FromBroker, ToBroker
from prefixrl.common.wire.messages.protocol import PROTOCOL
from prefixrl.common.wire.messages.weights import EngineChecksum
from prefixrl.common.wire.messages.worker import (
    Ack,
    Beat,
    Heartbeat,
    Hello,
    Installed,
    ModelDigests,
    Prefixes,
    PrefixTask,
    Probed,
    Ready,
    Refused,
    Revoke,
    Scores,
    ScoreTask,
    Staged,
    Swap,
    Welcome,
)
from prefixrl.common.wire.packing import pack_logprobs, pack_tokens
from prefixrl.common.worker.link import Link
from prefixrl.common.worker.open_tasks import REPORT_EVERY_S, RowsLeftReport

PROMPT_TOKENS, TEXT = 100, "a step of an answer " * 12
ROOM = 1.5
"""Rows that a worker takes, as a multiple of its seats; as the engines do."""
VERDICT = Verdict(
    reward=1.0,
    status="ok",
    extracted="42",
    finish="eos",
    completion_tokens=300,
    elapsed_ms=12,
    is_answered=False,
)


class FleetPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One process of workers."""

    directory: str
    first: int
    """Number of its first worker."""
    rollouts: int
    scorers: int
    slots: tuple[int, int]
    """Groups that a rollout, and a scorer, works on at once."""
    hold_s: tuple[float, float]
    """Mean seconds that each takes for one; from half of it to half as much again."""
    rows: int
    tokens: int
    """Per row."""
    digests: tuple[ModelDigests, ModelDigests]
    """Those of adapter and target."""
    probe_tokens: int
    """Positions of the probe that an installed version is proved with."""


def digest_of(version: int) -> str:
    """The digest of a version's weights, which nobody has."""
    return f"{version:032x}"


class Timings(msgspec.Struct):
    """Pairs of a monotonic time and the seconds that ended then."""

    score_to_ack: list[tuple[float, float]] = []
    freed_to_lease: list[tuple[float, float]] = []


class FakeWorker:
    """One worker: its socket, what it holds, what it waits for."""

    def __init__(self, fleet: "Fleet", role: Role, number: int, address: Address) -> None:
        plan, at = fleet.plan, 0 if role == "rollout" else 1
        self._fleet, self._role, self._digests = fleet, role, plan.digests[at]
        self._slots, self._hold_s = plan.slots[at], plan.hold_s[at]
        self._waiting: deque[PrefixTask | ScoreTask] = deque()
        self._open: dict[str, int] = {}
        """Rows left of every task that it holds."""
        self._busy, self._progress, self._beat_s = 0, 0, 1.0
        self._version, self._staged = 0, -1
        self._sent_s: dict[str, float] = {}
        self._freed_s: float | None = None
        """Time since which the broker could give it another task."""
        seats = self._slots * plan.rows
        self._room = int(seats * ROOM)
        self._rows_left = RowsLeftReport(cast("Link", self), False, seats, self._room)
        self._is_reporting = False
        self.socket = fleet.context.socket(zmq.DEALER)
        key = address.key
        for option, value in (
            (zmq.IDENTITY, f"fake-{number}".encode()),
            (zmq.CURVE_SERVERKEY, key.server.encode()),
            (zmq.CURVE_PUBLICKEY, key.pair.public.encode()),
            (zmq.CURVE_SECRETKEY, key.pair.secret.encode()),
            (zmq.IMMEDIATE, 1),
            (zmq.LINGER, 0),
            (zmq.SNDHWM, 4096),
            (zmq.RCVHWM, 4096),
        ):
            self.socket.setsockopt(option, value)
        self.socket.connect(address.endpoint)
        self._number = number

    def send(self, message: ToBroker) -> None:
        """Send a message; the fleet looks for answers afterwards."""
        self.socket.send(self._fleet.encode(message))
        self._fleet.touched.add(self)

    def join(self) -> None:
        if not self.socket.poll(0, zmq.POLLOUT):
            self._fleet.after(0.05, self.join)  # not connected yet
            return
        self.send(
            Hello(
                protocol=PROTOCOL,
                role=self._role,
                incarnation=f"fake-{self._number}",
                host="host",
                pid=1,
            )
        )

    def _beat(self) -> None:
        self._fleet.after(self._beat_s, self._beat)
        self.send(
            Heartbeat(
                progress=self._progress,
                busy_row_s=float(self._progress),
                leases=tuple(self._open),
                state="working",
            )
        )

    def take(self, message: FromBroker) -> None:
        """Do what a worker does with a message."""
        match message:
            case Welcome():
                self._beat_s = msgspec.json.decode(message.config_json)["broker"]["heartbeat_s"]
                self._ready()
            case PrefixTask() | ScoreTask():
                now_s = time.monotonic()
                if self._freed_s is not None and isinstance(message, ScoreTask):
                    self._fleet.timings.freed_to_lease.append((now_s, now_s - self._freed_s))
                self._open[message.task] = self._fleet.plan.rows
                self._rows_left.begin(message.task, self._fleet.plan.rows)
                self._freed_s = None
                self._waiting.append(message)
                self._start()
            case Ack(task):
                now_s = time.monotonic()
                if (sent_s := self._sent_s.pop(task, None)) is not None:
                    self._fleet.timings.score_to_ack.append((now_s, now_s - sent_s))
            case Beat(latest):
                if (
                    self._role == "rollout"
                    and latest is not None
                    and latest.version > max(self._version, self._staged)
                ):
                    self._staged = latest.version
                    self.send(Staged(latest.version))
            case Swap(version):
                checksum = EngineChecksum("a", "snapshot")
                probe = pack_logprobs(np.zeros(self._fleet.plan.probe_tokens, np.float32))
                self.send(Installed(version, digest_of(version), probe, checksum=checksum))
            case Probed(version=version, outcome="proved"):
                self._version = version
            case Revoke(task):
                found = [each for each in self._waiting if each.task == task]
                for each in found:
                    self._waiting.remove(each)
                    del self._open[task]
                    self.send(Refused(task, "not started"))
            case _:
                raise AssertionError(f"{self._role} {self._number} got {message}")

    def _ready(self) -> None:
        plan = self._fleet.plan
        self.send(
            Ready(
                seats=self._slots * plan.rows,
                room=self._room,
                takes_runs=False,
                digests=self._digests,
                version=0 if self._role == "rollout" else UNPROVED,
                weights_digest=digest_of(0) if self._role == "rollout" else "",
                engine="simulated",
            )
        )
        self._fleet.after(self._beat_s * self._fleet.draw.random(), self._beat)

    def _start(self) -> None:
        while self._waiting and self._busy < self._slots:
            task, self._busy = self._waiting.popleft(), self._busy + 1
            if self._hold_s:
                hold_s = self._hold_s * self._fleet.draw.uniform(
                    0.5, 1.5
                )  # in step they would come in waves
                self._fleet.after(hold_s, partial(self._deliver, task))
                for row in range(self._fleet.plan.rows):
                    ended_s = hold_s * (0.5 + 0.5 * row / self._fleet.plan.rows)
                    self._fleet.after(ended_s, partial(self._row_ended, task.task))
            else:
                self._fleet.after(0.0, partial(self._deliver, task))

    def _row_ended(self, task: str) -> None:
        if task in self._open:
            self._open[task] = max(0, self._open[task] - 1)
        self._progress += 1
        if not self._is_reporting:
            self._is_reporting = True
            self._fleet.after(REPORT_EVERY_S, self._report)

    def _report(self) -> None:
        self._is_reporting = False
        self._rows_left.report(self._open, time.monotonic())
        self._note_room()

    def _note_room(self) -> None:
        if self._freed_s is None and self._has_room():
            self._freed_s = time.monotonic()

    def _has_room(self) -> bool:
        return sum(self._open.values()) < self._room

    def _deliver(self, task: PrefixTask | ScoreTask) -> None:
        self._busy, self._progress = self._busy - 1, self._progress + 1
        del self._open[task.task]
        if isinstance(task, PrefixTask):
            self.send(self._fleet.prefixes(task))
        else:
            now_s = time.monotonic()
            self._sent_s[task.task] = now_s
            self.send(self._fleet.scores(task))
        self._note_room()
        self._start()


class Fleet:
    """All workers of this process, one loop over their sockets and timers."""

    def __init__(self, plan: FleetPlan) -> None:
        self.plan, self.timings = plan, Timings()
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.context.set(zmq.MAX_SOCKETS, 4 * (plan.rollouts + plan.scorers) + 16)
        self.encode = msgspec.msgpack.Encoder().encode
        self._decoder: msgspec.msgpack.Decoder[FromBroker] = msgspec.msgpack.Decoder(FromBroker)
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self.touched: set[FakeWorker] = set()
        self.draw = draw = np.random.default_rng(plan.first)
        self._tokens = [
            pack_tokens(draw.integers(0, 128, plan.tokens, dtype=np.int32)) for _ in range(64)
        ]
        self._logprobs = pack_logprobs(-draw.random(plan.tokens, dtype=np.float32))
        self._prompt = pack_tokens(draw.integers(0, 128, PROMPT_TOKENS, dtype=np.int32))
        address = address_in(Path(plan.directory), "worker")
        roles: Iterator[Role] = chain(
            repeat("rollout", plan.rollouts), repeat("scorer", plan.scorers)
        )
        self._workers = [
            FakeWorker(self, role, plan.first + at, address) for at, role in enumerate(roles)
        ]

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Call `action` so much later."""
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._numbers), action))

    def prefixes(self, task: PrefixTask) -> Prefixes:
        digest = digest_of(task.version)
        return Prefixes(
            task=task.task,
            kind=task.kind,
            version=task.version,
            weights_digest=digest,
            groups=tuple(self._group(each, task.version, digest) for each in task.groups),
            elapsed_s=0.1,
        )

    def _group(self, group: GroupTask, version: int, digest: str) -> GroupPrefixes:
        spans = (VersionSpan(version, digest, self.plan.tokens),)
        rows = tuple(
            Row(
                tokens=self._tokens[(group.seq + row) % 64],
                logprobs=self._logprobs,
                finish="length",
                spans=spans,
                text=TEXT,
            )
            for row in range(self.plan.rows)
        )
        return GroupPrefixes(
            seq=group.seq,
            prompt=group.prompt,
            seed=group.seed,
            prompt_tokens=self._prompt,
            rows=rows,
        )

    def scores(self, task: ScoreTask) -> Scores:
        groups = tuple(
            ScoredGroup(
                prefixes=group,
                version=task.version,
                weights_digest=task.weights_digest,
                verdicts=(VERDICT,) * len(group.rows),
                scorer="fake",
                sampled_s=0.1,
                scoring_s=self.plan.hold_s[1],
            )
            for group in task.groups
        )
        return Scores(task.task, task.kind, groups)

    def run(self, stop: int) -> None:
        """Work until the file descriptor `stop` can be read."""
        events, by_descriptor = select.epoll(), {}
        for number, worker in enumerate(self._workers):
            descriptor = int(worker.socket.getsockopt(zmq.FD))
            by_descriptor[descriptor] = worker
            events.register(descriptor, select.EPOLLIN)
            self.after(0.001 * number, worker.join)
        events.register(stop, select.EPOLLIN)
        while True:
            for descriptor, _ in events.poll(self._rest_s(), 256):
                if descriptor == stop:
                    return
                self.touched.add(by_descriptor[descriptor])
            for action in self._due():
                action()
            while self.touched:
                self._drain(self.touched.pop())

    def _rest_s(self) -> float:
        return max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else 1.0

    def _due(self) -> Iterator[Callable[[], None]]:
        now_s = time.monotonic()
        while self._timers and self._timers[0][0] <= now_s:
            yield heapq.heappop(self._timers)[2]

    def _drain(self, worker: FakeWorker) -> None:
        # The descriptor of a socket tells of changes only: a send may have taken the one that a message made.
        while int(worker.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            worker.take(self._decoder.decode(worker.socket.recv()))


def main() -> None:
    allow_many_files()
    plan = msgspec.json.decode(sys.stdin.readline(), type=FleetPlan)
    fleet = Fleet(plan)
    fleet.run(sys.stdin.fileno())
    sys.stdout.buffer.write(msgspec.json.encode(fleet.timings))
    sys.stdout.flush()
    os._exit(0)  # a thousand sockets need no goodbye


if __name__ == "__main__":
    main()
