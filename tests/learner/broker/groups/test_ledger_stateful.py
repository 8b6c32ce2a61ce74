"""The four invariants of the ledger under random results, duplicates, deaths and restarts; planted faults must show."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from prefixrl.common.config.algorithm import AdmissionRule
from prefixrl.common.journal.records import (
    BatchFormed,
    GroupEnded,
    GroupScored,
    LedgerState,
    Record,
)
from prefixrl.common.wire.messages.groups import GroupPrefixes, ScoredGroup
from prefixrl.learner.broker.groups.admission import Admission
from prefixrl.learner.broker.groups.drafts import Drafts
from prefixrl.learner.broker.groups.filtering import AccuracyFilter, Starved
from prefixrl.learner.broker.groups.ledger import SURPLUS, Ledger
from prefixrl.learner.broker.groups.outcomes import Outcomes
from prefixrl.learner.broker.groups.states import (
    Group,
    LedgerLimits,
    PromptSource,
    SampleItem,
    ScoreItem,
)
from prefixrl.learner.broker.groups.window import Choice, NotYetChosen, Window
from support.broker.ledger_world import Shape, World

QUICK, EXAMPLES = 100, 2000
STEPS = 40


@dataclass
class CrashingWorld(World):
    """A world whose broker and learner die, and whose run is stopped to go on as one of another length."""

    segments: list[tuple[int, LedgerState]] = field(default_factory=list)
    """Starts of segments, each with the number of records before it."""
    resumed_at: int = 0
    """Iterations completed at the last restart."""

    def batch_only(self) -> None:
        """A batch is handed out and written down, and the learner dies before it is trained."""
        self.ask()

    def restart(self, completed: int) -> None:
        """Broker and learner die; the learner resumes from a checkpoint at `completed`. Workers keep what they hold."""
        for item in self.sampling:
            self.ghosts.append(self.sample(item))
        self.ghosts.extend(item.groups for item in self.scoring)
        self.sampling.clear()
        self.scoring.clear()
        self.late_drafts += self.drafting
        self.drafting.clear()
        self.load_drafts()
        self.ledger = self._new()
        self.ledger.replay(self.records, completed)
        self._compare_with_the_newest_segment(completed)
        self.completed = self.resumed_at = completed
        self.over = False
        self.starved = None

    def change_length(self, length: int) -> None:
        """The run is stopped, and goes on as one of another length: iterations, or rounds of its places."""
        if self.shape.iterations is not None:
            self.shape.iterations = length
            # What was trained beyond the end, after the checkpoint, is given up with it.
            self.trained = {
                t: seqs for t, seqs in self.trained.items() if t < max(length, self.completed)
            }
        else:
            self.shape.places = length
        self.is_changed = True
        self.restart(self.completed)
        self._sync()

    def begin_segment(self) -> None:
        """The journal's next segment begins, as bytes on a disk."""
        assert not self.ledger.records
        state = msgspec.msgpack.decode(
            msgspec.msgpack.encode(self.ledger.state()), type=LedgerState
        )
        self.segments.append((len(self.records), state))

    def _compare_with_the_newest_segment(self, completed: int) -> None:
        """A ledger that begins at a segment holds what the whole journal tells."""
        for before, state in reversed(self.segments):
            if state.completed <= completed:
                short = self._new()
                short.replay([state, *self.records[before:]], completed)
                short.counts.duplicates_ignored = 0  # no record tells them
                short.check()
                assert short.state() == self.ledger.state()
                assert short.states() == self.ledger.states()
                return

    def advance(self) -> None:
        """Everybody works properly for one iteration."""
        while self.drafting or self.start_draft():
            self.deliver_draft(self.drafting.pop())
        while self.start_sampling(self.completed):
            pass
        while self.sampling:
            self.deliver_prefixes(self.sample(self.sampling.pop()))
        while self.start_scoring():
            self.deliver_scores(self.scoring.pop().groups)
        for item in [*self.scoring]:
            self.scoring.remove(item)
            self.deliver_scores(item.groups)
        self.train()

    def finish(self) -> None:
        """Everybody works properly from now on: the run must end, with nothing left over."""
        for _ in range(5000):
            self.advance()
            self.check()
            if self.over:
                break
        assert self.over, "the run hangs"
        if self.starved is None or self.starved.why == "data":
            assert self.ledger.outstanding == sum(map(len, self.ledger.batches.values()))
            assert not self.ledger.batches or self.is_changed, (
                "only a run that was shortened leaves a batch"
            )
            assert (self.starved is None) == bool(self.trained)
        else:
            assert self.shape.passing == 0 and not self.shape.fills
        if self.starved is None and self.shape.iterations is not None:
            assert self.completed == max(self.shape.iterations, self.resumed_at), (
                "a shortened run went on"
            )
        if self.starved is None and self.shape.places is not None:
            books = self.ledger.counts
            ended = books.trained + books.filtered + books.failed
            assert ended == max(self.shape.places, self.ledger.state().next_prompt), (
                "a prompt was lost"
            )
        counts = Counter(seq for seqs in self.trained.values() for seq in seqs)
        assert not counts or max(counts.values()) == 1


