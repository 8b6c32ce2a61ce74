"""The next worker, kept as workers change, is the one that a look at all of them finds."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from prefixrl.learner.broker.groups.admission import Supply
from prefixrl.learner.broker.groups.states import ScoreItem
from prefixrl.learner.broker.workers.registry import Registry
from prefixrl.learner.broker.workers.task_order import Kind, kind_of
from prefixrl.learner.broker.workers.workers import Lease, Phase, Worker
from support.broker.dispatch_desk import hello

ITEM = ScoreItem((), 0, "", 0.0)
ROWS = 2
Place = tuple[bool, tuple[int, int], int]


def slow_places(registry: Registry, role: str, besides: set[Kind]) -> list[Place]:
    """Those of all workers that may get the next task."""
    takes = (Phase.READY, Phase.DRAINING) if role == "rollout" else (Phase.READY,)
    ready = [
        each for each in registry.workers_of(role) if each.phase in takes and not each.is_leaving
    ]
    fitting = [each for each in ready if kind_of(each) not in besides]
    takers = [each for each in fitting if each.free > 0]
    if not takers and role == "scorer":
        takers = [each for each in fitting if each.takes_runs and each.free == 0]
    return [place_of(each) for each in takers]


def place_of(worker: Worker) -> Place:
    return (
        worker.free > 0,
        max(0, worker.seated - worker.taken_rows),
        worker.free,
        -worker.tasks_done,
    )


def slow_supply(registry: Registry) -> Supply:
    rollouts = [
        each
        for each in registry.workers_of("rollout")
        if each.phase is not Phase.LOADING and not each.is_leaving
    ]
    scorers = [
        each
        for each in registry.workers_of("scorer")
        if each.phase is Phase.READY and not each.is_leaving
    ]
    return Supply(
        len(rollouts),
        sum(each.room / (each.seats if each.takes_runs else ROWS) for each in scorers),
    )


def slow_revocable(registry: Registry) -> set[float]:
    """Times of the newest leases that wait for a seat, of which one is to be revoked."""
    working = [
        each
        for each in registry.workers_of("scorer")
        if each.phase is Phase.READY and not each.is_leaving and each.free > 0
    ]
    empty = max((each.seated - each.taken_rows for each in working), default=0)
    idle = registry.pick("scorer")
    if empty <= 0 or idle is None:
        return set()
    behind = [
        lease
        for each in registry.workers_of("scorer")
        if each is not idle
        for lease in each.behind()
    ]
    fitting = [
        each.since_s
        for each in behind
        if not each.revoking and (not idle.leases or each.open_rows <= empty)
    ]
    return {max(fitting)} if fitting else set()


class TakersMachine(RuleBasedStateMachine):
    """Workers come, go, work and change in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.registry = Registry(10.0, 10.0)
        self.now_s, self.joined = 0.0, 0

    def any_worker(self, data: st.DataObject) -> Worker:
        return data.draw(st.sampled_from(list(self.registry.by_identity.values())))

    @rule(
        role=st.sampled_from(["rollout", "scorer"]),
        seats=st.integers(1, 3),
        behind=st.integers(0, 3),
        takes_runs=st.booleans(),
    )
    def a_worker_joins(self, role: str, seats: int, behind: int, takes_runs: bool) -> None:
        self.joined += 1
        identity = str(self.joined).encode()
        worker = self.registry.add(
            identity, hello("rollout" if role == "rollout" else "scorer"), self.now_s
        )
        worker.seats, worker.room, worker.takes_runs = (
            seats * ROWS,
            (seats + behind) * ROWS,
            takes_runs,
        )

    @precondition(lambda self: self.registry.by_identity)
    @rule(
        data=st.data(),
        phase=st.sampled_from([*Phase, Phase.READY, Phase.READY]),
    )
    def it_enters_a_phase(self, data: st.DataObject, phase: Phase) -> None:
        worker = self.any_worker(data)
        worker.phase = phase
        worker.version += phase is Phase.SWAPPING

    @precondition(lambda self: self.registry.by_identity)
    @rule(data=st.data(), rows=st.integers(1, 2 * ROWS))
    def it_gets_a_task(self, data: st.DataObject, rows: int) -> None:
        self.now_s += 1.0
        task = f"t{self.now_s}"
        self.any_worker(data).add(
            Lease(task, "train", ITEM, self.now_s, self.now_s, rows=rows, open_rows=rows),
            self.now_s,
        )

    @precondition(lambda self: any(each.leases for each in self.registry.by_identity.values()))
    @rule(data=st.data(), event=st.sampled_from(["finish", "drop", "row", "revoke"]))
    def a_task_goes_on(self, data: st.DataObject, event: str) -> None:
        worker = data.draw(
            st.sampled_from([each for each in self.registry.by_identity.values() if each.leases])
        )
        task = data.draw(st.sampled_from(list(worker.leases)))
        if event == "finish":
            worker.finish(task)
        elif event == "drop":
            worker.drop(task)
        elif event == "row":
            worker.rows_left(task, max(0, worker.leases[task].open_rows - 1))
        else:
            worker.leases[task].revoking = True

    @precondition(lambda self: self.registry.by_identity)
    @rule(data=st.data(), is_gone=st.booleans())
    def it_leaves(self, data: st.DataObject, is_gone: bool) -> None:
        worker = self.any_worker(data)
        worker.is_leaving = True
        if is_gone:
            self.registry.remove(worker)

    @invariant()
    def the_index_is_what_a_look_at_all_finds(self) -> None:
        for role in ("rollout", "scorer"):
            besides: set[Kind] = set()
            while worker := self.registry.pick(role, besides):
                assert place_of(worker) == max(slow_places(self.registry, role, besides))
                besides.add(kind_of(worker))
            assert not slow_places(self.registry, role, besides)
        result, slow = self.registry.supply(ROWS), slow_supply(self.registry)
        assert result.rollouts == slow.rollouts and result.scoring_slots == pytest.approx(
            slow.scoring_slots
        )
        revoked = self.registry.revocable("scorer")
        assert ({revoked[1].since_s} if revoked else set()) == slow_revocable(self.registry)


def test_the_next_worker_is_the_one_that_a_look_at_all_workers_finds() -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        TakersMachine,
        settings=settings(
            max_examples=100, stateful_step_count=40, deadline=None, derandomize=True, database=None
        ),
    )
