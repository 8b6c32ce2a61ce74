"""The broker's part of the status document: building it."""

import os
from typing import TYPE_CHECKING

from prefixrl.common.status import Document, FilterStatus, GroupCounts, WorkerStatus

if TYPE_CHECKING:
    from prefixrl.learner.broker.server import Broker


def document(broker: "Broker", now_s: float) -> Document:
    """The state of a run now."""
    ledger, counts, rate = broker.ledger, broker.ledger.counts, broker.ledger.pass_rate
    trains_nothing = ledger.window.iterations == 0
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
        total_iterations=0
        if trains_nothing
        else broker.config.iterations_in_all(broker.run.problems),
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
        row_errors=dict(counts.row_errors),
        rows_left_out=dict(counts.rows_left_out),
        filter=FilterStatus(rate.passed, rate.judged) if rate and rate.judged else None,
        queues=ledger.states(),
        window=ledger.window.max_staleness,
        age_histogram={str(age): count for age, count in sorted(counts.age_histogram.items())},
        token_age_histogram={
            str(age): count for age, count in sorted(counts.token_age_histogram.items())
        },
        crossed_fraction=counts.rows_crossed / max(1, counts.rows),
        workers=workers,
        busy_fraction=busy,
        losses=dict(broker.dispatcher.losses),
        truncated_fraction=broker.batches.truncated_fraction,
        waiting_for=broker.batches.waiting_for,
        malformed_messages=broker.malformed,
        journal_bytes=broker.journal.offset_bytes,
        up_s=now_s - broker.started_s,
        evaluations=broker.dispatcher.evaluations.counts(),
        endpoint=broker.spending.total(),
        completions=dict(broker.dispatcher.completions),
    )
