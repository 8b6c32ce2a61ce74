"""The window's three rules against their definitions, counted out over every subset."""

from fractions import Fraction
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from prefixrl.learner.broker.groups.window import Choice, NotYetChosen, Window, choose

windows = st.builds(Window, st.integers(1, 3), st.integers(0, 2))


def slow_overfull(window: Window, iteration: int, deadlines: list[int]) -> int | None:
    """As defined: the first t' by which more are due than iterations `iteration..t'` train."""
    for until in range(iteration - 1, max([iteration, *deadlines]) + 1):
        fits = window.batch_groups * max(0, until - iteration + 1)
        if sum(due <= until for due in deadlines) > fits:
            return until
    return None


@given(window=windows, iteration=st.integers(0, 5), deadlines=st.lists(st.integers(0, 8)))
def test_overfull_names_the_first_iteration_that_cannot_hold_what_is_due(
    window: Window, iteration: int, deadlines: list[int]
) -> None:
    assert window.overfull(iteration, deadlines) == slow_overfull(window, iteration, deadlines)


@given(
    window=windows,
    version=st.integers(0, 6),
    chosen=st.integers(0, 6),
    accepted=st.integers(0, 20),
    unverified=st.integers(0, 20),
)
def test_room_is_the_number_of_groups_that_may_start_one_after_the_other(
    window: Window, version: int, chosen: int, accepted: int, unverified: int
) -> None:
    consumed, started = window.batch_groups * chosen, 0
    outstanding = accepted + unverified
    while consumed + outstanding + started < window.batch_groups * (
        version + window.max_staleness + 1
    ):
        started += 1
    assert window.room(version, chosen, accepted, unverified) == started


@given(
    shape=st.tuples(st.integers(1, 4), st.integers(0, 3), st.integers(1, 9)),
    tenths=st.integers(10, 30),
    version=st.integers(0, 6),
    chosen=st.integers(0, 6),
    accepted=st.integers(0, 20),
    unverified=st.integers(0, 40),
)
def test_over_sampling_multiplies_what_is_still_needed_and_the_run_ends_where_it_ends(
    shape: tuple[int, int, int],
    tenths: int,
    version: int,
    chosen: int,
    accepted: int,
    unverified: int,
) -> None:
    batch_groups, staleness, iterations = shape
    window = Window(batch_groups, staleness, Fraction(tenths, 10), iterations)
    started, needed = 0, batch_groups * (min(version + staleness + 1, iterations) - chosen)
    # Counted in tenths, one group after the other: ten more tenths under way may reach up to nine beyond the cap.
    while 10 * (unverified + started) < tenths * (needed - accepted):
        started += 1
    assert window.room(version, chosen, accepted, unverified) == started


@given(window=windows, iteration=st.integers(0, 5), deadlines=st.lists(st.integers(0, 8)))
def test_one_more_group_fits_only_after_full_until(
    window: Window, iteration: int, deadlines: list[int]
) -> None:
    if slow_overfull(window, iteration, deadlines) is not None:
        return
    full = window.full_until(iteration, deadlines)
    for due in range(-1, 10):
        fits = slow_overfull(window, iteration, [*deadlines, due]) is None
        assert fits == (due > full)


@given(situation=st.deferred(lambda: situations()))
def test_with_over_sampling_only_the_accepted_decide(
    situation: tuple[Window, int, list[tuple[int, int]], list[tuple[int, int]]],
) -> None:
    window, iteration, scored, unscored = situation
    window = Window(window.batch_groups, window.max_staleness, Fraction(2))
    size = window.batch_groups
    answer = choose(window, iteration, size, scored, unscored)
    if len(scored) < size:
        assert answer == NotYetChosen(tuple(seq for _, seq in sorted(unscored)))
    else:
        assert answer == Choice(tuple(seq for _, seq in sorted(scored)[:size]))
        left = [due for due, _ in sorted(scored)[size:]]
        assert slow_overfull(window, iteration + 1, left) is None, "none of them is late by it"


def test_the_end_of_the_run_is_the_last_deadline() -> None:
    window = Window(2, 3, iterations=5)
    assert [window.deadline(version) for version in range(5)] == [3, 4, 4, 4, 4]


