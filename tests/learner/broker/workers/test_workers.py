"""Credit, prefetching, and when a worker is given up."""

from typing import Literal

import msgspec
import pytest

from prefixrl.common.wire.messages.worker import Activity, Heartbeat, Hello
from prefixrl.learner.broker.groups.states import ScoreItem
from prefixrl.learner.broker.workers.registry import Registry
from prefixrl.learner.broker.workers.task_order import kind_of
from prefixrl.learner.broker.workers.workers import READY_S, Lease, Phase, Worker
from support.broker.dispatch_desk import hello

ITEM = ScoreItem((), 0, "", 0.0)


def lease(task: str, since_s: float = 0.0) -> Lease:
    return Lease(task, "train", ITEM, since_s, since_s)


def registry_of(*slots: int, role: Literal["rollout", "scorer"] = "scorer") -> Registry:
    registry = Registry(silence_s=10.0, stall_s=100.0)
    for number, count in enumerate(slots):
        worker = registry.add(bytes([number]), hello(role), 0.0)
        worker.phase, worker.seats, worker.room = Phase.READY, 1, count
    return registry


def beat(
    worker: Worker,
    progress: int,
    busy_row_s: float,
    state: str,
    now_s: float,
    activity: Activity = "working",
) -> None:
    sent = Heartbeat(
        progress=progress, busy_row_s=busy_row_s, leases=(), state=state, activity=activity
    )
    worker.heartbeat(sent, now_s)


def workers(registry: Registry) -> list[Worker]:
    return list(registry.by_identity.values())


def test_names_count_per_role_and_are_never_used_again() -> None:
    registry = Registry(1.0, 1.0)
    roles: tuple[Literal["rollout", "scorer"], ...] = ("rollout", "scorer", "rollout")
    for number, role in enumerate(roles):
        registry.add(bytes([number]), hello(role), 0.0)
    del registry.by_identity[bytes([2])]
    registry.add(b"later", hello("rollout"), 0.0)
    assert [each.name for each in workers(registry)] == ["rollout-0", "scorer-0", "rollout-2"]


def test_many_workers_send_their_heartbeats_less_often_and_never_too_rarely() -> None:
    registry = Registry(silence_s=10.0, stall_s=100.0, beat_s=1.0)
    intervals = [
        registry.add(str(number).encode(), hello("scorer"), 0.0).beat_s for number in range(600)
    ]
    assert set(intervals[:101]) == {1.0} and intervals[200] == 2.0
    assert intervals == sorted(intervals) and intervals[-1] == 2.5, (
        "four of them within the silence"
    )


def numbered(number: int, pid: int = 1, host: str = "h") -> Hello:
    return msgspec.structs.replace(hello("scorer"), number=number, pid=pid, host=host)


def test_a_worker_has_the_number_that_it_wants_and_nobody_else_is_given_it() -> None:
    registry = Registry(1.0, 1.0)
    for identity, each in (
        (b"a", numbered(1)),
        (b"b", hello("scorer")),
        (b"c", hello("scorer")),
        (b"d", numbered(1)),
    ):
        registry.add(identity, each, 0.0)
    assert [each.name for each in workers(registry)] == [
        "scorer-1",
        "scorer-0",
        "scorer-2",
        "scorer-3",
    ]
    del registry.by_identity[b"a"]
    registry.add(b"e", hello("scorer"), 0.0)
    registry.add(b"f", numbered(1), 0.0)
    assert [each.name for each in workers(registry)][-2:] == ["scorer-4", "scorer-1"]


def test_only_a_silent_process_of_the_same_host_has_a_successor() -> None:
    registry = Registry(10.0, 10.0, beat_s=1.0)
    first = registry.add(b"a", numbered(0), 0.0)
    assert registry.predecessor(numbered(0, pid=2), 0.9) is None, "it may live"
    assert registry.predecessor(numbered(0, pid=2, host="other"), 5.0) is None
    assert registry.predecessor(numbered(0, pid=1), 5.0) is None, "it is the same"
    assert registry.predecessor(numbered(1, pid=2), 5.0) is None
    assert registry.predecessor(numbered(0, pid=2), 5.0) is first


def test_the_task_goes_to_the_worker_with_most_free_rows() -> None:
    registry = registry_of(2, 4, 3, role="rollout")  # nothing is prefetched for a rollout
    given = []
    for number in range(9):
        worker = registry.pick("rollout")
        assert worker is not None and worker.free == max(each.free for each in workers(registry))
        worker.add(lease(f"t{number}"), 0.0)
        given.append(worker.name)
    assert given[0] == "rollout-1"
    assert registry.pick("rollout") is None


