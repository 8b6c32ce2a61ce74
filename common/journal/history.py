"""The history of a run, checked from its journal alone: each group ends once, in order, in the window. Pure."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from prefixrl.common.journal import records as journaled

_STATES = {"queued": "issued", "scored": "scored", "spare": "scored", "batched": "trained"}
MOST_FAULTS = 100
"""Largest number of faults in words; a broken history has many."""


@dataclass
class History:
    """States and faults of all groups, record by record."""

    most_staleness: int
    state: dict[int, str] = field(default_factory=dict)
    """By group: issued, scored, trained, or the state in which it ended."""
    batches: list[tuple[int, ...]] = field(default_factory=list)
    """Groups by iteration."""
    rows: int = 0
    """Rows that were trained."""
    ages: Counter[int] = field(default_factory=Counter)
    """Trained groups by the age of their oldest token."""
    faults: list[str] = field(default_factory=list)
    _versions: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Version and rows of groups that wait for a batch."""

    def follow_record(self, record: journaled.JournalRecord) -> None:
        """Follow one record."""
        match record:
            case journaled.GroupIssued(seq):
                self._expect(seq, (None,), "is issued")
                self.state[seq] = "issued"
            case journaled.GroupScored(group):
                seq = group.prefixes.seq
                self._expect(seq, ("issued",), "is scored")
                self.state[seq] = "scored"
                self._versions[seq] = (group.version, len(group.prefixes.rows))
            case journaled.GroupEnded(seq=seq, state=state):
                self._expect(seq, ("issued", "scored"), f"ends as {state}")
                self.state[seq] = state
                self._versions.pop(seq, None)
            case journaled.BatchFormed(iteration, seqs):
                self._batch(iteration, seqs)
            case journaled.SegmentStart(ledger=ledger):
                self._compare(ledger)

    def _compare(self, ledger: journaled.LedgerState) -> None:
        """Record differences between the start of a segment and the records before it."""
        counts = self.counts
        totals = ledger.totals
        stated = {name: getattr(totals, name) for name in ("filtered", "failed", "expired")}
        stated |= Counter(_STATES[group.state] for group in ledger.live)
        stated["trained"] = stated.get("trained", 0) + totals.trained
        for name in sorted(stated.keys() | counts.keys()):
            if (number := stated.get(name, 0)) != counts[name]:
                self._fault(
                    f"a segment begins with {number} groups {name}, the records before it have {counts[name]}"
                )
        for group in ledger.live:
            if self.state.get(group.seq) != _STATES[group.state]:
                self._fault(
                    f"a segment begins with group {group.seq} {group.state}, but it is {self.state.get(group.seq)}"
                )

    def _batch(self, iteration: int, seqs: tuple[int, ...]) -> None:
        if iteration != len(self.batches):
            self._fault(f"the batch of iteration {iteration} follows {len(self.batches)} others")
        self.batches.append(seqs)
        for seq in seqs:
            self._expect(seq, ("scored",), f"is trained in iteration {iteration}")
            self.state[seq] = "trained"
            version, rows = self._versions.pop(seq, (iteration, 0))
            age = iteration - version
            if not 0 <= age <= self.most_staleness:
                self._fault(
                    f"group {seq} has age {age} in iteration {iteration}, the window is {self.most_staleness}"
                )
            self.ages[age] += 1
            self.rows += rows

    def _expect(self, seq: int, states: tuple[str | None, ...], event: str) -> None:
        if (state := self.state.get(seq)) not in states:
            self._fault(f"group {seq} {event}, but it is {state or 'not issued'}")

    def _fault(self, text: str) -> None:
        if len(self.faults) < MOST_FAULTS:
            self.faults.append(text)

    @property
    def counts(self) -> Counter[str]:
        """Number of groups by state."""
        return Counter(self.state.values())

    def finished_faults(self) -> list[str]:
        """Return the faults of a run that is finished: nothing may be under way."""
        under_way = sorted(
            seq for seq, state in self.state.items() if state in ("issued", "scored")
        )
        if not under_way:
            return self.faults
        seqs = ", ".join(map(str, under_way[:5]))
        return [*self.faults, f"{len(under_way)} groups neither trained nor ended: {seqs}"]


def history(records: Iterable[journaled.JournalRecord], most_staleness: int) -> History:
    """Follow all records of a journal."""
    run_history = History(most_staleness)
    for record in records:
        run_history.follow_record(record)
    return run_history
