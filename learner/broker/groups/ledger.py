"""The ledger: state and next steps of every group. Pure: no socket, no clock, no file.

    queued ─▶ sampling ─▶ sampled ─▶ scoring ─▶ scored ─▶ batched ─▶ trained
       ▲          │                     │ ├─▶ filtered(cause)
       │          │                     │ └─▶ spare ─▶ batched | filtered(cause)     with filter.fill = "prioritise"
       └──────────┴──── worker lost ────┘   before scored ─▶ failed(cause) | expired(cause), prompt requeued

Groups are issued, leased and delivered in *work items*: runs of groups that share one forward, so that a group's text
depends on its item and never on arrival or worker count. The first complete result for a group wins, whichever lease it
came from; it is matched by what it carries (sequence number *and* prompt), never by a task name alone.

Every change that a restart must know is appended to `records`; the server writes them down before it answers anyone.
"""

import heapq
import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count, islice
from typing import Literal

from prefixrl.common.journal.records import (
    BatchFormed,
    GroupEnded,
    GroupIssued,
    GroupScored,
    LedgerState,
    Record,
)
from prefixrl.common.wire.messages.groups import GroupPrefixes, ScoredGroup
from prefixrl.learner.broker.groups.admission import Admission
from prefixrl.learner.broker.groups.filtering import AccuracyFilter, Starved, objection, spare_cause
from prefixrl.learner.broker.groups.journaled import SURPLUS, JournaledState
from prefixrl.learner.broker.groups.outcomes import Outcomes
from prefixrl.learner.broker.groups.states import (
    UNVERIFIED,
    Group,
    LedgerLimits,
    PromptSource,
    SampleItem,
    ScoreItem,
    State,
)
from prefixrl.learner.broker.groups.window import Choice, NotYetChosen, Window, choose