class LedgerMachine(RuleBasedStateMachine):
    """Drives a ledger the way unreliable workers and a crashing learner would."""

    ledger_type: type[Ledger] = Ledger
    admission_rule: AdmissionRule | None = None
    """None: either."""
    drafts_type: type[Drafts] = Drafts
    has_drafts: bool | None = None
    """None: either."""

    @initialize(
        batch_groups=st.integers(1, 4),
        max_staleness=st.integers(0, 3),
        groups_per_item=st.integers(1, 3),
        by_iterations=st.booleans(),
        length=st.integers(1, 6),
        over_sampling=st.sampled_from([Fraction(1), Fraction(3, 2), Fraction(2)]),
        passing=st.sampled_from([None, 0, 3, 5, 10]),
        admission=st.sampled_from(["just_in_time", "as_early_as_allowed"]),
        fills=st.booleans(),
        has_drafts=st.booleans(),
        by_outcome=st.booleans(),
    )
    def begin(
        self,
        batch_groups: int,
        max_staleness: int,
        groups_per_item: int,
        by_iterations: bool,
        length: int,
        over_sampling: Fraction,
        passing: int | None,
        admission: AdmissionRule,
        fills: bool,
        has_drafts: bool,
        by_outcome: bool,
    ) -> None:
        iterations = length if by_iterations else None
        places = None if by_iterations else length * batch_groups - length % batch_groups + 1
        if passing is None:
            over_sampling = Fraction(1)
        shape = Shape(
            *(batch_groups, max_staleness, groups_per_item, iterations, places),
            *(over_sampling, passing, 40, self.admission_rule or admission),
            fills=fills and passing is not None and over_sampling > 1,
            has_drafts=has_drafts if self.has_drafts is None else self.has_drafts,
        )
        shape.is_by_outcome = by_outcome and by_iterations and not shape.has_drafts
        self.world = CrashingWorld(shape, self.ledger_type, self.drafts_type)

    @rule(behind=st.integers(0, 3))
    def a_rollout_asks_for_work(self, behind: int) -> None:
        self.world.start_sampling(max(0, self.world.completed - behind))

    @precondition(lambda self: self.world.sampling)
    @rule(data=st.data(), twice=st.booleans())
    def a_rollout_delivers(self, data: st.DataObject, twice: bool) -> None:
        item = data.draw(st.sampled_from(self.world.sampling))
        self.world.sampling.remove(item)
        groups = self.world.sample(item)
        self.world.deliver_prefixes(groups)
        if twice:
            self.world.deliver_prefixes(groups)

    @rule()
    def a_scorer_asks_for_a_draft(self) -> None:
        self.world.start_draft()

    @precondition(lambda self: self.world.drafting)
    @rule(data=st.data(), twice=st.booleans(), error=st.integers(0, 4))
    def a_draft_comes(self, data: st.DataObject, twice: bool, error: int) -> None:
        item = data.draw(st.sampled_from(self.world.drafting))
        self.world.drafting.remove(item)
        self.world.deliver_draft(item, error == 0)
        if twice:
            self.world.deliver_draft(item)

    @precondition(lambda self: self.world.drafting)
    @rule(data=st.data(), died=st.booleans())
    def a_scorer_is_lost_with_its_draft(self, data: st.DataObject, died: bool) -> None:
        item = data.draw(st.sampled_from(self.world.drafting))
        self.world.drafting.remove(item)
        self.world.lose_draft(item, died)

    @precondition(lambda self: self.world.late_drafts)
    @rule(data=st.data())
    def a_lost_draft_comes_after_all(self, data: st.DataObject) -> None:
        self.world.deliver_draft(data.draw(st.sampled_from(self.world.late_drafts)))

    @precondition(lambda self: self.world.answers)
    @rule()
    def the_machine_dies_and_the_newest_draft_is_torn(self) -> None:
        self.world.answers.pop()
        self.world.restart(self.world.completed)

    @rule()
    def a_scorer_asks_for_work(self) -> None:
        self.world.start_scoring()

    @precondition(lambda self: self.world.scoring)
    @rule(data=st.data(), twice=st.booleans(), error=st.integers(0, 9))
    def a_scorer_delivers(self, data: st.DataObject, twice: bool, error: int) -> None:
        item = data.draw(st.sampled_from(self.world.scoring))
        self.world.scoring.remove(item)
        self.world.deliver_scores(item.groups, error == 0)
        if twice:
            self.world.deliver_scores(item.groups)

    @precondition(lambda self: self.world.sampling or self.world.scoring)
    @rule(data=st.data(), died=st.booleans())
    def a_worker_is_lost(self, data: st.DataObject, died: bool) -> None:
        item = data.draw(st.sampled_from([*self.world.sampling, *self.world.scoring]))
        (self.world.sampling if item in self.world.sampling else self.world.scoring).remove(item)  # type: ignore[arg-type]
        self.world.lose(item, died)

    @precondition(lambda self: self.world.ghosts)
    @rule(data=st.data(), scored=st.booleans())
    def a_lost_worker_delivers_after_all(self, data: st.DataObject, scored: bool) -> None:
        groups = data.draw(st.sampled_from(self.world.ghosts))
        if not groups:
            return
        if scored:
            self.world.deliver_scores(groups)
        else:
            self.world.deliver_prefixes(groups)

    @rule(
        waited_s=st.sampled_from([0.0, 0.05, 1.0]), old_ess=st.sampled_from([None, 0.0, 0.5, 1.0])
    )
    def the_learner_trains(self, waited_s: float, old_ess: float | None) -> None:
        if self.world.train():
            self.world.ledger.admission.finish_iteration(
                1.0, waited_s, self.world.ledger.states(), old_ess
            )

    @rule()
    def an_iteration_goes_well(self) -> None:
        self.world.advance()

    @rule()
    def a_batch_is_handed_out(self) -> None:
        self.world.batch_only()

    @rule()
    def a_segment_of_the_journal_begins(self) -> None:
        self.world.begin_segment()

    @rule(data=st.data())
    def everything_restarts_from_a_checkpoint(self, data: st.DataObject) -> None:
        self.world.restart(data.draw(st.integers(0, self.world.completed)))

    @rule(length=st.integers(1, 8))
    def the_run_goes_on_with_another_length(self, length: int) -> None:
        self.world.change_length(length)

    @invariant()
    def the_books_balance(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.finish()


def run(machine: type[LedgerMachine], shrink: bool, examples: int = EXAMPLES) -> None:
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine,
        settings=settings(
            max_examples=examples,
            phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
            stateful_step_count=STEPS,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=checks,
            print_blob=False,
        ),
    )


