"""The status document, built from the parts of the broker; the usage of a served target."""

import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import msgspec

from prefixrl.common.config.foreign.files import read_json
from prefixrl.common.config.workers.served import OpenAIConfig
from prefixrl.common.errors import is_crowded, is_full
from prefixrl.common.host.memory_use import memory_now
from prefixrl.common.host.process import write_atomically
from prefixrl.common.journal.journal import Journal
from prefixrl.common.run.status import (
    USAGE_FILE,
    AdmissionStatus,
    DraftTotal,
    DrainedWorker,
    FilterStatus,
    GroupCounts,
    StatusDocument,
    UsageTotal,
    WorkerStatus,
    total_usage,
)
from prefixrl.common.wire.messages.fields import common_fields
from prefixrl.common.wire.messages.worker import MemoryUse, Usage
from prefixrl.learner.broker.batches import BatchAnswers
from prefixrl.learner.broker.workers.dispatch import Dispatcher
from prefixrl.learner.broker.workers.workers import Worker

SAVE_EVERY_S = 2.0
MOST_SCORERS = 256
"""Number of scorers counted one by one. Scorers that may be alive are always counted one by one."""
GONE_S = 24 * 3600.0
"""Silence after which a scorer counts as gone. If it came back later, it would be counted twice."""
GONE = "scorers that are gone"


class UsageFile:
    """Usage by scorer, kept in the run directory."""

    def __init__(self, directory: Path, section: OpenAIConfig) -> None:
        self._path, self.section = directory / USAGE_FILE, section
        self._by_scorer: dict[str, Usage] = {}
        if self._path.exists():
            self._by_scorer = read_json(self._path, dict[str, Usage])
        self._heard_s: dict[str, float] = {}
        """Time of the newest report of each scorer, the oldest first."""
        self._is_saved, self._saved_s = True, 0.0

    def note_usage(self, scorer: str, usage: Usage | None, now_s: float) -> None:
        """Store the count of a scorer; None: it uses no endpoint."""
        if usage is None:
            return
        self._heard_s.pop(scorer, None)
        self._heard_s[scorer] = now_s
        if usage != self._by_scorer.get(scorer):
            self._by_scorer[scorer] = usage
            self._is_saved = False
            self._fold(now_s)

    def _fold(self, now_s: float) -> None:
        for scorer in self._by_scorer.keys() - self._heard_s.keys() - {GONE}:
            self._heard_s[scorer] = now_s  # an earlier broker's, which may live
        while len(self._heard_s) > MOST_SCORERS:
            oldest = next(iter(self._heard_s))
            if now_s - self._heard_s[oldest] <= GONE_S and len(self._heard_s) <= 16 * MOST_SCORERS:
                return
            del self._heard_s[oldest]
            both = self._by_scorer.get(GONE, Usage()), self._by_scorer.pop(oldest)
            sums = {
                name: sum(getattr(each, name) for each in both) for name in Usage.__struct_fields__
            }
            self._by_scorer[GONE] = Usage(**sums)

    def save(self, now_s: float, at_once: bool = False) -> None:
        """Write new counts to the file, at most every few seconds."""
        if self._is_saved or not (at_once or now_s - self._saved_s > SAVE_EVERY_S):
            return
        self._saved_s = now_s
        try:
            write_atomically(self._path, msgspec.json.encode(self._by_scorer).decode())
        except OSError as error:
            if not (is_full(error) or is_crowded(error)):
                raise
            return  # the journal reports what is full; the counts are written later
        self._is_saved = True

    def total(self) -> UsageTotal | None:
        """Return the total; None where no scorer uses an endpoint."""
        return total_usage(self._by_scorer.values(), self.section) if self._by_scorer else None


_ROLES = ("rollout", "scorer")
_COUNTED = set(GroupCounts.__struct_fields__) - {"outstanding"}


class StatusSources(NamedTuple):
    """The parts of a broker that a status document is built from."""

    run_id: str
    directory: str
    dispatcher: Dispatcher
    batches: BatchAnswers
    usage_file: UsageFile
    journal: Journal
    started_s: float


