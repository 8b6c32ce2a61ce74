"""The model's rules on counts of groups are the broker's own: window, admission and choice."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from prefixrl.common.engines.interface.base import room_of
from prefixrl.deploy.capacity.rules import Admittance, Counts
from prefixrl.deploy.capacity.simulation import GATHER_S, MESSAGES
from prefixrl.deploy.capacity.system import RowTimes, Workers
from prefixrl.learner.broker import server
from prefixrl.learner.broker.groups.admission import Admission, Supply
from prefixrl.learner.broker.groups.window import Choice, Window, choose

MOST = 8
GROUPS = st.dictionaries(st.integers(0, 6), st.integers(1, MOST), max_size=4).map(Counter)


def broker_rules(batch_groups: int, staleness: int, is_just_in_time: bool) -> tuple[Window, Admission]:
    window = Window(batch_groups, staleness)
    return window, Admission(window, "just_in_time" if is_just_in_time else "as_early_as_allowed")


@given(
    batch_groups=st.integers(1, MOST),
    staleness=st.integers(0, 4),
    is_just_in_time=st.booleans(),
    version=st.integers(0, 6),
    behind=st.integers(0, 5),
    groups=st.tuples(GROUPS, GROUPS, GROUPS),
    queued=st.integers(0, 4),
    is_training=st.booleans(),
    supply=st.tuples(st.integers(0, 12), st.integers(1, 4)),
    times=st.lists(st.tuples(st.floats(0.01, 9.0), st.floats(0.01, 9.0)), max_size=3),
    iterations=st.lists(st.tuples(st.floats(0.0, 9.0), st.floats(0.0, 1.0)), max_size=20),
)
def test_a_group_may_be_begun_exactly_where_the_broker_begins_one(
    batch_groups: int,
    staleness: int,
    is_just_in_time: bool,
    version: int,
    behind: int,
    groups: tuple[Counter[int], Counter[int], Counter[int]],
    queued: int,
    is_training: bool,
    supply: tuple[int, int],
    times: list[tuple[float, float]],
    iterations: list[tuple[float, float]],
) -> None:
    window, admission = broker_rules(batch_groups, staleness, is_just_in_time)
    ours = Admittance(batch_groups, staleness, is_just_in_time)
    for sampling_s, scoring_s in times:
        admission.times.note("sampling_s", sampling_s)
        admission.times.note("scoring_s", scoring_s)
        ours.note_sampled(sampling_s)
        ours.note_scored(scoring_s)
    for iteration_s, share in iterations:
        admission.finish_iteration(iteration_s, share * iteration_s, None)
        ours.finish_iteration(iteration_s, share * iteration_s)
    assert ours.lead == admission.lead
    admission.supply = Supply(supply[1], supply[0])
    completed = version + behind
    counts = Counts(*groups, queued=queued, batched=batch_groups * is_training)
    states = {"sampling": groups[0].total(), "scoring": groups[1].total(), "scored": groups[2].total()}
    states |= {"batched": counts.batched, "queued": queued}
    unverified = counts.under_way + queued
    room = window.room(version, completed, counts.accepted, unverified)
    theirs = admission.size(min(1, room), version, completed, states)
    assert ours.may_begin(version, completed, counts, supply[0], supply[1]) == (theirs == 1)
    again = admission.may_resample(version, completed) and window.room(
        version, completed, counts.accepted, counts.under_way
    )
    assert ours.may_sample_again(version, completed, counts) == bool(again)


@given(batch_groups=st.integers(1, MOST), staleness=st.integers(0, 4), ahead=GROUPS, scoring=GROUPS, scored=GROUPS)
def test_a_batch_is_the_broker_s_choice_or_a_wait(
    batch_groups: int, staleness: int, ahead: Counter[int], scoring: Counter[int], scored: Counter[int]
) -> None:
    window, iteration = Window(batch_groups, staleness), 6
    versions = {seq: version for seq, version in enumerate(sorted((scored + ahead + scoring).elements()))}
    entries: dict[str, list[tuple[int, int]]] = {"scored": [], "unscored": []}
    left = Counter(scored)
    for seq, version in versions.items():
        kind = "scored" if left[version] > 0 else "unscored"
        left[version] -= kind == "scored"
        entries[kind].append((window.deadline(version), seq))
    theirs = choose(window, iteration, batch_groups, entries["scored"], entries["unscored"])
    ours = Admittance(batch_groups, staleness).choice(iteration, Counts(ahead, scoring, scored))
    if isinstance(theirs, Choice):
        assert ours == Counter(versions[seq] for seq in theirs.seqs)
    else:
        assert ours is None


@given(seats=st.integers(1, 2000))
def test_the_room_of_an_engine_is_that_of_a_real_one(seats: int) -> None:
    assert Workers(count=1, seats=seats, row=RowTimes()).room == room_of(seats)


def test_turns_are_those_of_the_broker() -> None:
    assert (GATHER_S, MESSAGES) == (server.GATHER_S, server.MESSAGES)