@pytest.mark.timeout(900)
@pytest.mark.parametrize("examples", [QUICK, pytest.param(EXAMPLES, marks=pytest.mark.nightly)])
def test_the_invariants_hold_under_results_duplicates_deaths_and_restarts(examples: int) -> None:
    run(LedgerMachine, shrink=True, examples=examples)


class BatchedCountedOut(Ledger):
    """Fault: groups that were handed out as a batch no longer count as outstanding."""

    def _room(self, version: int, states: Mapping[str, int]) -> int:
        chosen, self.batches = self.batches, {}
        room = super()._room(
            version, {state: count for state, count in states.items() if state != "batched"}
        )
        self.batches = chosen
        return room


class NewestVersionWindow(Window):
    """Admits by the newest version, which is the number of completed iterations."""

    def room(self, version: int, chosen: int, accepted: int, unverified: int) -> int:
        return super().room(chosen, chosen, accepted, unverified)


class LearnersVersion(Ledger):
    """Fault: admission looks at the learner's version instead of the one the worker has installed."""

    def __init__(
        self,
        window: Window,
        limits: LedgerLimits,
        prompts: PromptSource,
        accuracy_filter: AccuracyFilter | None = None,
        admission: Admission | None = None,
        outcomes: Outcomes | None = None,
    ) -> None:
        faulty = NewestVersionWindow(
            window.batch_groups, window.max_staleness, window.over_sampling, window.iterations
        )
        super().__init__(faulty, limits, prompts, accuracy_filter, admission, outcomes)


