"""Every order in which the smallest runs can happen: no state is reached in which nothing can happen any more.

All interleavings of two rollout leases, two scorer leases, their loss, the learner and a rollout that installs versions
late, with every outcome of the filter for every group, counted out. Each event but a loss moves a group or an iteration
on, so a run without such a state, and without losses for ever, ends."""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import product

import pytest

from prefixrl.common.config.algorithm import AdmissionRule
from prefixrl.common.wire.messages.groups import GroupPrefixes, Row, ScoredGroup, VersionSpan
from prefixrl.common.wire.packing import pack_logprobs, pack_tokens
from prefixrl.learner.broker.groups.admission import Admission
from prefixrl.learner.broker.groups.filtering import AccuracyFilter
from prefixrl.learner.broker.groups.ledger import Ledger
from prefixrl.learner.broker.groups.states import LedgerLimits, SampleItem, ScoreItem
from prefixrl.learner.broker.groups.window import Choice, Window
from support.broker.ledger_world import Places
from support.messages import verdict
from support.tiers import mostly_nightly

ROW = Row(
    tokens=pack_tokens([1]),
    logprobs=pack_logprobs([-1.0]),
    finish="length",
    spans=(VersionSpan(0, "d", 1),),
)
SLOTS = 2


@dataclass
class Tiny:
    """A ledger, what is leased, and the version the one rollout has installed."""

    ledger: Ledger
    version: int = 0
    sampling: list[SampleItem] = field(default_factory=list)
    scoring: list[ScoreItem] = field(default_factory=list)
    over: bool = False

    def events(self) -> "Iterator[Callable[[Tiny], bool]]":
        """Everything that may happen next; each says whether it did."""
        yield Tiny.swap
        yield Tiny.start_sampling
        yield Tiny.start_scoring
        yield Tiny.train
        for place in range(len(self.sampling)):
            yield lambda tiny, place=place: tiny.deliver_prefixes(place)  # type: ignore[misc]
        for place in range(len(self.scoring)):
            for rewards in product((0.0, 1.0), repeat=len(self.scoring[place].groups)):
                yield lambda tiny, place=place, rewards=rewards: tiny.deliver_scores(place, rewards)  # type: ignore[misc]

    def swap(self) -> bool:
        if self.sampling or self.version == self.ledger.completed:
            return False
        self.version = self.ledger.completed
        return True

    def start_sampling(self) -> bool:
        if len(self.sampling) == SLOTS:
            return False
        item = self.ledger.start_sampling(self.version)
        self.sampling += [item] if item else []
        return item is not None

    def start_scoring(self) -> bool:
        if len(self.scoring) == SLOTS:
            return False
        item = self.ledger.start_scoring()
        self.scoring += [item] if item else []
        return item is not None

    def deliver_prefixes(self, place: int) -> bool:
        item = self.sampling.pop(place)
        places = {group.seq: group.prompt for group in self.ledger.live()}
        groups = [
            GroupPrefixes(
                seq=seq,
                prompt=Places(None).prompt(places[seq]),
                seed=seq,
                prompt_tokens=b"",
                rows=(ROW,),
            )
            for seq in item.seqs
            if seq in places
        ]
        self.ledger.take_prefixes(groups, item.version, "d", 0.0)
        return True

    def deliver_scores(self, place: int, rewards: tuple[float, ...]) -> bool:
        item = self.scoring.pop(place)
        self.ledger.take_scores(
            [
                ScoredGroup(
                    prefixes=group,
                    version=item.version,
                    weights_digest="d",
                    verdicts=(verdict(reward),),
                    scorer="s",
                )
                for group, reward in zip(item.groups, rewards, strict=True)
            ]
        )
        return True

    def train(self) -> bool:
        choice = self.ledger.batch(self.ledger.completed)
        if isinstance(choice, Choice):
            self.ledger.trained(self.ledger.completed)
            # By turns nothing old may be begun, and all that the window allows.
            self.ledger.admission.cap = (0.0, self.ledger.admission.widest)[
                self.ledger.completed % 2
            ]
            self.ledger.admission.lead = self.ledger.window.batch_groups + self.ledger.admission.cap
        self.over = choice is None or (
            not isinstance(choice, Choice) and not self.ledger.outstanding
        )
        return isinstance(choice, Choice)

    def losses(self) -> "Iterator[Callable[[Tiny], None]]":
        """Every lease may come back unworked."""
        for place in range(len(self.sampling)):
            yield lambda tiny, place=place: tiny.ledger.give_back(tiny.sampling.pop(place), False)  # type: ignore[misc]
        for place in range(len(self.scoring)):
            yield lambda tiny, place=place: tiny.ledger.give_back(tiny.scoring.pop(place), False)  # type: ignore[misc]

    def key(self) -> tuple[object, ...]:
        """All that decides what may happen from here."""
        ledger = self.ledger
        live = tuple((each.seq, each.prompt, each.state, each.version) for each in ledger.live())
        leased = tuple((each.seqs, each.version) for each in (*self.sampling, *self.scoring))
        return (
            *(self.version, ledger.completed, live, ledger._next_seq, ledger._next_prompt),
            *(tuple(ledger._requeued), tuple(ledger._resample), len(self.sampling), leased),
            *(
                tuple(sorted(each[:2] for each in ledger._unscored_items)),
                bool(ledger.counts.trained),
            ),
        )


