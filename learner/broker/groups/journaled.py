"""The part of the ledger that the journal rebuilds: groups, batches, counts. Pure.

    record ──apply──▶ JournaledState ──state──▶ LedgerState, the start of a segment ──restore──▶ the same JournaledState

Whoever applies the records of a journal from its beginning, and whoever restores the start of a segment and applies
the records after it, hold the same.
"""

import copy
from collections import deque

from prefixrl.common.journal.records import (
    BatchFormed,
    GroupEnded,
    GroupIssued,
    GroupOutcome,
    GroupScored,
    GroupTotals,
    LedgerState,
    LiveGroup,
    Record,
    tally,
)
from prefixrl.common.wire.messages.groups import ScoredGroup
from prefixrl.learner.broker.groups.filtering import (
    AccuracyFilter,
    FailureShare,
    PassRate,
    spare_cause,
)
from prefixrl.learner.broker.groups.outcomes import Outcomes
from prefixrl.learner.broker.groups.states import Group, LedgerLimits, LiveGroups, PromptSource
from prefixrl.learner.broker.groups.window import Window

FEWEST_FAILURES_SEEN = 64
"""Fewest groups over which the share of failures is judged; two batches if these are more."""
SURPLUS = "surplus"
"""Cause of a surplus group of over-sampling; its prompt is requeued, and no failure is counted."""