def test_one_task_per_worker_is_prefetched_and_only_when_no_row_is_free_anywhere() -> None:
    registry = registry_of(1, 1)
    first, second = workers(registry)
    first.add(lease("a"), 0.0)
    assert registry.pick("scorer") is second
    second.add(lease("b"), 0.0)
    for number in range(2):
        worker = registry.pick("scorer")
        assert worker is not None and worker.free == 0
        worker.add(lease(f"ahead-{number}"), 0.0)
    assert registry.pick("scorer") is None


def test_only_ready_workers_that_fit_are_picked() -> None:
    registry = registry_of(1, 1)
    first, second = workers(registry)
    first.phase = Phase.SWAPPING
    second.version = 3
    assert registry.pick("scorer", {kind_of(second)}) is None
    assert registry.pick("scorer", {kind_of(first)}) is second
    assert registry.pick("rollout") is None


def test_the_youngest_prefetched_lease_is_named_once() -> None:
    registry = registry_of(1, 1)
    for number, worker in enumerate(workers(registry)):
        worker.add(lease(f"running-{number}", 5.0), 5.0)
        worker.add(lease(f"ahead-{number}", 6.0 + number), 6.0)
    idle = registry.add(b"idle", hello("scorer"), 0.0)
    idle.phase, idle.seats, idle.room = Phase.READY, 1, 1
    _, actual = registry.revocable("scorer") or pytest.fail("there is one")
    assert actual.task == "ahead-1"
    actual.revoking = True
    _, actual = registry.revocable("scorer") or pytest.fail("there is one")
    assert actual.task == "ahead-0"
    actual.revoking = True
    assert registry.revocable("scorer") is None


def test_a_silent_worker_is_lost_with_the_reason() -> None:
    registry = registry_of(1)
    (worker,) = workers(registry)
    assert registry.lost(10.0) == []
    ((actual, reason),) = registry.lost(10.1)
    assert actual is worker and reason == "silent for 10.1 s"


def test_a_worker_that_talks_but_makes_no_progress_on_a_lease_is_lost() -> None:
    registry = registry_of(1)
    (worker,) = workers(registry)
    beat(worker, 5, 0.0, "", 50.0)
    worker.add(lease("t1"), 60.0)
    for now_s in (100.0, 150.0, 160.0):
        worker.heard_s = now_s
        beat(worker, 5, 0.0, "", now_s)
        assert registry.lost(now_s) == [], "the clock starts with the lease"
    worker.heard_s = 160.5
    ((_, reason),) = registry.lost(160.5)
    assert reason == "no progress for 100 s on t1"


def test_progress_renews_a_lease_however_old_it_is() -> None:
    registry = registry_of(1)
    (worker,) = workers(registry)
    worker.add(lease("t1"), 0.0)
    for step in range(100):
        worker.heard_s = step * 90.0
        beat(worker, step, 0.0, "", step * 90.0)
        assert registry.lost(step * 90.0) == []


def test_a_rollout_that_never_reports_its_installation_is_lost() -> None:
    registry = registry_of(1)
    (worker,) = workers(registry)
    worker.phase, worker.progressed_s, worker.heard_s = Phase.SWAPPING, 60.0, 160.5
    assert registry.lost(160.0) == []
    ((_, reason),) = registry.lost(160.5)
    assert reason == "no installed weights for 100 s after its swap"


def test_an_idle_worker_is_never_stuck() -> None:
    registry = registry_of(1)
    (worker,) = workers(registry)
    worker.heard_s = 1e6
    assert registry.lost(1e6) == []


def test_the_busy_share_counts_from_the_first_lease() -> None:
    registry = registry_of(2)
    (worker,) = workers(registry)
    worker.seats = 2
    assert worker.busy_fraction is None
    worker.ready_s = 7.0
    worker.add(lease("t1"), 10.0)
    assert worker.first_lease_after_ready_s == 3.0
    assert worker.busy_fraction is None
    beat(worker, 1, 6.0, "", 16.0)
    assert worker.busy_fraction == 0.5
    beat(worker, 1, 99.0, "", 16.0)
    assert worker.busy_fraction == 1.0


def test_a_worker_that_works_without_a_ready_is_asked_again_and_one_that_loads_is_not() -> None:
    worker = Registry(1e9, 1e9).add(b"w", hello("scorer"), 0.0)

    def asked(activity: Activity, now_s: float) -> bool:
        beat(worker, 0, 0.0, "", now_s, activity)
        return worker.lost_its_ready(now_s)

    for now_s in range(0, 5000, 100):
        assert not asked("loading", now_s)
        assert not asked("waiting", now_s)
    assert not asked("working", 6000.0), "its Ready may be on the way"
    assert not asked("failing", 6000.0 + READY_S)
    assert asked("working", 6000.5 + READY_S)
    assert not asked("working", 6001.0 + READY_S), "it has not had the time to answer"
    assert asked("working", 6001.0 + 2 * READY_S)
    worker.has_said_ready = True
    assert not asked("working", 9000.0)