def explore(ledger: Ledger) -> int:
    """Visit every reachable state; how many there are."""
    seen, todo = set(), [Tiny(ledger)]
    while todo:
        state = todo.pop()
        if state.key() in seen or state.over:
            continue
        seen.add(state.key())
        moved = False
        for event in state.events():
            after = copy.deepcopy(state)
            moved = event(after) or after.over or moved
            after.ledger.check()
            after.ledger.records.clear()
            todo.append(after)
        for loss in state.losses():
            after = copy.deepcopy(state)
            loss(after)
            todo.append(after)
        assert moved, f"nothing can happen any more: {state.key()}"
    return len(seen)


LARGER = ((2, 0, 1, 3), (2, 0, 2, 5), (2, 1, 2, 5))


@pytest.mark.parametrize("admission", ["just_in_time", "as_early_as_allowed"])
@pytest.mark.parametrize(
    "over_sampling", mostly_nightly([Fraction(3, 2), Fraction(1), Fraction(2)], 1)
)
@pytest.mark.parametrize(
    ("batch_groups", "staleness", "item", "places"),
    [
        (1, 0, 1, 3),
        (1, 1, 1, 3),
        *(pytest.param(*each, marks=pytest.mark.nightly) for each in LARGER),
    ],
)
def test_no_order_of_events_ends_in_a_state_in_which_nothing_can_happen(
    batch_groups: int,
    staleness: int,
    item: int,
    places: int,
    over_sampling: Fraction,
    admission: AdmissionRule,
) -> None:
    window = Window(batch_groups, staleness, over_sampling)
    band = AccuracyFilter(1.0, 1.0, 10**6, 0.0)
    rule = Admission(window, admission, 0.8, item)
    assert explore(Ledger(window, LedgerLimits(item, 2, 2), Places(places), band, rule)) > 30


class QueuedHoldPlaces(Ledger):
    """Fault: groups that wait to be sampled again count as under way, and so keep each other out."""

    def _room(self, version: int, states: Mapping[str, int]) -> int:
        return super()._room(version, self._live.states())


def test_a_window_in_which_groups_keep_each_other_out_is_noticed() -> None:
    band = AccuracyFilter(1.0, 1.0, 10**6, 0.0)
    ledger = QueuedHoldPlaces(Window(2, 0, Fraction(2)), LedgerLimits(2, 2, 2), Places(5), band)
    with pytest.raises(AssertionError, match="nothing can happen any more"):
        explore(ledger)