class JournaledState:
    """Live groups of a run and the counts of ended ones."""

    def __init__(
        self,
        window: Window,
        limits: LedgerLimits,
        prompts: PromptSource,
        accuracy_filter: AccuracyFilter | None,
        outcomes: Outcomes | None = None,
    ) -> None:
        self.window = window
        self.counts = GroupTotals()
        self.completed = 0
        """Number of iterations that every rank has finished; also the newest version."""
        self.batches: dict[int, tuple[int, ...]] = {}
        """Recorded iterations that are not trained yet."""
        self.pass_rate = PassRate(accuracy_filter) if accuracy_filter else None
        fewest = max(FEWEST_FAILURES_SEEN, 2 * window.batch_groups)
        self.failures = FailureShare(fewest, limits.max_failure_share)
        self.outcomes = outcomes
        """None where every prompt of the order is asked."""
        self._filter = accuracy_filter
        self._prompts = prompts
        self._live = LiveGroups()
        self._requeued = deque[tuple[int, int]]()
        self._next_seq = 0
        self._next_prompt = 0

    def trained(self, iteration: int) -> None:
        """Note that every rank finished `iteration`; ValueError if no batch of it was handed out."""
        if iteration < self.completed:
            return
        if iteration != self.completed or iteration not in self.batches:
            raise ValueError(
                f"iteration {iteration} cannot be trained: no batch of it was handed out"
            )
        for seq in self.batches.pop(iteration):
            group = self._live.take_out(seq)
            assert group.result is not None and group.version is not None, (
                "what is trained was scored"
            )
            assert iteration - group.version <= self.window.max_staleness
            self.counts.note_trained(group.result, iteration - group.version, iteration)
        self.completed += 1

    def apply(self, record: Record) -> None:
        """Apply one record."""
        match record:
            case GroupIssued(seq, prompt, requeues):
                self._issue_group(Group(seq, prompt, requeues))
            case GroupScored(scored):
                self._accept_result(scored)
            case BatchFormed(iteration, seqs):
                self.batches[iteration] = seqs
                groups = [self._live[seq] for seq in seqs]
                for group in groups:
                    self._live.move(group, "batched", group.version)
                if self.outcomes:
                    self.outcomes.form_batch(iteration, list(map(self._trained_outcome, groups)))
            case GroupEnded():
                self._end_group(record)

    def _issue_group(self, group: Group) -> None:
        # A position below the next new one was issued before: this is its requeue.
        if group.prompt < self._next_prompt:
            self._requeued.remove((group.prompt, group.requeues))
        elif self.outcomes:
            self.outcomes.passed_over += group.prompt - self._next_prompt
        self._live.add(group)
        self._next_seq = max(self._next_seq, group.seq + 1)
        self._next_prompt = max(self._next_prompt, group.prompt + 1)
        self.counts.issued += 1

    def _accept_result(self, scored: ScoredGroup) -> None:
        group = self._live[scored.prefixes.seq]
        is_spare = spare_cause(scored, self._filter) is not None
        self._live.move(group, "spare" if is_spare else "scored", scored.version)
        group.result = scored
        # An accepted group may have failed rows: their part counts as failed.
        faults = scored.faults
        self.counts.note_scored(scored, faults)
        self.failures.count_groups(sum(faults.values()) / len(scored.texts) if faults else 0.0)
        if self.pass_rate:
            self.pass_rate.count_groups(not is_spare)
            source = self._prompts.source(group.prompt)
            tally(self.counts.passed_by_source, source, int(not is_spare))

    def _end_group(self, record: GroupEnded) -> None:
        group, cause = self._live.take_out(record.seq), record.cause
        self.counts.note_ended(record.state, cause, record.faults)
        if self.outcomes and record.judged:
            self.outcomes.ended.append(self._outcome(group, record.right, record.judged))
        # A surplus group costs its prompt no requeue: nothing went wrong with it.
        if record.requeued:
            self._requeued.append((group.prompt, group.requeues + (cause != SURPLUS)))
        # A spare was counted when it was scored, and a surplus group did not fail.
        if is_new := cause != SURPLUS and group.state != "spare":
            self.failures.count_groups(float(record.state != "filtered"))
        if self.pass_rate and record.state == "filtered":
            self.pass_rate.count_groups(*[False] * is_new)
            tally(self.counts.filtered_by_source, self._prompts.source(group.prompt))

    def _trained_outcome(self, group: Group) -> GroupOutcome:
        assert group.result is not None, "what is batched was scored"
        outcomes = group.result.outcomes
        return self._outcome(group, sum(outcomes), len(outcomes))

    def _outcome(self, group: Group, right: float, judged: int) -> GroupOutcome:
        problem, source = self._prompts.problem(group.prompt), self._prompts.source(group.prompt)
        return GroupOutcome(group.seq, problem, source, right, judged)

    def state(self) -> LedgerState:
        """Return the state that the records give, without leases and queues."""
        return LedgerState(
            completed=self.completed,
            next_seq=self._next_seq,
            next_prompt=self._next_prompt,
            requeued=tuple(self._requeued),
            batches=dict(self.batches),
            live=tuple(map(_live_group, self._live.values())),
            totals=copy.deepcopy(self.counts),
            failures=tuple(self.failures.newest),
            passed=tuple(self.pass_rate.newest) if self.pass_rate else (),
            outcomes=self.outcomes.state() if self.outcomes else None,
        )

    def restore(self, state: LedgerState) -> None:
        """Restore a state; call this before any record is applied."""
        assert not self.counts.issued, "a segment is restored first"
        self.completed, self.batches = state.completed, dict(state.batches)
        self._next_seq, self._next_prompt = state.next_seq, state.next_prompt
        self._requeued.extend(state.requeued)
        self.counts = copy.deepcopy(state.totals)
        self.failures.count_groups(*state.failures)
        if self.pass_rate:
            self.pass_rate.count_groups(*state.passed)
        if self.outcomes and state.outcomes:
            self.outcomes.restore(state.outcomes)
        # Groups without a result were under way: they are sampled again, and have no version yet.
        for record in state.live:
            version = record.result.version if record.result else None
            self._live.add(
                Group(
                    record.seq,
                    record.prompt,
                    record.requeues,
                    record.state,
                    version,
                    result=record.result,
                )
            )


def _live_group(group: Group) -> LiveGroup:
    # Leases and prefixes are lost with a broker: groups without scores are sampled again.
    match group.state:
        case "spare" | "scored" | "batched" as state:
            return LiveGroup(group.seq, group.prompt, group.requeues, state, group.result)
        case _:
            return LiveGroup(group.seq, group.prompt, group.requeues)
