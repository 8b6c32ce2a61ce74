"""Workers of a run, their leases and free rows. Pure: time is passed in.

Credit is counted in rows: a worker announces its seats and its room once. A lease takes its rows; each that ends, and a
result, refusal or loss, returns them. A task goes to the worker with most empty seats, else with most free rows. Two
kinds of engine:

    groups apart    room is larger than the seats, so that rows wait in the engine and no seat is ever empty
    runs of groups  a task is one forward and takes all seats. One more task is *prefetched* per scorer, only while
                    nobody has a free row, so that a decode never waits for a round trip

A task that waits behind others for a seat is revoked when another worker has nothing to do.
"""

import math
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

from prefixrl.common.wire.messages.fields import MOST_ROWS, UNPROVED
from prefixrl.common.wire.messages.groups import TaskKind
from prefixrl.common.wire.messages.weights import Proof
from prefixrl.common.wire.messages.worker import (
    Activity,
    Heartbeat,
    MemoryUse,
    ModelDigests,
    Probed,
    Ready,
)
from prefixrl.learner.broker.groups.states import SampleItem, ScoreItem
from prefixrl.learner.broker.workers.task_names import Content

MOST_HELD = 3
"""Most rows of all leases of a worker, as a multiple of its room. Ended rows count: only the worker reports ends."""
RATE_S = 5.0
AWAY_BEATS = 3
"""Missing heartbeats after which the worker, or this broker, was suspended."""
READY_S = 10.0
"""Patience for the Ready of a worker whose state shows work; one that joins again ends its forward first."""


class Phase(IntEnum):
    """The phase of a worker, in the order in which a rollout goes through them."""

    LOADING = 0
    READY = 1
    DRAINING = 2
    """It finishes its tasks before it swaps to another version."""
    SWAPPING = 3

    def __str__(self) -> str:
        """Return the text of the status document."""
        return self.name.lower()


@dataclass
class Lease:
    """A task held by a worker."""

    task: str
    kind: TaskKind
    item: SampleItem | ScoreItem
    since_s: float
    reported_s: float
    """Time at which the worker last reported the task; at first, when it was given."""
    content: Content = ("train", ())
    rows: int = 1
    """Texts that the engine writes for it."""
    open_rows: int = 1
    """Texts that have not ended, by the worker's last report."""
    revoking: bool = False
    most_s: float = math.inf
    """Longest time from its front to its result."""
    front_s: float | None = None
    """Time at which it came into a seat; None while it waits behind others."""
    away_before_s: float = 0.0
    """Total absence of its worker until then."""


PLACING = {
    "phase",
    "seats",
    "room",
    "takes_runs",
    "version",
    "weights_digest",
    "rows",
    "open_rows",
    "tasks_done",
    "is_leaving",
}
"""Attributes of a worker that decide its place in the order of tasks."""