class FinishedFirst(Ledger):
    """Fault: the batch is whatever is scored, in the order it was scored."""

    def batch(self, iteration: int) -> Choice | NotYetChosen | Starved | None:
        if iteration in self.batches:
            return Choice(self.batches[iteration])
        size = self._batch_size()
        if size == 0:
            return None
        scored_seqs = [
            record.group.prefixes.seq for record in self.history if isinstance(record, GroupScored)
        ]
        scored = [seq for seq in scored_seqs if self._state(seq) == "scored"]
        if len(scored) < size:
            return NotYetChosen(())
        self._append(BatchFormed(iteration, tuple(scored[:size])))
        return Choice(tuple(scored[:size]))

    @property
    def history(self) -> list[Record]:
        if not hasattr(self, "_history"):
            self._history: list[Record] = []
        return self._history

    def _apply(self, record: Record) -> None:
        self.history.append(record)
        super()._apply(record)


class JoinedById(Ledger):
    """Fault: verdicts are joined to the prefixes the ledger knows under the same number."""

    def take_prefixes(
        self, groups: "list[GroupPrefixes]", version: int, weights_digest: str, sampled_s: float
    ) -> list[int]:  # type: ignore[override]
        taken = super().take_prefixes(groups, version, weights_digest, sampled_s)
        known = self.__dict__.setdefault("known", {})
        known.update({group.seq: (group, version) for group in groups if group.seq in taken})
        return taken

    def take_scores(self, groups: "list[ScoredGroup]") -> "list[ScoredGroup]":  # type: ignore[override]
        known = self.__dict__.setdefault("known", {})
        joined = []
        for group in groups:
            prefixes, version = known.get(group.prefixes.seq, (group.prefixes, group.version))
            joined.append(
                ScoredGroup(
                    prefixes=prefixes,
                    version=version,
                    weights_digest=group.weights_digest,
                    verdicts=group.verdicts,
                    scorer=group.scorer,
                )
            )
        return super().take_scores(joined)


class SurplusAccepted(Ledger):
    """Fault: over-sampled groups are accepted whether they still fit or not."""

    def _end_surplus(self, is_filled: bool = False) -> None:
        pass


class SparesForgotten(Ledger):
    """Fault: groups that failed and that no iteration needed vanish without a trace."""

    def _drop(self, group: Group) -> None:
        if group.state == "spare":
            self._live.pop(group.seq)
        else:
            super()._drop(group)


class SurplusLost(Ledger):
    """Fault: the prompt of a surplus group does not come back."""

    def _append(self, record: Record) -> None:
        if isinstance(record, GroupEnded) and record.cause == SURPLUS:
            record = GroupEnded(seq=record.seq, state=record.state, cause=record.cause)
        super()._append(record)


class FilteredUncounted(Ledger):
    """Fault: a filtered group disappears from the books."""

    def end(
        self,
        seq: int,
        state: Literal["filtered", "failed", "expired"],
        cause: str,
        faults: dict[str, int] | None = None,
        requeued: bool = False,
        outcomes: Sequence[float] = (),
    ) -> None:
        super().end(seq, state, cause, faults, requeued, outcomes)
        self.counts.filtered -= state == "filtered"


