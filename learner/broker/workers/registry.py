"""The connected workers: their names, who is lost, who gets the next task.

Pure: time is passed in.
"""

from collections.abc import Container, Iterable

from prefixrl.common.wire.messages.worker import Hello
from prefixrl.learner.broker.groups.admission import Supply
from prefixrl.learner.broker.workers.task_order import Kind, TaskOrder
from prefixrl.learner.broker.workers.workers import Lease, Phase, Worker

BEATS_PER_S = 100
"""Heartbeats per second of all workers. Above this, new workers send theirs less often."""
SILENCE_SHARE = 1 / 4
"""Longest heartbeat interval, as a part of the silence after which a worker counts as dead."""
MOST_BEAT_S = 2.5
"""Longest time between two heartbeats in any case: with each a worker looks whether the broker has moved."""
LOOK_S, MOST_LOOK_S = 0.1, 1.0
LOOKS_PER_S = 1000
"""Looks at a worker per second, at all of them together, between these times."""


class Registry:
    """Connected workers of a run."""

    def __init__(self, silence_s: float, stall_s: float, beat_s: float = 1.0) -> None:
        self._silence_s, self._stall_s, self._beat_s = silence_s, stall_s, beat_s
        self.by_identity: dict[bytes, Worker] = {}
        self._takers = {
            "rollout": TaskOrder(Phase.DRAINING, Phase.SWAPPING, prefetches=False),
            "scorer": TaskOrder(Phase.READY, Phase.READY, prefetches=True),
        }
        self._slots = 0.0
        """Items that scorers hold at once."""
        self._numbers = {"rollout": 0, "scorer": 0}
        self.drained: dict[tuple[str, int], str] = {}
        """Names of the workers that the operator drained, by host and process."""

    def add(self, identity: bytes, hello: Hello, now_s: float) -> Worker:
        """Register a new worker under the number that it asks for, unless another worker has it."""
        role = hello.role
        assert role == "rollout" or role == "scorer"
        name = f"{role}-{hello.number}"
        names = {worker.name for worker in self.by_identity.values()}
        if hello.number is None or name in names:
            while (name := f"{role}-{self._numbers[role]}") in names:
                self._numbers[role] += 1
            self._numbers[role] += 1
        worker = Worker(
            identity, name, role, hello.host, hello.pid, heard_s=now_s, progressed_s=now_s
        )
        # The heartbeat interval of a new worker grows with the number of workers.
        spread_s = min(
            len(self.by_identity) / BEATS_PER_S, SILENCE_SHARE * self._silence_s, MOST_BEAT_S
        )
        worker.beat_s = max(self._beat_s, spread_s)
        self.by_identity[identity] = worker
        # From here on every change of the worker puts it on this list of workers to place anew.
        worker.changed = self._takers[role].changed
        worker.changed[identity] = worker
        return worker

    def remove(self, worker: Worker) -> None:
        """Forget a worker; nothing happens where it is forgotten already."""
        if self.by_identity.pop(worker.identity, None) is not None:
            self._takers[worker.role].remove(worker)

    def predecessor(self, hello: Hello, now_s: float) -> Worker | None:
        """Return the silent worker on the same host whose name a new worker asks for."""
        name = f"{hello.role}-{hello.number}"
        for worker in self.by_identity.values():
            is_namesake = worker.name == name and worker.host == hello.host
            if is_namesake and worker.pid != hello.pid and now_s - worker.heard_s > worker.beat_s:
                return worker
        return None

    def drain(self, name: str) -> Worker:
        """Give a worker no new task until it leaves; ValueError if no worker has that name."""
        workers = {worker.name: worker for worker in self.by_identity.values()}
        if name not in workers:
            raise ValueError(
                f"this run has no worker {name!r}; it has {', '.join(workers) or 'none'}"
            )
        worker = workers[name]
        worker.is_drained = worker.is_leaving = True
        self.drained[worker.host, worker.pid] = name
        return worker

    def workers_of(self, role: str) -> Iterable[Worker]:
        """Return the workers of a role."""
        return [worker for worker in self.by_identity.values() if worker.role == role]

    @property
    def look_every_s(self) -> float:
        """Time between two searches for lost workers; it grows with their number."""
        return min(MOST_LOOK_S, max(LOOK_S, len(self.by_identity) / LOOKS_PER_S))

    def lost(self, now_s: float) -> list[tuple[Worker, str]]:
        """Return the workers that are lost, each with the reason."""
        lost = []
        for worker in self.by_identity.values():
            silent_s, stuck_s = now_s - worker.heard_s, now_s - worker.progressed_s
            if silent_s > self._silence_s:
                lost.append((worker, f"silent for {silent_s:.1f} s"))
            elif worker.leases and stuck_s > self._stall_s:
                # Its heartbeats come from another thread: only progress shows that it works.
                lost.append(
                    (worker, f"no progress for {stuck_s:.0f} s on {', '.join(worker.leases)}")
                )
            elif (
                late := worker.overdue(now_s, counts_away=True)
            ) and worker.away_s > late.away_before_s:
                lost.append(
                    (worker, f"it was away, and {late.task} has no result after {late.most_s:g} s")
                )
            elif worker.phase is Phase.SWAPPING and stuck_s > self._stall_s:
                # Its Swap or Installed was lost with a connection: it is asked to join again, and proves what it has.
                lost.append((worker, f"no installed weights for {stuck_s:.0f} s after its swap"))
        return lost

    def pick(self, role: str, besides: Container[Kind] = ()) -> Worker | None:
        """Return the worker that gets the next task, of other kinds than `besides`: the one with most empty seats."""
        # Without the last, new workers stay idle for ever where work is short.
        return self._takers[role].best(besides)

    def supply(self, rows_per_item: int) -> Supply:
        """Return the supply of ready workers. A rollout that swaps counts: it is ready again soon."""
        rollouts, scorers = self._takers["rollout"], self._takers["scorer"]
        rollouts.refresh()
        scorers.refresh()
        if scorers.has_new_offers:
            scorers.has_new_offers = False
            # An item is at a scorer from the lease to the result, also while its rows wait for a seat: so it is the
            # room that counts, in items. Of an engine that takes runs, the seats are those of one item.
            self._slots = sum(
                room / (seats if takes_runs else rows_per_item)
                for seats, room, takes_runs in scorers.offers.values()
            )
        return Supply(len(rollouts.offers), self._slots)

    def revocable(self, role: str) -> tuple[Worker, Lease] | None:
        """Return the newest lease that waits for a seat while others are empty, and its holder."""
        takers = self._takers[role]
        idle = takers.best()
        if idle is None or idle.free <= 0 or (empty := idle.seated - idle.taken_rows) <= 0:
            return None
        crowded = (worker for worker in takers.crowded.values() if worker is not idle)
        waiting = [(worker, lease) for worker in crowded for lease in worker.behind()]
        fitting = (
            each
            for each in waiting
            if not each[1].revoking and (not idle.leases or each[1].open_rows <= empty)
        )
        return max(fitting, key=lambda each: each[1].since_s, default=None)