@dataclass
class Worker:
    """One connected rollout or scorer."""

    identity: bytes
    name: str
    role: Literal["rollout", "scorer"]
    host: str
    pid: int
    heard_s: float
    phase: Phase = Phase.LOADING
    seats: int = 0
    room: int = 0
    takes_runs: bool = True
    about: str = ""
    version: int = -1
    weights_digest: str = ""
    proved: dict[int, str] = field(default_factory=dict)
    """Weights, by version, that it proved to hold, now or since its oldest lease was given."""
    key: str = ""
    """Name of the key that it joined with. A message with another key comes from another process."""
    engine: str = ""
    digests: ModelDigests | None = None
    leases: dict[str, Lease] = field(default_factory=dict)
    """Tasks in the order in which they were given; only `add` and `drop` change them."""
    rows: int = 0
    """Rows of its leases, ended ones included."""
    open_rows: int = 0
    """Rows of its leases that have not ended."""
    progress: int = -1
    progressed_s: float = 0.0
    first_lease_s: float | None = None
    first_lease_after_ready_s: float | None = None
    ready_s: float = 0.0
    busy_row_s: float = 0.0
    reported_s: float = 0.0
    """Time of the newest report of its work loop."""
    waiting_rows: int = 0
    memory: MemoryUse | None = None
    tokens: int = 0
    tokens_per_s: float = 0.0
    rated: tuple[int, float] = (0, 0.0)
    """Tokens and time from which the next rate is measured."""
    activity: Activity = "loading"
    state: str = "starting"
    has_said_ready: bool = False
    """True if a Ready came since it joined, or joined again."""
    without_ready_s: float | None = None
    """Time at which it first reported work without a Ready, or was last asked to join again."""
    probe_failures: int = 0
    refused: Probed | None = None
    """The answer about weights that failed the proof, until it offers others."""
    engine_mismatch: float = 0.0
    proof: Proof = "digest"
    """The proof that its present version was admitted by."""
    probe_slope: float | None = None
    """Slope of its newest probe; None where the change was too small to be seen."""
    tasks_done: int = 0
    tasks_lost: int = 0
    """Tasks that were lost on the way to it or back, since its last result."""
    most_leases: int = 1
    """Tasks that it has held at once."""
    wanted_version: int = -1
    beat_s: float = 1.0
    """Time between two of its heartbeats."""
    away_s: float = 0.0
    """Sum of its long silences. A suspended process cannot keep a deadline."""
    is_leaving: bool = False
    """True once it takes no new task; it never takes one again."""
    is_drained: bool = False
    """True while the operator wants it to leave and it has not confirmed."""
    changed: "dict[bytes, Worker] | None" = field(default=None, repr=False, compare=False)
    """The index to which the worker adds itself when its place may have changed."""

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
        if name in PLACING and self.__dict__.get("changed") is not None:
            self.__dict__["changed"][self.identity] = self

    @property
    def free(self) -> int:
        """Number of rows that it may get. A task is given whole, so the number may be negative."""
        free = self.room - self.taken_rows
        return free if self.takes_runs else min(free, MOST_HELD * self.room - self.rows)

    @property
    def taken_rows(self) -> int:
        """Number of rows of credit that its leases take now."""
        return self.seats * len(self.leases) if self.takes_runs else self.open_rows

    @property
    def seated(self) -> int:
        """Number of rows of credit that can be in a seat at once."""
        return self.room if self.takes_runs else self.seats

    def behind(self) -> list[Lease]:
        """Return the leases that wait: the leases before them take all seats."""
        if self.taken_rows <= self.seated:
            return []
        waiting, before = [], 0
        for lease in self.leases.values():
            if before >= self.seated and (self.takes_runs or lease.open_rows):
                waiting.append(lease)
            before += self.seats if self.takes_runs else lease.open_rows
        return waiting

    @property
    def holder(self) -> bytes:
        """The identity that the names of its tasks prove."""
        return self.identity + self.key.encode()

    @property
    def label(self) -> str:
        """Name, host and process, for the log."""
        return f"{self.name} ({self.host} pid {self.pid})"

    def add(self, lease: Lease, now_s: float) -> None:
        """Give a lease."""
        self.leases[lease.task] = lease
        self.rows += lease.rows
        self.open_rows += lease.open_rows
        self.most_leases = max(self.most_leases, len(self.leases))
        self.time_front(now_s)
        if len(self.leases) == 1:
            self.progressed_s = (
                now_s  # an idle worker made no progress: its stall clock starts here
            )
        if self.first_lease_s is None:
            self.first_lease_s = now_s
            self.first_lease_after_ready_s = now_s - self.ready_s

    def drop(self, task: str) -> Lease | None:
        """Take a lease away, if it has it."""
        lease = self.leases.pop(task, None)
        if lease is not None:
            self.rows -= lease.rows
            self.open_rows -= lease.open_rows
        return lease

    def time_front(self, now_s: float) -> None:
        """Begin to time the tasks that are in a seat by now; one behind them is not worked on."""
        waiting = {lease.task for lease in self.behind()}
        for lease in self.leases.values():
            if lease.front_s is None and lease.task not in waiting:
                lease.front_s, lease.away_before_s = now_s, self.away_s

    def hear(self, now_s: float) -> None:
        """Note a message, and the silence before it if it was long."""
        silent_s = now_s - self.heard_s
        if silent_s > AWAY_BEATS * self.beat_s:
            self.away_s += silent_s
        self.heard_s = now_s

    def overdue(self, now_s: float, counts_away: bool) -> Lease | None:
        """Return a lease past its limit; `counts_away`: the worker's absences count as time."""
        for lease in self.leases.values():
            away_s = 0.0 if counts_away else self.away_s - lease.away_before_s
            if lease.front_s is not None and now_s - lease.front_s - away_s > lease.most_s:
                return lease
        return None

    def finish(self, task: str) -> None:
        """End the lease of a result, if it still has one."""
        self.drop(task)
        self.tasks_done += 1
        self.tasks_lost = 0

    def take_ready(self, ready: Ready, now_s: float) -> None:
        """Take over what it loaded and offers."""
        self.seats, self.room, self.takes_runs = ready.seats, ready.room, ready.takes_runs
        self.digests, self.engine, self.about = ready.digests, ready.engine, ready.about
        self.has_said_ready = True
        self.ready_s = self.progressed_s = now_s

    def join_again(self) -> None:
        """Reset the state that a worker itself resets before it sends another Hello."""
        self.phase = Phase.LOADING
        self.wanted_version = UNPROVED
        self.refused = None
        self.has_said_ready = False
        self.without_ready_s = None

    def prove(self, version: int, digest: str) -> None:
        """Note that it proved to hold these weights."""
        oldest = min((lease.item.version for lease in self.leases.values()), default=version)
        needed = {each: known for each, known in self.proved.items() if each >= oldest}
        self.proved = needed | {version: digest}

    def rows_left(self, task: str, rows: int) -> None:
        """Note how many rows of a task have not ended; the credit of ended rows returns."""
        lease = self.leases.get(task)
        if lease is not None:
            before = lease.open_rows
            lease.open_rows = min(rows, lease.rows)
            self.open_rows += lease.open_rows - before

    def heartbeat(self, beat: Heartbeat, now_s: float) -> None:
        """Note a sign of life and the work loop's report."""
        self.busy_row_s, self.waiting_rows = beat.busy_row_s, beat.waiting_rows
        self.activity, self.state = beat.activity, beat.state
        self.reported_s, self.memory = now_s, beat.memory
        before, since_s = self.rated
        if not since_s or beat.tokens < before:
            self.rated = beat.tokens, now_s
        elif now_s - since_s >= RATE_S:
            self.tokens_per_s = (beat.tokens - before) / (now_s - since_s)
            self.rated = beat.tokens, now_s
        self.tokens = beat.tokens
        if beat.progress != self.progress:
            self.progress, self.progressed_s = beat.progress, now_s

    def lost_its_ready(self, now_s: float) -> bool:
        """Return True, once per `READY_S`, if its Ready was lost and it has to join again."""
        if self.has_said_ready or self.activity in ("loading", "waiting"):
            self.without_ready_s = None
            return False
        # A Ready may be on its way behind the first heartbeat that was sent after it.
        if self.without_ready_s is None:
            self.without_ready_s = now_s
        is_lost = now_s - self.without_ready_s > READY_S
        if is_lost:
            self.without_ready_s = now_s
        return is_lost

    @property
    def busy_fraction(self) -> float | None:
        """Row-seconds in a seat over seats x time from the first lease to the newest report."""
        passed_s = self.since_first_lease_s
        return min(1.0, self.busy_row_s / (self.seats * passed_s)) if passed_s > 0 else None

    @property
    def since_first_lease_s(self) -> float:
        """Seconds from the first lease to the newest report, 0 before it."""
        return 0.0 if self.first_lease_s is None else max(0.0, self.reported_s - self.first_lease_s)


def check_offer(ready: Ready) -> None:
    """Raise ValueError unless the offered seats and room are possible."""
    if not 1 <= ready.seats <= ready.room <= MOST_ROWS:
        raise ValueError(
            f"a worker with {ready.seats} seats and room for {ready.room} rows cannot work here; its engine must offer "
            f"from 1 to {MOST_ROWS} seats, and room for at least as many rows, up to {MOST_ROWS}"
        )
