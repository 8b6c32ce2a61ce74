"""Who works for the run and how much more each may be given. Pure: time is passed in, messages are not sent here.

Credit is free slots: a worker announces its slots once, every lease takes one, every result, refusal or loss returns it. A task
goes to the worker with most free slots. One more task is *prefetched* per scorer, only while no slot is free anywhere, so that
a decode never waits for a round trip; it is revoked when a newcomer has nothing to do.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from prefixrl.common.messages import ModelDigests, ProbeFailed
from prefixrl.learner.broker.groups import SampleItem, ScoreItem

Phase = Literal["loading", "ready", "draining", "swapping"]

LOADING_STATES = ("loading", "waiting for ")
"""How the state begins of a worker that has not said Ready yet: it loads, or waits for the endpoint that serves its model."""
READY_S = 10.0
"""A worker whose state says that it works has said Ready; one that joins again says so after its present forward."""


@dataclass
class Lease:
    """A task a worker holds."""

    task: str
    attempt: int
    kind: Literal["train", "eval"]
    item: SampleItem | ScoreItem
    since_s: float
    held_s: float
    """When the worker last said it holds the task; when it was given, at first."""
    revoking: bool = False


@dataclass
class Worker:
    """One connected rollout or scorer."""

    identity: bytes
    name: str
    role: Literal["rollout", "scorer"]
    host: str
    pid: int
    heard_s: float
    phase: Phase = "loading"
    slots: int = 0
    version: int = -1
    weights_digest: str = ""
    proved: dict[int, str] = field(default_factory=dict)
    """Version and digest of the weights that it was found to hold, now or since its oldest lease was given."""
    engine: str = ""
    digests: ModelDigests | None = None
    leases: dict[str, Lease] = field(default_factory=dict)
    progress: int = -1
    progressed_s: float = 0.0
    first_lease_s: float | None = None
    first_lease_after_ready_s: float | None = None
    ready_s: float = 0.0
    busy_slot_s: float = 0.0
    state: str = "starting"
    has_said_ready: bool = False
    """Since it joined, or joined again."""
    without_ready_s: float | None = None
    """When it first said that it works without having said Ready, or was last asked to join again for it."""
    probe_failures: int = 0
    refused: ProbeFailed | None = None
    """What it was told of weights that did not pass, until it offers others."""
    engine_mismatch: float = 0.0
    tasks_done: int = 0
    wanted_version: int = -1

    @property
    def free(self) -> int:
        """Slots without a lease."""
        return self.slots - len(self.leases)

    def add(self, lease: Lease, now_s: float) -> None:
        """Give a lease."""
        self.leases[lease.task] = lease
        if len(self.leases) == 1:
            self.progressed_s = (
                now_s  # an idle worker made no progress: its stall clock starts here
            )
        if self.first_lease_s is None:
            self.first_lease_s = now_s
            self.first_lease_after_ready_s = now_s - self.ready_s

    def prove(self, version: int, digest: str) -> None:
        """Note that it holds these weights."""
        oldest = min((lease.item.version for lease in self.leases.values()), default=version)
        needed = {each: known for each, known in self.proved.items() if each >= oldest}
        self.proved = needed | {version: digest}

    def heartbeat(self, progress: int, busy_slot_s: float, state: str, now_s: float) -> None:
        """Note a sign of life and what the work loop says of itself."""
        self.busy_slot_s, self.state = busy_slot_s, state
        if progress != self.progress:
            self.progress, self.progressed_s = progress, now_s

    def lost_its_ready(self, now_s: float) -> bool:
        """Whether its Ready was lost with a connection, so that it has to join anew; says so once per `READY_S`."""
        if self.has_said_ready or self.state.startswith(LOADING_STATES):
            self.without_ready_s = None
            return False
        # A Ready may be on its way behind the first heartbeat that was sent after it.
        if self.without_ready_s is None:
            self.without_ready_s = now_s
        if now_s - self.without_ready_s <= READY_S:
            return False
        self.without_ready_s = now_s
        return True

    def busy_fraction(self, now_s: float) -> float | None:
        """Slot-seconds decoding over slots x time since the first lease; None before it."""
        if self.first_lease_s is None or now_s <= self.first_lease_s:
            return None
        return min(1.0, self.busy_slot_s / (self.slots * (now_s - self.first_lease_s)))


class Registry:
    """All connected workers of a run."""

    def __init__(self, silence_s: float, stall_s: float) -> None:
        self._silence_s = silence_s
        self._stall_s = stall_s
        self.by_identity: dict[bytes, Worker] = {}
        self._numbers = {"rollout": 0, "scorer": 0}

    def add(
        self, identity: bytes, role: Literal["rollout", "scorer"], host: str, pid: int, now_s: float
    ) -> Worker:
        """Register a newcomer under the next free name of its role."""
        worker = Worker(
            identity,
            f"{role}-{self._numbers[role]}",
            role,
            host,
            pid,
            heard_s=now_s,
            progressed_s=now_s,
        )
        self._numbers[role] += 1
        self.by_identity[identity] = worker
        return worker

    def of(self, role: str) -> Iterable[Worker]:
        """Workers of a role."""
        return [worker for worker in self.by_identity.values() if worker.role == role]

    def lost(self, now_s: float) -> list[tuple[Worker, str]]:
        """Workers to give up now, each with the reason a person will read."""
        found = []
        for worker in self.by_identity.values():
            silent_s, stuck_s = now_s - worker.heard_s, now_s - worker.progressed_s
            if silent_s > self._silence_s:
                found.append((worker, f"silent for {silent_s:.1f} s"))
            elif worker.leases and stuck_s > self._stall_s:
                found.append(
                    (worker, f"no progress for {stuck_s:.0f} s on {', '.join(worker.leases)}")
                )
            elif worker.phase == "swapping" and stuck_s > self._stall_s:
                # Its Swap or Installed was lost with a connection: it is asked to join anew, and proves what it has.
                found.append((worker, f"no installed weights for {stuck_s:.0f} s after its swap"))
        return found

    def pick(self, role: str, fits: Callable[[Worker], bool], prefetch: bool) -> Worker | None:
        """The worker that takes the next task: most free slots, then fewest tasks done; see the module text for `prefetch`."""
        # Without the second, newcomers stay idle for ever where work is short.
        ready = [worker for worker in self.of(role) if worker.phase == "ready" and fits(worker)]
        best = max(ready, key=lambda worker: (worker.free, -worker.tasks_done), default=None)
        if best is None or best.free > 0:
            return best
        if prefetch and best.free == 0:
            return best
        return None

    def prefetched(self, role: str) -> Lease | None:
        """A lease beyond its worker's slots, the newest first: it has not started and may be revoked."""
        over = [
            lease
            for worker in self.of(role)
            if worker.free < 0
            for lease in list(worker.leases.values())[worker.slots :]
            if not lease.revoking
        ]
        return max(over, key=lambda lease: lease.since_s, default=None)