class FilterForgotten(Ledger):
    """Fault: the filter is not applied."""

    def _judge(self, group: ScoredGroup) -> None:
        self._append(GroupScored(group))
        self._end_surplus()


class OutcomesForgotten(Ledger):
    """Fault: the outcomes of ended groups are lost with a broker."""

    def state(self) -> LedgerState:
        state = super().state()
        if state.outcomes is None:
            return state
        return msgspec.structs.replace(
            state, outcomes=msgspec.structs.replace(state.outcomes, ended=())
        )


class SamplingUncounted(Ledger):
    """Fault: a group that a rollout begins is moved past the counts."""

    def _begin_sampling(self, seqs: tuple[int, ...], version: int) -> SampleItem:
        for seq in seqs:
            self._live[seq].state, self._live[seq].version = "sampling", version
        return SampleItem(seqs, version)


class BatchesOverlooked(Ledger):
    """Fault: a batch that could be formed is not looked for."""

    def may_form(self, iteration: int) -> bool:
        return (
            super().may_form(iteration) and self._due("scored").total() > self.window.batch_groups
        )


class QueuedHoldPlaces(Ledger):
    """Fault: groups that wait to be sampled again count as under way, and so keep each other out."""

    def _room(self, version: int, states: Mapping[str, int]) -> int:
        return super()._room(version, self._live.states())


class BatchedKeepTheirDeadline(Ledger):
    """Fault: a batch that was handed out but not trained leaves its iteration open to late results."""

    @property
    def _next_iteration(self) -> int:
        return self.completed


class DraftsNotAwaited(Ledger):
    """Fault: a group begins before the draft of its problem is there."""

    def _are_ready(self, places: Iterable[int]) -> bool:
        return True


class DraftsForgotten(Drafts):
    """Fault: a draft whose scorer was lost is not asked for again."""

    def give_back(self, item: SampleItem | ScoreItem, died: bool) -> None:
        pass


class DraftsOfOneBatch(Drafts):
    """Fault: a draft is dropped when another one comes."""

    def take_scores(self, groups: Sequence[ScoredGroup], prompt_tokens: int) -> None:
        self.answers._answers.clear()
        super().take_scores(groups, prompt_tokens)


RARE = (
    BatchesOverlooked,
    QueuedHoldPlaces,
    LearnersVersion,
    OutcomesForgotten,
    SurplusLost,
    BatchedKeepTheirDeadline,
    JoinedById,
)
"""Faults that show after many examples only."""


@pytest.mark.parametrize(
    "fault",
    [
        BatchedCountedOut,
        FinishedFirst,
        SurplusAccepted,
        SparesForgotten,
        FilteredUncounted,
        FilterForgotten,
        SamplingUncounted,
        *(pytest.param(fault, marks=pytest.mark.nightly) for fault in RARE),
    ],
)
def test_a_planted_fault_breaks_an_invariant(fault: type[Ledger]) -> None:
    # Most is begun, and most goes wrong, as early as allowed.
    fields = {"ledger_type": fault, "admission_rule": "as_early_as_allowed"}
    machine = type(f"{fault.__name__}Machine", (LedgerMachine,), fields)
    with pytest.raises(AssertionError):
        run(machine, shrink=False)


@pytest.mark.parametrize(
    ("ledger", "drafts"),
    [
        (DraftsNotAwaited, Drafts),
        (Ledger, DraftsForgotten),
        (Ledger, DraftsOfOneBatch),
    ],
)
def test_a_planted_fault_about_drafts_breaks_an_invariant(
    ledger: type[Ledger], drafts: type[Drafts]
) -> None:
    fields = {
        "ledger_type": ledger,
        "drafts_type": drafts,
        "has_drafts": True,
        "admission_rule": "as_early_as_allowed",
    }
    machine = type("DraftsMachine", (LedgerMachine,), fields)
    with pytest.raises(AssertionError):
        run(machine, shrink=False)