@st.composite
def situations(draw: st.DrawFn) -> tuple[Window, int, list[tuple[int, int]], list[tuple[int, int]]]:
    """Scored and unscored groups that iteration t may meet: the bound holds, as admission keeps it."""
    window, iteration = draw(windows), draw(st.integers(0, 3))
    last = iteration + window.max_staleness
    scored: list[tuple[int, int]] = []
    unscored: list[tuple[int, int]] = []
    deadlines = draw(st.lists(st.integers(iteration, last), max_size=7))
    for seq, due in enumerate(draw(st.permutations(deadlines))):
        due_now = [each for each, _ in (*scored, *unscored, (due, seq))]
        if window.overfull(iteration, due_now) is not None:
            continue
        (scored if draw(st.booleans()) else unscored).append((due, seq))
    return window, iteration, scored, unscored


@given(situation=situations())
def test_a_choice_is_the_first_allowed_subset_and_without_one_it_waits(
    situation: tuple[Window, int, list[tuple[int, int]], list[tuple[int, int]]],
) -> None:
    window, iteration, scored, unscored = situation
    size = window.batch_groups
    allowed = []
    for subset in combinations(sorted(scored), size):
        left = [due for due, _ in {*scored, *unscored} - {*subset}]
        if slow_overfull(window, iteration + 1, left) is None:
            allowed.append(tuple(seq for _, seq in subset))
    answer = choose(window, iteration, size, scored, unscored)
    if allowed:
        # Subsets of a sorted list come in the order "smallest deadlines first, ties by number".
        assert answer == Choice(allowed[0])
    else:
        assert isinstance(answer, NotYetChosen)
        assert set(answer.for_seqs) <= {seq for _, seq in unscored}


@given(situation=situations())
def test_what_is_waited_for_makes_a_choice_possible(
    situation: tuple[Window, int, list[tuple[int, int]], list[tuple[int, int]]],
) -> None:
    window, iteration, scored, unscored = situation
    answer = choose(window, iteration, window.batch_groups, scored, unscored)
    if isinstance(answer, NotYetChosen) and answer.for_seqs:
        came = [group for group in unscored if group[1] in answer.for_seqs]
        rest = [group for group in unscored if group not in came]
        again = choose(window, iteration, window.batch_groups, scored + came, rest)
        enough = len(scored) + len(came) >= window.batch_groups
        assert isinstance(again, Choice) == enough


def test_taking_whatever_is_finished_first_breaks_two_iterations_later() -> None:
    window = Window(batch_groups=2, max_staleness=2)
    # Six groups of version 0, due by iteration 2; four of them are finished after iteration 0 began, two straggle.
    due = 2
    iteration_0 = choose(window, 0, 2, [(due, seq) for seq in (0, 1, 2, 3)], [(due, 4), (due, 5)])
    assert iteration_0 == Choice((0, 1))
    # Version 1 brings two newer groups, due by 3, finished at once. "Finished first" takes them in iteration 1:
    greedy_left = [due, due, due, due]
    assert window.overfull(1, greedy_left) is None, "after the step to 1 nothing shows yet"
    assert window.overfull(2, greedy_left) == 2, "four groups are due by 2, which trains two"
    # The rule takes the older ones, and the stragglers still fit iteration 2.
    scored = [(due, 2), (due, 3), (3, 6), (3, 7)]
    assert choose(window, 1, 2, scored, [(due, 4), (due, 5)]) == Choice((2, 3))
    # Where only newer ones are finished it waits, for names, although two groups are there to be trained.
    unscored = [(due, seq) for seq in (2, 3, 4, 5)]
    assert choose(window, 1, 2, [(3, 6), (3, 7)], unscored) == NotYetChosen((2, 3, 4, 5))


def test_later_work_overtakes_a_straggler_that_does_not_miss_its_window_by_it() -> None:
    window = Window(batch_groups=2, max_staleness=2)
    assert choose(window, 0, 2, [(3, 4), (3, 5)], [(2, 0)]) == Choice((4, 5))


def test_at_staleness_zero_the_batch_is_the_iteration_in_order_of_number() -> None:
    window = Window(batch_groups=3, max_staleness=0)
    assert choose(window, 4, 3, [(4, 14), (4, 12), (4, 13)], []) == Choice((12, 13, 14))
    assert choose(window, 4, 3, [(4, 14), (4, 12)], [(4, 13)]) == NotYetChosen((13,))


def test_the_last_iteration_may_be_small() -> None:
    window = Window(batch_groups=3, max_staleness=1)
    assert choose(window, 4, 2, [(5, 12), (4, 13)], []) == Choice((13, 12))


def test_without_enough_groups_it_waits_for_nobody_in_particular() -> None:
    assert choose(Window(2, 1), 0, 2, [(1, 0)], []) == NotYetChosen(())
