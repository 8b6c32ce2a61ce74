"""The ledger: what became of every group, and what may happen to it next. Pure: no sockets, no clock, no files.

    queued ─▶ sampling ─▶ sampled ─▶ scoring ─▶ scored ─▶ batched ─▶ trained
       ▲          │                     │ └─▶ filtered(cause)
       └──────────┴──── worker lost ────┘   before scored ─▶ failed(cause) | expired(cause), prompt requeued as a new group

Groups are issued, leased and delivered in *work items*: runs of groups that share one forward, so that a group's text depends
on its item and never on arrival or worker count. Results are taken group by group: the first complete result for a group wins,
whichever lease it came from; it is matched by what it carries (sequence number *and* prompt), never by a task name alone.

Every change that a restart must know is appended to `records`; the shell writes them down before it answers anyone.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from prefixrl.common.messages import GroupPrefixes, ScoredGroup
from prefixrl.common.records import Batched, Ended, GroupScored, Issued, Record
from prefixrl.learner.broker.filtering import AccuracyFilter, FailureShare, PassRate, Starved
from prefixrl.learner.broker.groups import (
    ACCEPTED,
    Counts,
    Group,
    PromptSource,
    SampleItem,
    ScoreItem,
    State,
)
from prefixrl.learner.broker.window import Choice, Wait, Window, choose

SURPLUS = "surplus"
"""Cause of a group that over-sampling had too many of; its prompt comes back, and no failure is counted against it."""
TRUNCATED = "every row cut by the length limit"
"""Cause of a group of which masking leaves nothing."""

FEWEST_FAILURES_SEEN = 64
"""Groups after which the share of failures means something."""


@dataclass(frozen=True)
class Limits:
    """How a run is cut into work and how often a failure is retried."""

    groups_per_item: int
    attempts: int
    requeues: int
    max_failure_share: float = 1.0
    """Of the newest rows: when more fail, a waiting iteration gets no batch any more."""


class Ledger:
    """All live groups of a run; see the module's picture."""

    def __init__(
        self,
        window: Window,
        limits: Limits,
        prompts: PromptSource,
        accuracy_filter: AccuracyFilter | None = None,
    ) -> None:
        assert window.iterations is not None or prompts.places is not None, "a run must end"
        assert window.over_sampling == 1 or accuracy_filter, (
            "over-sampling is for what a filter takes"
        )
        self.window = window
        self.limits = limits
        self.counts = Counts()
        self.records: list[Record] = []
        self.completed = 0
        """Iterations every rank has finished; also the newest version."""
        self.batches: dict[int, tuple[int, ...]] = {}
        """Recorded iterations that are not trained yet."""
        self.pass_rate = PassRate(accuracy_filter) if accuracy_filter else None
        self.failures = FailureShare(
            max(FEWEST_FAILURES_SEEN, 2 * window.batch_groups), limits.max_failure_share
        )
        self.newest_error = ""
        """What the newest row that could not be sampled or judged says of itself."""
        self._prompts = prompts
        self._live: dict[int, Group] = {}
        self._resample: deque[tuple[int, ...]] = deque()
        self._unscored_items: list[ScoreItem] = []
        self._requeued: deque[tuple[int, int]] = deque()
        self._next_seq = 0
        self._next_place = 0

    # --- sampling ----------------------------------------------------------------------------------------------------

    def start_sampling(self, version: int) -> SampleItem | None:
        """Lease groups to a worker that has `version` installed, or None where the window or the data end allow none."""
        while self._resample:
            if self._live_again(self._resample[0]):
                return self._resample_item(version)
            self._resample.popleft()  # delivered after all, by the worker that was given up
        size = self._new_item_size(version)
        if not size:
            return None
        seqs = tuple(self._issue() for _ in range(size))
        for seq in seqs:
            self._begin_sampling(seq, version)
        return SampleItem(seqs, version)

    def _live_again(self, seqs: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(seq for seq in seqs if self._state(seq) == "queued")

    def _resample_item(self, version: int) -> SampleItem | None:
        seqs = self._live_again(self._resample[0])
        # What waits to be sampled again is not under way: counted, such groups could keep each other out for ever.
        room = self._room(version, [group for group in self.live() if group.state != "queued"])
        if room < len(seqs) and (self.window.over_sampling == 1 or not room):
            return None
        self._resample.popleft()
        if seqs[room:]:
            # Over-sampled groups were accepted meanwhile: fewer are needed than were under way.
            self._resample.appendleft(seqs[room:])
        for seq in seqs[:room]:
            self._begin_sampling(seq, version)
        return SampleItem(seqs[:room], version)

    def _new_item_size(self, version: int) -> int:
        if self.failures.is_too_high or (self.pass_rate and self.pass_rate.is_too_low):
            return 0  # what is under way decides whether the run can go on
        room = self._room(version, self.live())
        to_boundary = self.window.batch_groups - self._next_seq % self.window.batch_groups
        return min(self.limits.groups_per_item, to_boundary, room, self._issuable(room))

    def _room(self, version: int, under_way: Iterable[Group]) -> int:
        states = Counter(group.state in ACCEPTED for group in under_way)
        return self.window.room(version, self.completed, states[True], states[False])

    def _issuable(self, wanted: int) -> int:
        """Of so many groups, those that the data still holds prompts for."""
        if self._prompts.places is None:
            return wanted
        return min(wanted, self._prompts.places - self._next_place + len(self._requeued))

    def _issue(self) -> int:
        seq = self._next_seq
        place, requeues = self._requeued[0] if self._requeued else (self._next_place, 0)
        self._append(Issued(seq, place, requeues))
        return seq

    def _begin_sampling(self, seq: int, version: int) -> None:
        group = self._live[seq]
        group.state, group.version = "sampling", version

    def take_prefixes(
        self, groups: Sequence[GroupPrefixes], version: int, weights_digest: str, sampled_s: float
    ) -> list[int]:
        """Accept sampled groups; returns the sequence numbers taken, the others are counted duplicates."""
        taken = [
            group for group in groups if self._may_take(group, version, ("queued", "sampling"))
        ]
        self.counts.duplicates_ignored += len(groups) - len(taken)
        good = []
        for group in taken:
            if group.error:
                self.newest_error = group.error
                self.end(group.seq, "failed", group.error)
                continue
            self._live[group.seq].state, self._live[group.seq].version = "sampled", version
            good.append(group)
        if good:
            self._unscored_items.append(ScoreItem(tuple(good), version, weights_digest, sampled_s))
            self._unscored_items.sort(key=lambda item: (item.version, item.seqs))
        return [group.seq for group in taken]

    # --- scoring -----------------------------------------------------------------------------------------------------

    def start_scoring(self) -> ScoreItem | None:
        """Lease the sampled groups that are due first, or None."""
        while self._unscored_items:
            item = self._unscored_items.pop(0)
            groups = tuple(group for group in item.groups if self._state(group.seq) == "sampled")
            if groups:
                for group in groups:
                    self._live[group.seq].state = "scoring"
                return ScoreItem(groups, item.version, item.weights_digest, item.sampled_s)
        return None

    def take_scores(self, groups: Sequence[ScoredGroup]) -> list[int]:
        """Accept scored groups; returns the sequence numbers taken, the others are counted duplicates."""
        taken = []
        for group in groups:
            if not self._may_take(
                group.prefixes, group.version, ("queued", "sampling", "sampled", "scoring")
            ):
                self.counts.duplicates_ignored += 1
                continue
            taken.append(group.prefixes.seq)
            self._judge(group)
        return taken

    def _judge(self, group: ScoredGroup) -> None:
        rewards = [verdict.reward for verdict in group.verdicts if verdict.is_judged]
        faults = group.faults
        cut = sum(verdict.status == "truncated" for verdict in group.verdicts)
        if faults:
            self.newest_error = next(
                text.extracted for text in group.texts if text.status == "error"
            )
        if cut == len(group.verdicts):
            # Its prompt would most likely be cut again: it is not tried again, and counts against broker.max_failure_share.
            self.newest_error = TRUNCATED
            self.end(group.prefixes.seq, "failed", TRUNCATED)
        elif not rewards:
            commonest = max(faults, key=lambda fault: (faults[fault], fault))
            kind = f": {commonest}" if commonest else ""
            rows = "every row that was not cut" if cut else "every row"
            self.expire(group.prefixes.seq, f"verifier error on {rows}{kind}", faults)
        elif self.pass_rate and (cause := self.pass_rate.filter.objection(rewards)):
            self.end(group.prefixes.seq, "filtered", cause, faults)
        else:
            self._append(GroupScored(group))
            self._end_surplus()

    def _may_take(self, group: GroupPrefixes, version: int, states: tuple[State, ...]) -> bool:
        live = self._live.get(group.seq)
        if (
            live is None
            or live.state not in states
            or self._prompts.identity(live.prompt) != group.prompt.prompt_id
        ):
            return False
        if live.version == version:
            return True
        # A late result of an earlier lease may be older than the present one: it must still fit its own, earlier deadline.
        deadlines = [*self._binding(besides=live.seq), self.window.deadline(version)]
        return self.window.overfull(self._next_iteration, deadlines) is None

    def _binding(self, besides: int | None = None) -> list[int]:
        """Deadlines that must be met: of the accepted, and without over-sampling of everything that has a version."""
        return [
            self.window.deadline(group.version)
            for group in self.live()
            if group.version is not None
            and group.seq != besides
            and (
                group.state == "scored"
                or (self.window.over_sampling == 1 and group.state != "batched")
            )
        ]

    @property
    def _next_iteration(self) -> int:
        """The first iteration whose groups are not chosen yet."""
        return self.completed + len(self.batches)

    # --- losses ------------------------------------------------------------------------------------------------------

    def give_back(self, item: SampleItem | ScoreItem, died: bool) -> None:
        """A lease ended without a result. `died`: its worker was lost with it, which counts against the groups."""
        survivors = []
        stage = "sampling" if isinstance(item, SampleItem) else "scoring"
        for seq in item.seqs:
            group = self._live.get(seq)
            if group is None or group.state != stage or group.version != item.version:
                continue
            group.deaths += died
            if group.deaths >= self.limits.attempts:
                self.expire(seq, f"{stage} lost with its worker {group.deaths} times")
            else:
                survivors.append(seq)
        if isinstance(item, SampleItem):
            for seq in survivors:
                self._live[seq].state, self._live[seq].version = "queued", None
            if survivors:
                self._resample.append(tuple(survivors))
            return
        for seq in survivors:
            self._live[seq].state = "sampled"
        if survivors:
            groups = tuple(group for group in item.groups if group.seq in survivors)
            self._unscored_items.insert(
                0, ScoreItem(groups, item.version, item.weights_digest, item.sampled_s)
            )
            self._unscored_items.sort(key=lambda entry: (entry.version, entry.seqs))

    def expire(self, seq: int, cause: str, faults: dict[str, int] | None = None) -> None:
        """End a group that cannot come; its prompt gets a new group, or fails for good after the last requeue."""
        requeue = self._live[seq].requeues < self.limits.requeues
        self._append(Ended(seq, "expired" if requeue else "failed", cause, requeue, faults or {}))

    def end(
        self,
        seq: int,
        state: Literal["filtered", "failed"],
        cause: str,
        faults: dict[str, int] | None = None,
    ) -> None:
        """End a live group untrained and without another try."""
        self._append(Ended(seq, state, cause, faults=faults or {}))

    def _end_surplus(self) -> None:
        """End what can no longer be trained in time, now that so much is accepted or that an iteration is chosen."""
        if self.window.over_sampling == 1:
            return  # everything live is binding, so everything live fits
        full = self.window.full_until(self._next_iteration, self._binding())
        for group in list(self.live()):
            # What waits to be sampled again gets a later version: only the end of the run leaves it without a place.
            version = full + 1 if group.version is None else group.version
            if group.state not in ACCEPTED and self.window.deadline(version) <= full:
                self._append(Ended(group.seq, "expired", SURPLUS, requeued=True))

    # --- batches -----------------------------------------------------------------------------------------------------

    def batch(self, iteration: int) -> Choice | Wait | Starved | None:
        """The groups of an iteration: recorded, chosen now, to be waited for, never to come, or None: the run is over."""
        if iteration in self.batches:
            return Choice(self.batches[iteration])
        assert iteration == self.completed, "batches are asked for in order"
        size = self._batch_size()
        if size == 0:
            return None if self.counts.trained or not self.counts.issued else Starved("data")
        scored: list[tuple[int, int]] = []
        unscored: list[tuple[int, int]] = []
        for group in self._live.values():
            if group.version is not None and group.state != "batched":
                entry = (self.window.deadline(group.version), group.seq)
                (scored if group.state == "scored" else unscored).append(entry)
        choice = choose(self.window, iteration, size, scored, unscored)
        if isinstance(choice, Choice):
            self._append(Batched(iteration, choice.seqs))
            self._end_surplus()
        elif self.failures.is_too_high:
            return Starved("failures")
        elif self.pass_rate and self.pass_rate.is_too_low:
            return Starved("filter")
        return choice

    def _batch_size(self) -> int:
        size = self.window.batch_groups
        if self.window.iterations is not None and self.completed >= self.window.iterations:
            return 0
        # The last batch may be small: no prompt is left, and everything live has to come in first.
        return size if self._issuable(size) > 0 else min(size, self.outstanding)

    def results(self, seqs: Iterable[int]) -> list[ScoredGroup]:
        """The scored groups of a batch, in the order given."""
        found = [self._live[seq].result for seq in seqs]
        assert all(result is not None for result in found)
        return [result for result in found if result is not None]

    def trained(self, iteration: int) -> bool:
        """Every rank finished `iteration`; False where that was known already.

        Raises:
            ValueError: no batch of it was handed out.
        """
        if iteration < self.completed:
            return False
        if iteration != self.completed or iteration not in self.batches:
            raise ValueError(
                f"iteration {iteration} cannot be trained: no batch of it was handed out"
            )
        for seq in self.batches.pop(iteration):
            group = self._live.pop(seq)
            assert group.version is not None
            assert iteration - group.version <= self.window.max_staleness
            self.counts.trained += 1
            self.counts.age_histogram[iteration - group.version] += 1
            self.counts.note_rows(group.result, iteration)
        self.completed += 1
        return True

    # --- views -------------------------------------------------------------------------------------------------------

    @property
    def outstanding(self) -> int:
        """Every live group, batched ones included."""
        return len(self._live)

    def live(self) -> Iterator[Group]:
        """Every live group."""
        return iter(self._live.values())

    def states(self) -> dict[str, int]:
        """Live groups by state."""
        return dict(Counter(group.state for group in self._live.values()))

    def place(self, seq: int) -> int:
        """Place of a live group's prompt in the order of prompts."""
        return self._live[seq].prompt

    def _state(self, seq: int) -> State | None:
        group = self._live.get(seq)
        return group.state if group else None

    def check(self) -> None:
        """Assert the invariants that hold between any two events."""
        counts = self.counts
        assert (
            counts.issued
            == counts.trained + counts.filtered + counts.failed + counts.expired + self.outstanding
        )
        assert self.window.overfull(self._next_iteration, self._binding()) is None

    # --- records -----------------------------------------------------------------------------------------------------

    def _append(self, record: Record) -> None:
        self._apply(record)
        self.records.append(record)

    def _apply(self, record: Record) -> None:
        match record:
            case Issued(seq, prompt, requeues):
                if prompt < self._next_place:
                    self._requeued.remove((prompt, requeues))
                self._live[seq] = Group(seq, prompt, requeues)
                self._next_seq = max(self._next_seq, seq + 1)
                self._next_place = max(self._next_place, prompt + 1)
                self.counts.issued += 1
            case GroupScored(scored):
                group = self._live[scored.prefixes.seq]
                group.state, group.version, group.result = "scored", scored.version, scored
                left_out = Counter(each.status for each in scored.verdicts if not each.is_judged)
                self.counts.rows_left_out.update(left_out)
                self.counts.row_errors.update(scored.faults)
                self.failures.note(sum(scored.faults.values()) / len(scored.texts))
                if self.pass_rate:
                    self.pass_rate.note(True)
            case Batched(iteration, seqs):
                self.batches[iteration] = seqs
                for seq in seqs:
                    self._live[seq].state = "batched"
            case Ended(seq, state, cause, requeued, faults):
                self.counts.row_errors.update(faults)
                group = self._live.pop(seq)
                setattr(self.counts, state, getattr(self.counts, state) + 1)
                self.counts.causes[f"{state}: {cause}"] += 1
                if requeued:
                    self._requeued.append((group.prompt, group.requeues + (cause != SURPLUS)))
                if cause != SURPLUS:
                    self.failures.note(float(state != "filtered"))
                if self.pass_rate and state == "filtered":
                    self.pass_rate.note(False)

    def replay(self, records: Iterable[Record], completed: int) -> None:
        """Rebuild after a restart from what was written down, the learner standing at iteration `completed`.

        Batches before `completed` are trained; later recorded ones are served again, same groups, same order. Groups that were
        sampling or scoring when the broker died are queued again; the workers that still hold them deliver as usual.
        """
        for record in records:
            self._apply(record)
            while self.completed < completed and self.completed in self.batches:
                self.trained(self.completed)
        assert self.completed == completed, f"the journal ends before iteration {completed}"
        waiting = [group.seq for group in self._live.values() if group.state == "queued"]
        size = self.limits.groups_per_item
        self._resample.extend(
            tuple(waiting[start : start + size]) for start in range(0, len(waiting), size)
        )
        self._end_surplus()
