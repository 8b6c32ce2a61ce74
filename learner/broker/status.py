"""What an operator sees of a run: one JSON-able document, the same for the live view, `prefixrl status` and `summary.json`."""

import os
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from prefixrl.learner.broker.server import Broker


class WorkerStatus(msgspec.Struct, frozen=True):
    """One connected worker."""

    name: str
    role: str
    host: str
    pid: int
    phase: str
    engine: str
    version: int
    slots: int
    leases: int
    busy_fraction: float | None
    tasks_done: int
    silent_s: float
    engine_mismatch: float
    first_lease_after_ready_s: float | None
    state: str


class GroupCounts(msgspec.Struct, frozen=True):
    """Where every group went: issued is the sum of the others but duplicates_ignored."""

    issued: int
    trained: int
    filtered: int
    failed: int
    expired: int
    outstanding: int
    duplicates_ignored: int


class Document(msgspec.Struct, frozen=True):
    """State of a run."""

    run_id: str
    directory: str
    broker_pid: int
    iteration: int
    """Completed iterations, which is also the newest version."""
    total_iterations: int
    groups: GroupCounts
    causes: dict[str, int]
    queues: dict[str, int]
    """Live groups by state."""
    window: int
    age_histogram: dict[str, int]
    """Trained groups by age in versions."""
    workers: list[WorkerStatus]
    busy_fraction: dict[str, float]
    """Mean over the workers of a role."""
    losses: dict[str, int]
    waiting_for: str
    malformed_messages: int
    journal_bytes: int
    up_s: float


def document(broker: "Broker", now_s: float) -> Document:
    """The state of a run now."""
    ledger, counts = broker.ledger, broker.ledger.counts
    workers = [
        WorkerStatus(
            worker.name,
            worker.role,
            worker.host,
            worker.pid,
            worker.phase,
            worker.engine,
            worker.version,
            worker.slots,
            len(worker.leases),
            worker.busy_fraction(now_s),
            worker.tasks_done,
            now_s - worker.heard_s,
            worker.engine_mismatch,
            worker.first_lease_after_ready_s,
            worker.state,
        )
        for worker in broker.dispatcher.registry.by_identity.values()
    ]
    busy: dict[str, float] = {}
    for role in ("rollout", "scorer"):
        shares = [
            each.busy_fraction
            for each in workers
            if each.role == role and each.busy_fraction is not None
        ]
        if shares:
            busy[role] = sum(shares) / len(shares)
    return Document(
        run_id=broker.run.run_id,
        directory=broker.config.directory,
        broker_pid=os.getpid(),
        iteration=ledger.completed,
        total_iterations=broker.config.iterations_in_all(broker.run.problems),
        groups=GroupCounts(
            counts.issued,
            counts.trained,
            counts.filtered,
            counts.failed,
            counts.expired,
            ledger.outstanding,
            counts.duplicates_ignored,
        ),
        causes=dict(counts.causes),
        queues=ledger.states(),
        window=ledger.window.max_staleness,
        age_histogram={str(age): count for age, count in sorted(counts.age_histogram.items())},
        workers=workers,
        busy_fraction=busy,
        losses=dict(broker.dispatcher.losses),
        waiting_for=broker.batches.waiting_for,
        malformed_messages=broker.malformed,
        journal_bytes=broker.journal.offset_bytes,
        up_s=now_s - broker.started_s,
    )