class Ledger(JournaledState):
    """Live groups of a run; see the module's picture."""

    def __init__(
        self,
        window: Window,
        limits: LedgerLimits,
        prompts: PromptSource,
        accuracy_filter: AccuracyFilter | None = None,
        admission: Admission | None = None,
        outcomes: Outcomes | None = None,
    ) -> None:
        """Create an empty ledger.

        Without `admission`, groups begin as early as `window` allows. With `outcomes` not every prompt is asked.
        """
        assert window.iterations is not None or prompts.total is not None, "a run must end"
        assert window.over_sampling == 1 or accuracy_filter, (
            "over-sampling is for what a filter takes"
        )
        super().__init__(window, limits, prompts, accuracy_filter, outcomes)
        self.admission = admission or Admission(window)
        self.limits = limits
        self.records: list[Record] = []
        self.most_new: int | None = None
        """Most groups that may be issued now; None: no limit but those of window and data."""
        self.is_closed = False
        """True once no group is ever issued again: the run ends as if its data were used up."""
        self.newest_error = ""
        """Error of the newest row that could not be sampled or judged."""
        self._resample = deque[tuple[int, ...]]()
        self._unscored_items: list[tuple[int, tuple[int, ...], int, ScoreItem]] = []
        """A heap: by version, then by groups."""
        self._queued = count()
        self.lacks_draft = False
        """True if groups were not begun at the last look because prompts are not ready."""

    def start_sampling(self, version: int, most_groups: int | None = None) -> SampleItem | None:
        """Return groups for a worker at `version`; None if window or data allow no group."""
        most_groups = most_groups or self.limits.groups_per_item
        self.lacks_draft = False
        while self._resample:
            if self._live_again(self._resample[0]):
                return self._resample_item(version, most_groups)
            self._resample.popleft()  # delivered after all, by the worker that was given up
        if not (size := self._new_item_size(version, most_groups)):
            return None
        # All or none: what an item holds must not depend on when drafts come.
        if not self._are_ready(self._next_places(size)):
            return None
        return self._begin_sampling(tuple(self._issue() for _ in range(size)), version)

    def _next_places(self, groups: int) -> list[int]:
        """Return the positions of the prompts of the next groups."""
        places = [place for place, _ in islice(self._requeued, groups)]
        return [*places, *islice(self._new_places(), groups - len(places))]

    def _new_places(self) -> Iterator[int]:
        """Yield the positions of new prompts that are asked."""
        for place in count(self._next_prompt):
            if self.outcomes is None or self.outcomes.is_asked(
                place, self._prompts.problem(place), self._prompts.source(place)
            ):
                yield place

    def _are_ready(self, places: Iterable[int]) -> bool:
        self.lacks_draft = not all(map(self._prompts.is_ready, places))
        return not self.lacks_draft

    @property
    def upcoming(self) -> range:
        """Positions of prompts to make ready: those of the next batch, or fewer if the run begins fewer groups."""
        most = self.window.batch_groups
        if self.window.iterations is not None:
            room = self._room(self.window.iterations, self._live.states())
            most = max(0, min(most, room - len(self._requeued)))
        if self._prompts.total is not None:
            most = max(0, min(most, self._prompts.total - self._next_prompt))
        return range(self._next_prompt, self._next_prompt + most)

    @property
    def unsampled_places(self) -> list[int]:
        """Positions of the prompts of groups that are sampled again."""
        places = [group.prompt for group in self.live() if group.state == "queued"]
        return places + [place for place, _ in self._requeued]

    def _live_again(self, seqs: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(seq for seq in seqs if self._state(seq) == "queued")

    def _resample_item(self, version: int, most_groups: int) -> SampleItem | None:
        seqs = self._live_again(self._resample[0])
        if not self.admission.may_resample(version, self.completed):
            return None
        # Groups that wait to be sampled again are not under way. If they counted, they could block each other for ever.
        room = self._room(
            version,
            {state: count for state, count in self._live.states().items() if state != "queued"},
        )
        if room < len(seqs) and (self.window.over_sampling == 1 or not room):
            return None
        if not self._are_ready(self._live[seq].prompt for seq in seqs):
            return None  # the end of the file with its draft was lost
        self._resample.popleft()
        room = min(room, most_groups)
        if seqs[room:]:
            # The rest is for another item. Over-sampled groups that were accepted meanwhile leave less room.
            self._resample.appendleft(seqs[room:])
        return self._begin_sampling(seqs[:room], version)

    def _new_item_size(self, version: int, most_groups: int) -> int:
        if self._starvation:
            return 0
        states = self._live.states()
        room = self._room(version, states)
        to_boundary = self.window.batch_groups - self._next_seq % self.window.batch_groups
        size = min(most_groups, to_boundary, room, self._issuable(room))
        if self.most_new is not None:
            size = min(size, self.most_new)
        return self.admission.size(size, version, self.completed, states)

    def _room(self, version: int, states: Mapping[str, int]) -> int:
        scored = states.get("scored", 0)
        unverified = sum(states.values()) - scored - states.get("batched", 0)
        # A batch fills its iteration even if it is short: it was the last one before the run was extended.
        return self.window.room(version, self._next_iteration, scored, unverified)

    def _issuable(self, groups: int) -> int:
        """Return for how many of the groups the data still has prompts."""
        if self.is_closed:
            return 0
        if self._prompts.total is None:
            return groups
        # A run whose epochs were lowered may have issued more groups than its data has now.
        return min(groups, max(0, self._prompts.total - self._next_prompt) + len(self._requeued))

    def _issue(self) -> int:
        prompt_index, requeues = (
            self._requeued[0] if self._requeued else (next(self._new_places()), 0)
        )
        self._append(GroupIssued(self._next_seq, prompt_index, requeues))
        if self.most_new is not None:
            self.most_new -= 1
        return self._next_seq - 1

    def _begin_sampling(self, seqs: tuple[int, ...], version: int) -> SampleItem:
        for seq in seqs:
            self._live.move(self._live[seq], "sampling", version)
        return SampleItem(seqs, version)

    def take_prefixes(
        self, groups: Sequence[GroupPrefixes], version: int, weights_digest: str, sampled_s: float
    ) -> list[int]:
        """Accept sampled groups; return the accepted sequence numbers. The others are duplicates."""
        accepted = [
            group for group in groups if self._may_take(group, version, ("queued", "sampling"))
        ]
        self.counts.duplicates_ignored += len(groups) - len(accepted)
        for group in accepted:
            if group.error:
                self.newest_error = group.error
                self.end(group.seq, "failed", group.error)
            else:
                self._live.move(self._live[group.seq], "sampled", version)
        if good := tuple(group for group in accepted if not group.error):
            self.admission.times.note_item("sampling_s", sampled_s)
            self._queue_scoring(ScoreItem(good, version, weights_digest, sampled_s))
        return [group.seq for group in accepted]

    def _queue_scoring(self, item: ScoreItem) -> None:
        heapq.heappush(self._unscored_items, (item.version, item.seqs, next(self._queued), item))

    def start_scoring(self, most_groups: int | None = None) -> ScoreItem | None:
        """Return at most `most_groups` sampled groups, earliest deadlines first, or None."""
        while self._unscored_items:
            item = heapq.heappop(self._unscored_items)[-1]
            if seqs := [group.seq for group in item.groups if self._state(group.seq) == "sampled"]:
                seqs, later = seqs[:most_groups], seqs[most_groups or len(seqs) :]
                if later:
                    self._queue_scoring(item.only(later))
                for seq in seqs:
                    self._live.move(self._live[seq], "scoring", item.version)
                return item.only(seqs)
        return None

    def take_scores(self, groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
        """Accept scored groups, count duplicates, and return the groups that wait for a batch now."""
        first_results = []
        for group in groups:
            if self._may_take(
                group.prefixes, group.version, ("queued", "sampling", "sampled", "scoring")
            ):
                first_results.append(group)
                self._judge(group)
        if first_results:
            self.admission.times.note_item("scoring_s", groups[0].scoring_s)
        self.counts.duplicates_ignored += len(groups) - len(first_results)
        return [group for group in first_results if self._live.get(group.prefixes.seq)]

    def _judge(self, group: ScoredGroup) -> None:
        seq, faults = group.prefixes.seq, group.faults
        if faults:
            self.newest_error = next(
                text.extracted for text in group.texts if text.status == "error"
            )
        fault = objection(group, self._filter)
        if fault is None or spare_cause(group, self._filter):
            self._append(GroupScored(group))
            self._end_surplus()
        elif fault.state == "expired":
            self.expire(seq, fault.cause, faults)
        else:
            if fault.state == "failed":
                self.newest_error = fault.cause
            self.end(seq, fault.state, fault.cause, faults, outcomes=group.outcomes)

    def _may_take(self, group: GroupPrefixes, version: int, states: tuple[State, ...]) -> bool:
        live = self._live.get(group.seq)
        if (
            not live
            or live.state not in states
            or self._prompts.prompt(live.prompt) != group.prompt
        ):
            return False
        if live.version == version:
            return True
        # A late result of an earlier lease may be older than the present one: it must fit its own, earlier deadline.
        due = self._binding()
        if live.version is not None and self.window.over_sampling == 1:
            due[self.window.deadline(live.version)] -= 1
        due[self.window.deadline(version)] += 1
        return self.window.overfull(self._next_iteration, due) is None

    def _binding(self) -> Counter[int]:
        """Return the accepted groups by deadline; without over-sampling, all groups with a version."""
        return self._due("scored", *(UNVERIFIED if self.window.over_sampling == 1 else ()))

    def _due(self, *states: State) -> Counter[int]:
        """Return the number of groups with a version in these states, by deadline."""
        due = Counter[int]()
        for (state, version), groups in self._live.counts.items():
            if version is not None and state in states:
                due[self.window.deadline(version)] += groups
        return due

    @property
    def _next_iteration(self) -> int:
        """The first iteration without a batch."""
        return self.completed + len(self.batches)

    def give_back(self, item: SampleItem | ScoreItem, died: bool) -> None:
        """Take back an item without a result; `died`: count the loss of its worker as an attempt."""
        stage = "sampling" if isinstance(item, SampleItem) else "scoring"
        survivors = []
        for seq in item.seqs:
            # A group that came in by another lease, or is leased at another version, is not lost.
            group = self._live.get(seq)
            if group is None or group.state != stage or group.version != item.version:
                continue
            group.deaths += died
            if group.deaths >= self.limits.attempts:
                self.expire(seq, f"{stage} lost with its worker {group.deaths} times")
                continue
            survivors.append(seq)
            self._live.move(
                group, *(("sampled", item.version) if stage == "scoring" else ("queued", None))
            )
        if survivors and isinstance(item, ScoreItem):
            self._queue_scoring(item.only(survivors))
        elif survivors:
            self._resample.append(tuple(survivors))

    def expire(self, seq: int, cause: str, faults: dict[str, int] | None = None) -> None:
        """End a group without a result; requeue its prompt, or fail it after the last requeue."""
        again = self._live[seq].requeues < self.limits.requeues
        self.end(seq, "expired" if again else "failed", cause, faults, again)

    def end(
        self,
        seq: int,
        state: Literal["filtered", "failed", "expired"],
        cause: str,
        faults: dict[str, int] | None = None,
        requeued: bool = False,
        outcomes: Sequence[float] = (),
    ) -> None:
        """End a live group untrained.

        Args:
            seq: its number.
            state: how it ended.
            cause: why, in words.
            faults: texts without a verdict, by the kind of failure.
            requeued: True if its prompt is issued again.
            outcomes: the verifier's reward of each judged row.
        """
        self._append(
            GroupEnded(
                seq=seq,
                state=state,
                cause=cause,
                requeued=requeued,
                faults=faults or {},
                right=sum(outcomes),
                judged=len(outcomes),
            )
        )

    def _end_surplus(self, is_filled: bool = False) -> None:
        """End the groups that fit no iteration after a group was accepted or a batch was chosen."""
        if self.window.over_sampling == 1:
            return  # everything live is binding, so everything live fits
        full = self.window.full_until(self._next_iteration, self._binding())
        unscored = self._due(*UNVERIFIED, "spare")
        # A group that is sampled again gets a later version. Only the end of the run can make it surplus.
        ends_queued = self.window.deadline(full + 1) <= full
        if not (is_filled or ends_queued or any(due <= full for due in unscored)):
            return
        for group in list(self.live()):
            version = full + 1 if group.version is None else group.version
            is_left = is_filled and group.state == "spare"
            if is_left or (not group.is_accepted and self.window.deadline(version) <= full):
                self._drop(group)

    def _drop(self, group: Group) -> None:
        """End a surplus group: a spare as filtered, another group with its prompt requeued."""
        cause = spare_cause(group.result, self._filter) if group.result else None
        state: Literal["filtered", "expired"] = "filtered" if cause else "expired"
        outcomes = group.result.outcomes if cause and group.result else ()
        self.end(group.seq, state, cause or SURPLUS, requeued=not cause, outcomes=outcomes)

    def batch(self, iteration: int) -> Choice | NotYetChosen | Starved | None:
        """Return the groups of an iteration, the groups to wait for, or the reason to end; None: the run is over."""
        if iteration in self.batches and not self._is_past_the_end(iteration):
            return Choice(self.batches[iteration])
        assert iteration == self.completed, "batches are asked for in order"
        size = self._batch_size()
        if size == 0:
            is_over = self.is_closed or self.counts.trained or not self.counts.issued
            return None if is_over else Starved("data")
        scored, spares, unscored = self.window.entries(self.live())
        may_come = self.outstanding > len(scored) + len(spares) or self._issuable(1) > 0
        # Spares stand in only for accepted groups that are missing, never beside enough of them.
        scored += self.window.fillers(iteration, size - len(scored), spares, may_come)
        choice = choose(self.window, iteration, size, scored, unscored)
        # Recorded before any rank gets it: after a restart ranks are given the same groups.
        if isinstance(choice, Choice):
            self._append(BatchFormed(iteration, choice.seqs))
            self._end_surplus(is_filled=True)
            return choice
        return self._starvation or choice

    def may_form(self, iteration: int) -> bool:
        """Return False if `batch` can only return groups to wait for; costs less than `batch`."""
        if iteration in self.batches or not (size := self._batch_size()) or self._starvation:
            return True
        # By counts per deadline alone: ranks ask often, and `batch` looks at every live group.
        scored, spares = self._due("scored"), self._due("spare")
        missing = size - scored.total()
        usable = sum(groups for due, groups in spares.items() if due >= iteration)
        may_come = self.outstanding > scored.total() + spares.total() or self._issuable(1) > 0
        if missing > 0:
            return usable >= (
                math.ceil(self.window.over_sampling * missing) if may_come else missing
            )
        unscored = self._due(*UNVERIFIED) if self.window.over_sampling == 1 else Counter[int]()
        return (
            self.window.overfull(
                iteration + 1, scored - self.window.smallest(scored, size) + unscored
            )
            is None
        )

    def _batch_size(self) -> int:
        size = self.window.batch_groups
        if self._is_past_the_end(self.completed):
            return 0
        # The last batch may be small: no prompt is left, and everything live has to come in first.
        return size if self._issuable(size) > 0 else min(size, self.outstanding)

    def _is_past_the_end(self, iteration: int) -> bool:
        return self.window.iterations is not None and iteration >= self.window.iterations

    def results(self, seqs: Sequence[int]) -> list[ScoredGroup]:
        """Return the scored groups of a batch, in the order given."""
        results = [result for seq in seqs if (result := self._live[seq].result) is not None]
        assert len(results) == len(seqs)
        return results

    @property
    def _starvation(self) -> Starved | None:
        """The reason why nothing new is begun: what is under way decides whether the run can go on."""
        if self.failures.is_too_high:
            return Starved("failures")
        return Starved("filter") if self.pass_rate and self.pass_rate.is_too_low else None

    @property
    def may_issue(self) -> bool:
        """True if the run still has groups to begin."""
        iterations = self.window.iterations
        if iterations is not None:
            needed = self.window.batch_groups * iterations
            if self.counts.trained + self.outstanding >= needed:
                return False
        return self._issuable(1) > 0

    @property
    def outstanding(self) -> int:
        """Number of live groups, batched ones included."""
        return len(self._live)

    @property
    def is_training(self) -> bool:
        """True while live groups may be trained; a run that was shortened, or filters, may leave some at its end."""
        return self.outstanding > 0 and not self._is_past_the_end(self.completed)

    def live(self) -> Iterable[Group]:
        """Return every live group."""
        return self._live.values()

    def states(self) -> dict[str, int]:
        """Return the number of live groups by state."""
        return self._live.states()

    def prompt_index(self, seq: int) -> int:
        """Return the position of a live group's prompt in the order of prompts."""
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
        # A waiting group is in a queue, or it would wait for ever.
        to_sample = {seq for seqs in self._resample for seq in seqs}
        to_score = {seq for *_, item in self._unscored_items for seq in item.seqs}
        assert self._live.counts == Counter((group.state, group.version) for group in self.live())
        for group in self.live():
            assert group.state != "queued" or group.seq in to_sample
            assert group.state != "sampled" or group.seq in to_score

    def _append(self, record: Record) -> None:
        self.apply(record)
        self.records.append(record)

    def replay(self, records: Iterable[Record | LedgerState], completed: int) -> None:
        """Rebuild the ledger from its records for a learner that has completed some iterations.

        The first may be the state that earlier ones led to.

        Batches before `completed` are trained, later ones handed out again, same groups, same order. Groups that were
        sampling or scoring are queued again; workers that still hold them deliver as usual. Where the records end
        early, fewer iterations than `completed` are completed afterwards. The run may be shorter than when they were
        written: a batch beyond its end is not handed out, unless it is made longer again.
        """
        for record in records:
            if isinstance(record, LedgerState):
                self.restore(record)
            else:
                self.apply(record)
            # The journal does not say what was trained: the learner's checkpoint does.
            while self.completed < completed and self.completed in self.batches:
                self.trained(self.completed)
        self._end_unfit()
        # Queued groups need an item again, or no rollout would ever get them.
        waiting = [group.seq for group in self.live() if group.state == "queued"]
        size = self.limits.groups_per_item
        self._resample.extend(
            tuple(waiting[start : start + size]) for start in range(0, len(waiting), size)
        )
        self._end_surplus()

    def _end_unfit(self) -> None:
        """End the groups for which a shortened run has no iteration; keep groups with results first."""
        if self.window.iterations is None:
            return
        room = self.window.batch_groups * max(0, self.window.iterations - self._next_iteration)
        are_all_binding = self.window.over_sampling == 1
        binding = [
            each
            for each in self.live()
            if each.state == "scored" or (are_all_binding and not each.is_accepted)
        ]
        for group in sorted(binding, key=lambda each: (each.state != "scored", each.seq))[room:]:
            self._drop(group)
