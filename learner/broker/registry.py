"""The connected workers: their names, who is lost, who gets the next task.

Pure: time is passed in.
"""

import math
from collections.abc import Callable, Iterable

from prefixrl.common.wire.messages import Hello
from prefixrl.learner.broker.admission import Supply
from prefixrl.learner.broker.workers import Lease, Worker


class Registry:
    """Connected workers of a run."""

    def __init__(self, silence_s: float, stall_s: float, beat_s: float = 1.0, strays_s: float = math.inf) -> None:
        self._silence_s, self._stall_s, self._beat_s, self._strays_s = silence_s, stall_s, beat_s, strays_s
        self.by_identity: dict[bytes, Worker] = {}
        self._numbers = {"rollout": 0, "scorer": 0}
        self._given: set[str] = set()
        """Names that some worker has had: who wants none is given another."""
        self.drained: dict[tuple[str, int], str] = {}
        """Names of the workers that the operator drained, by host and process."""

    def add(self, identity: bytes, hello: Hello, now_s: float) -> Worker:
        """Register a new worker, by the number that it wants unless another has it."""
        role = hello.role
        assert role == "rollout" or role == "scorer"
        name = f"{role}-{hello.number}"
        if hello.number is None or name in {worker.name for worker in self.by_identity.values()}:
            while (name := f"{role}-{self._numbers[role]}") in self._given:
                self._numbers[role] += 1
        self._given.add(name)
        worker = Worker(identity, name, role, hello.host, hello.pid, heard_s=now_s, progressed_s=now_s)
        worker.beat_s, worker.strays_s, worker.joined_s = self._beat_s, self._strays_s, now_s
        self.by_identity[identity] = worker
        return worker

    def predecessor(self, hello: Hello, now_s: float) -> Worker | None:
        """Return the silent process of the same host that has the name which a new one wants."""
        name = f"{hello.role}-{hello.number}"
        found = (each for each in self.by_identity.values() if each.name == name and each.host == hello.host)
        silent = (each for each in found if now_s - each.heard_s > self._beat_s)
        return next((each for each in silent if each.pid != hello.pid), None)

    def drain(self, name: str) -> Worker:
        """Give a worker no new task, since it is to leave; ValueError if there is none of that name."""
        named = {worker.name: worker for worker in self.by_identity.values()}
        if name not in named:
            raise ValueError(f"this run has no worker {name!r}; it has {', '.join(named) or 'none'}")
        worker = named[name]
        worker.is_drained = worker.is_leaving = True
        self.drained[worker.host, worker.pid] = name
        return worker

    def of(self, role: str) -> Iterable[Worker]:
        """Return the workers of a role."""
        return [worker for worker in self.by_identity.values() if worker.role == role]

    def lost(self, now_s: float) -> list[tuple[Worker, str]]:
        """Return the workers to give up now, each with the reason for the log."""
        found = []
        for worker in self.by_identity.values():
            silent_s, stuck_s = now_s - worker.heard_s, now_s - worker.progressed_s
            if silent_s > self._silence_s:
                found.append((worker, f"silent for {silent_s:.1f} s"))
            elif worker.leases and stuck_s > self._stall_s:
                found.append((worker, f"no progress for {stuck_s:.0f} s on {', '.join(worker.leases)}"))
            elif (late := worker.overdue(now_s, counts_away=True)) and worker.away_s > late.away_before_s:
                found.append((worker, f"it was away, and {late.task} has no result after {late.most_s:g} s"))
            elif worker.phase == "swapping" and stuck_s > self._stall_s:
                # Its Swap or Installed was lost with a connection: it is asked to join again, and proves what it has.
                found.append((worker, f"no installed weights for {stuck_s:.0f} s after its swap"))
        return found

    def pick(self, role: str, fits: Callable[[Worker], bool], prefetch: bool) -> Worker | None:
        """Return the worker for the next task, by its want, then by fewest tasks done."""
        # Without the second, new workers stay idle for ever where work is short.
        ready = [worker for worker in self.of(role) if worker.is_working and fits(worker)]
        takers = [worker for worker in ready if worker.free > 0]
        if not takers and prefetch:
            takers = [worker for worker in ready if worker.takes_runs and worker.free == 0]
        return max(takers, key=lambda worker: (worker.want, -worker.tasks_done), default=None)

    def supply(self, rows_per_item: int = 1) -> Supply:
        """Return what works now; a rollout that swaps works again soon."""
        rollouts = sum(worker.phase != "loading" and not worker.is_leaving for worker in self.of("rollout"))
        scorers = [worker for worker in self.of("scorer") if worker.is_working]
        # An item is at a scorer from the lease to the result, also while its rows wait for a seat: so it is the room
        # that counts, in items. Of an engine that takes runs, the seats are those of one item.
        slots = [each.room / (each.seats if each.takes_runs else rows_per_item) for each in scorers]
        return Supply(rollouts, sum(slots))

    def revocable(self, role: str) -> Lease | None:
        """Return the newest lease that waits for a seat while another worker has empty ones for it."""
        working = (worker for worker in self.of(role) if worker.is_working and worker.free > 0)
        idle = max(working, key=lambda each: each.seated - each.taken, default=None)
        if idle is None or (empty := idle.seated - idle.taken) <= 0:
            return None
        found = [lease for worker in self.of(role) if worker is not idle for lease in worker.behind()]
        fitting = (each for each in found if not each.revoking and (not idle.leases or each.left <= empty))
        return max(fitting, key=lambda each: each.since_s, default=None)
