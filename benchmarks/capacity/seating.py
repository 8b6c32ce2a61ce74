"""Workers of a simulated run, their seats, and the order in which they get tasks."""

import heapq
import math
from collections import deque
from dataclasses import dataclass, field
from itertools import count

from benchmarks.capacity.system import Workers


@dataclass(eq=False)
class Task:
    """A group at a worker."""

    version: int
    left: int
    """Rows that have not ended."""
    since_s: float
    """Time at which it was given."""
    seated_s: float | None = None
    """Time at which its first row got a seat."""
    judged_s: float = 0.0
    """Time of its last verdict."""


@dataclass(eq=False)
class Station:
    """One worker."""

    is_rollout: bool
    of: Workers
    left: int = 0
    """Rows of its tasks that have not ended."""
    seated: int = 0
    tasks: int = 0
    done: int = 0
    version: int = 0
    offered: int = 0
    """Newest version that it has in memory."""
    phase: str = "ready"
    queue: deque[Task] = field(default_factory=deque)
    """The task of each row that waits for a seat."""
    mail: list[Task] = field(default_factory=list)
    """Tasks that came while the engine works."""
    judging: list[Task] = field(default_factory=list)
    """Tasks whose answers ended, and whose verdicts were not collected."""
    looked_s: float = 0.0
    looks_s: float = math.inf
    """Time of its next look at mail and verdicts that is due; infinite for none."""
    place: int = 0

    def next_look_s(self, from_s: float) -> float:
        """Return the first time from `from_s` on at which it hears messages, if no row ends before."""
        step_s = self.of.look_s
        if not self.seated or not step_s:
            return from_s
        return self.looked_s + step_s * max(0, math.ceil((from_s - self.looked_s) / step_s))


class Ranking:
    """Workers with free rows, by empty seats, then free rows, then fewest tasks done."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, int, Station]] = []
        self._numbers = count(1)

    def put(self, worker: Station) -> None:
        """Give a worker its place, instead of an earlier one."""
        worker.place = 0
        if worker.phase == "ready" and worker.left < worker.of.room:
            worker.place = next(self._numbers)
            empty, free = max(0, worker.of.seats - worker.left), worker.of.room - worker.left
            heapq.heappush(self._heap, (-empty, -free, worker.done, worker.place, worker))

    def take(self) -> Station | None:
        """Take the first worker out."""
        while self._heap:
            *_, place, worker = heapq.heappop(self._heap)
            if place == worker.place:
                worker.place = 0
                return worker
        return None


class Meter:
    """The integral of a level over time."""

    def __init__(self) -> None:
        self._level, self._since_s, self._sum_s = 0, 0.0, 0.0

    def move(self, change: int, now_s: float) -> None:
        """Add to the level."""
        self._sum_s += self._level * (now_s - self._since_s)
        self._level, self._since_s = self._level + change, now_s

    def read_s(self, now_s: float) -> float:
        """Return the integral until now."""
        self.move(0, now_s)
        return self._sum_s