def document(sources: StatusSources, malformed: int, now_s: float) -> StatusDocument:
    """Return the state of a run now; `malformed` counts refused messages."""
    dispatcher, batches, ledger = sources.dispatcher, sources.batches, sources.dispatcher.ledger
    counts, rate = ledger.counts, ledger.pass_rate
    trains_nothing = ledger.window.iterations == 0
    workers = [_worker(each, now_s) for each in dispatcher.registry.by_identity.values()]
    return StatusDocument(
        run_id=sources.run_id,
        directory=sources.directory,
        broker_pid=os.getpid(),
        iteration=ledger.completed,
        total_iterations=0 if trains_nothing else batches.total_iterations,
        groups=GroupCounts(
            outstanding=ledger.outstanding, **{name: getattr(counts, name) for name in _COUNTED}
        ),
        causes=dict(counts.causes),
        passed_by_source=dict(counts.passed_by_source),
        filtered_by_source=dict(counts.filtered_by_source),
        row_errors=dict(counts.row_errors),
        rows_left_out=dict(counts.rows_left_out),
        filter=FilterStatus(rate.passed, rate.judged) if rate and rate.judged else None,
        queues=ledger.states(),
        window=ledger.window.max_staleness,
        mean_age=counts.mean_age,
        admission=AdmissionStatus(
            rule=ledger.admission.rule,
            lead_groups=ledger.admission.lead,
            cap_groups=ledger.admission.cap,
            waited_s=ledger.admission.waited_s,
        ),
        age_histogram={str(age): count for age, count in sorted(counts.age_histogram.items())},
        token_age_histogram={
            str(age): count for age, count in sorted(counts.token_age_histogram.items())
        },
        crossed_fraction=counts.rows_crossed / max(1, counts.rows),
        workers=workers,
        busy_fraction=_busy_fractions(workers),
        waiting_rows={
            role: sum(each.waiting_rows for each in workers if each.role == role) for role in _ROLES
        },
        losses=dict(dispatcher.losses),
        truncated_fraction=batches.truncated_fraction,
        waiting_for=batches.waiting_for,
        learner_phase="" if trains_nothing else batches.phase,
        learner_waits_s=batches.waits_s(now_s),
        last_event=dispatcher.last_event,
        idle_s=now_s - max(dispatcher.event_s, sources.started_s),
        malformed_messages=malformed,
        journal_bytes=sources.journal.size_bytes,
        up_s=now_s - sources.started_s,
        evaluations=dispatcher.evaluations.counts(),
        endpoint=sources.usage_file.total(),
        drafts=_drafts(dispatcher, sources.usage_file.section),
        pools=dispatcher.ledger.outcomes.pools if dispatcher.ledger.outcomes else None,
        completions=dict(dispatcher.completions),
        is_halting=batches.is_halting,
        ending=batches.ending,
        memory=_memory(sources),
        drained=[DrainedWorker(host=host, pid=pid) for host, pid in dispatcher.registry.drained],
    )


def _drafts(dispatcher: Dispatcher, section: OpenAIConfig) -> DraftTotal | None:
    """Return the drafts of a run, with their cost; None where the adapter reads none."""
    if dispatcher.drafts is None:
        return None
    total = dispatcher.drafts.total
    cost = section.cost(total.prompt_tokens, total.completion_tokens)
    return msgspec.structs.replace(total, cost=cost if section.has_price else None)


def _memory(sources: StatusSources) -> dict[str, MemoryUse]:
    """Return the memory of each process that has reported it."""
    memory_by_process = {"broker": memory_now()}
    memory_by_process |= {
        f"rank-{rank}": memory for rank, memory in sorted(sources.batches.memory.items())
    }
    memory_by_process |= {
        worker.name: worker.memory for worker in sources.dispatcher.registry.by_identity.values()
    }
    return {name: memory for name, memory in memory_by_process.items() if memory is not None}


def _worker(worker: Worker, now_s: float) -> WorkerStatus:
    phase = "leaving" if worker.is_leaving else str(worker.phase)
    figures = {
        "phase": phase,
        "leases": len(worker.leases),
        "rows": worker.open_rows,
        "silent_s": now_s - worker.heard_s,
    }
    return WorkerStatus(**common_fields(WorkerStatus, worker) | figures)


def _busy_fractions(workers: Sequence[WorkerStatus]) -> dict[str, float]:
    """Return the mean busy fraction of each role that has worked."""
    fractions: dict[str, list[float]] = defaultdict(list)
    for worker in workers:
        if worker.busy_fraction is not None:
            fractions[worker.role].append(worker.busy_fraction)
    return {role: fmean(fractions[role]) for role in _ROLES if role in fractions}
