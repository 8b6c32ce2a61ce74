"""The workers of one role in the order in which they get tasks. Pure.

    a worker changes ─▶ changed ─refresh─▶ a heap per kind: most empty seats, most free rows, fewest tasks done first
                                        ├▶ crowded: workers with tasks that wait for a seat
                                        └▶ offers: seats and room of those that work

A worker notes itself as changed (`Worker.__setattr__`), so a task costs the same with three workers and a thousand.
"""

import heapq
from collections.abc import Container
from typing import NamedTuple

from prefixrl.learner.broker.workers.workers import Phase, Worker

SPARE_ENTRIES = 64
"""Outdated entries, beyond one per worker, after which the heaps are rebuilt."""


class Kind(NamedTuple):
    """The facts about a worker that a queue decides by."""

    phase: Phase
    version: int
    weights_digest: str
    takes_runs: bool


def kind_of(worker: Worker) -> Kind:
    """Return the kind of a worker."""
    return Kind(worker.phase, worker.version, worker.weights_digest, worker.takes_runs)


class Entry(NamedTuple):
    """A worker's place; the smallest is first. Only the newest entry of a worker is valid."""

    only_prefetches: bool
    less_seats: int
    less_free: int
    tasks_done: int
    number: int
    """Decides between equal places: the older entry is first."""
    worker: Worker


class TaskOrder:
    """The workers of one role, in their order."""

    def __init__(self, last_taking: Phase, last_offering: Phase, prefetches: bool) -> None:
        """Give tasks from READY to one phase, count seats from READY to another.

        `prefetches`: also give one task to workers without a free row, after all others.
        """
        self._last_taking = last_taking
        self._last_offering = last_offering
        self._prefetches = prefetches
        self.changed: dict[bytes, Worker] = {}
        """Workers whose place may have changed."""
        self.crowded: dict[bytes, Worker] = {}
        """Workers with tasks that wait for a seat."""
        self.offers: dict[bytes, tuple[int, int, bool]] = {}
        """Seats, room and whether runs are taken, of the workers that work."""
        self.has_new_offers = True
        """True if these changed since the reader of this flag set it to False."""
        self._heaps: dict[Kind, list[Entry]] = {}
        self._newest: dict[bytes, tuple[Kind, Entry]] = {}
        self._numbers = self._entries = 0

    def remove(self, worker: Worker) -> None:
        """Forget a worker."""
        worker.changed = None
        self.changed.pop(worker.identity, None)
        self.crowded.pop(worker.identity, None)
        self._newest.pop(worker.identity, None)
        self.has_new_offers |= self.offers.pop(worker.identity, None) is not None

    def best(self, besides: Container[Kind] = ()) -> Worker | None:
        """Return the worker for the next task, of other kinds than `besides`."""
        self.refresh()
        tops = []
        for kind in list(self._heaps):
            heap = self._heaps[kind]
            while heap and self._newest.get(heap[0].worker.identity) != (kind, heap[0]):
                heapq.heappop(heap)
                self._entries -= 1
            if not heap:
                del self._heaps[kind]
            elif kind not in besides:
                tops.append(heap[0])
        return min(tops).worker if tops else None

    def refresh(self) -> None:
        """Move the changed workers to their places."""
        for worker in self.changed.values():
            self._place(worker)
        self.changed.clear()
        if self._entries > 2 * len(self._newest) + SPARE_ENTRIES:
            self._heaps, self._entries = {}, len(self._newest)
            for kind, entry in sorted(self._newest.values(), key=lambda each: each[1]):
                self._heaps.setdefault(kind, []).append(entry)  # sorted, so a heap

    def _place(self, worker: Worker) -> None:
        identity, is_here = worker.identity, not worker.is_leaving
        taken_rows, seated, free = worker.taken_rows, worker.seated, worker.free
        if taken_rows > seated:
            self.crowded[identity] = worker
        else:
            self.crowded.pop(identity, None)
        offer = (
            (worker.seats, worker.room, worker.takes_runs)
            if is_here and Phase.READY <= worker.phase <= self._last_offering
            else None
        )
        # The registry adds seats and room up again only after such a change.
        if self.offers.get(identity) != offer:
            self.has_new_offers = True
            if offer:
                self.offers[identity] = offer
            else:
                del self.offers[identity]
        newest = self._newest.get(identity)
        may_prefetch = self._prefetches and worker.takes_runs and free == 0
        may_take = is_here and Phase.READY <= worker.phase <= self._last_taking
        # Without a newest entry the worker's entries are outdated, and `best` skips them.
        if not may_take or not (free > 0 or may_prefetch):
            self._newest.pop(identity, None)
            return
        kind = kind_of(worker)
        place = (free <= 0, min(0, taken_rows - seated), -free, worker.tasks_done)
        # An unchanged place keeps its entry, and with it its turn among equal workers.
        if newest is None or newest[0] != kind or newest[1][:4] != place:
            self._numbers += 1
            entry = Entry(*place, self._numbers, worker)
            self._newest[identity] = kind, entry
            heapq.heappush(self._heaps.setdefault(kind, []), entry)
            self._entries += 1
