"""The ledger with a prompt filter and over-sampling, step by step."""

from fractions import Fraction
from typing import Literal

import pytest

from prefixrl.common.journal.records import Record
from prefixrl.learner.broker.groups.filtering import AccuracyFilter, Starved
from prefixrl.learner.broker.groups.ledger import Ledger
from prefixrl.learner.broker.groups.states import LedgerLimits
from prefixrl.learner.broker.groups.window import Choice, NotYetChosen, Window
from support.broker.ledger_steps import prefixes, sample, score
from support.broker.ledger_world import Places

MIXED = AccuracyFilter(0.01, 0.99, limit_groups=6, min_pass_rate=0.2)


def make(
    window: Window, places: int | None = None, accuracy_filter: AccuracyFilter | None = MIXED
) -> Ledger:
    return Ledger(window, LedgerLimits(1, 2, 3), Places(places), accuracy_filter)


@pytest.mark.parametrize(
    ("rewards", "cause"),
    [
        pytest.param((0.0, 0.0), "accuracy 0", id="all wrong"),
        pytest.param((1.0, 1.0), "accuracy 1", id="all right"),
        pytest.param((1.0, 0.0), "", id="half right"),
        pytest.param((1.0,), "accuracy 1", id="one right row"),
        pytest.param((0.0,), "accuracy 0", id="one wrong row"),
        pytest.param((0.004, 0.0), "accuracy outside band", id="below the band"),
        pytest.param((0.02, 0.0), "", id="inside, low"),
        pytest.param((0.3, 0.2), "", id="inside"),
    ],
)
def test_a_group_outside_the_band_ends_with_the_cause_and_is_not_requeued(
    rewards: tuple[float, ...], cause: str
) -> None:
    ledger = make(Window(1, 0, iterations=1))
    (seq,) = sample(ledger)
    assert score(ledger, seq, *rewards)
    ledger.check()
    if not cause:
        assert ledger.batch(0) == Choice((seq,))
        return
    assert ledger.counts.causes == {f"filtered: {cause}": 1}
    assert (ledger.counts.filtered, ledger.counts.expired) == (1, 0)
    (next_seq,) = sample(ledger)
    assert ledger.prompt_index(next_seq) == 1, "the next prompt, not the same one"


@pytest.mark.parametrize(
    ("rule", "cut", "passes"), [("any", 0, True), ("any", 1, False), ("all", 1, True)]
)
def test_groups_with_cut_texts_are_left_out_whole_as_the_rule_says(
    rule: Literal["any", "all"], cut: int, passes: bool
) -> None:
    ledger = make(Window(1, 0, iterations=1), None, AccuracyFilter(0.0, 1.0, 6, 0.2, rule))
    (seq,) = sample(ledger)
    score(ledger, seq, 1.0, 1.0, cut=cut)
    ledger.check()
    if passes:
        assert ledger.batch(0) == Choice((seq,))
    else:
        assert ledger.counts.causes == {"filtered: a text cut by the length limit": 1}


def test_a_group_of_cut_texts_alone_is_filtered_and_its_prompt_not_tried_again() -> None:
    ledger = make(Window(1, 0, iterations=1), None, AccuracyFilter(0.0, 1.0, 6, 0.2, "all"))
    (seq,) = sample(ledger)
    score(ledger, seq, cut=2)
    assert ledger.counts.causes == {"filtered: all texts cut by the length limit": 1}
    assert ledger.counts.failed == 0


def test_both_ends_of_the_band_pass_whatever_the_rounding() -> None:
    band = AccuracyFilter(0.2, 0.8, 10, 0.0)
    for rows in (5, 10, 15, 20):
        for right in range(rows + 1):
            rewards = [1.0] * right + [0.0] * (rows - right)
            assert (band.objection(rewards) is None) == (5 * right in range(rows, 4 * rows + 1))
    assert AccuracyFilter(0.3, 1.0, 10, 0.0).objection([0.1, 0.2, 0.6]) is None


def test_rows_without_a_verdict_are_not_part_of_the_mean() -> None:
    ledger = make(Window(1, 0, iterations=1), None, AccuracyFilter(0.5, 0.5, 6, 0.2))
    (seq,) = sample(ledger)
    # One right, one wrong and two that could not be judged: half right, not a quarter.
    score(ledger, seq, 1.0, 0.0, errors=2)
    assert ledger.batch(0) == Choice((seq,))


def test_a_group_of_which_one_row_could_be_judged_is_all_right_or_all_wrong() -> None:
    ledger = make(Window(1, 0, iterations=1))
    (seq,) = sample(ledger)
    score(ledger, seq, 1.0, errors=1)
    assert ledger.counts.causes == {"filtered: accuracy 1": 1}


def test_a_group_without_any_verdict_is_a_failure_and_not_filtered() -> None:
    ledger = make(Window(1, 0, iterations=1))
    (seq,) = sample(ledger)
    score(ledger, seq, errors=2)
    assert ledger.counts.causes == {"expired: verifier error on every row: process died": 1}
    assert ledger.pass_rate and ledger.pass_rate.judged == 0


def test_filtered_groups_are_made_good_within_the_iteration() -> None:
    ledger = make(Window(2, 0, iterations=1))
    first, second = sample(ledger)
    score(ledger, first, 0.0, 0.0)
    score(ledger, second, 1.0, 0.0)
    assert isinstance(ledger.batch(0), NotYetChosen)
    (third,) = sample(ledger)
    score(ledger, third, 0.0, 1.0)
    assert ledger.batch(0) == Choice((second, third))


def test_an_iteration_of_which_everything_is_filtered_waits_and_ends_at_the_limit() -> None:
    ledger = make(Window(2, 0, iterations=3))
    for judged in range(6):
        assert isinstance(ledger.batch(0), NotYetChosen), f"{judged} of 6 groups are judged"
        seq = min(group.seq for group in ledger.live()) if judged % 2 else sample(ledger)[0]
        score(ledger, seq, 0.0, 0.0)
    assert ledger.batch(0) == Starved("filter")
    ledger.check()


def test_a_share_below_the_limit_ends_the_run_and_one_at_the_limit_does_not() -> None:
    for passing, ends in ((1, True), (2, False)):
        ledger = make(Window(3, 0, iterations=3))
        for judged in range(6):
            pending = [group.seq for group in ledger.live() if group.state == "scoring"]
            seq = pending[0] if pending else sample(ledger)[0]
            score(ledger, seq, float(judged < passing), 0.0)
        assert isinstance(ledger.batch(0), Starved if ends else NotYetChosen)


def test_when_all_data_is_filtered_the_run_ends_by_name_and_not_as_if_finished() -> None:
    ledger = make(Window(4, 1), places=3)
    for seq in sample(ledger):
        score(ledger, seq, 1.0, 1.0)
    assert ledger.batch(0) == Starved("data")


def test_with_epochs_the_last_batch_is_what_the_filter_leaves() -> None:
    ledger = make(Window(2, 1), places=5)
    trained = []
    for iteration in range(2):
        for seq in sample(ledger, iteration):
            score(ledger, seq, 1.0, float(seq in (0, 3)), version=iteration)
        choice = ledger.batch(iteration)
        assert isinstance(choice, Choice)
        ledger.trained(iteration)
        trained.append(choice.seqs)
    assert [len(seqs) for seqs in trained] == [2, 1]
    assert ledger.batch(2) is None
    assert ledger.counts.filtered == 2 and ledger.outstanding == 0


def test_more_groups_are_under_way_than_fit_and_fewer_as_groups_pass() -> None:
    ledger = make(Window(4, 0, Fraction(3, 2), 2))
    seqs = sample(ledger)
    assert len(seqs) == 6
    score(ledger, seqs[0], 1.0, 0.0)
    # Three are still needed: five are under way, ceil(1.5 x 3) = 5 may be.
    assert sample(ledger) == []
    score(ledger, seqs[1], 0.0, 0.0)
    assert len(sample(ledger)) == 1


def test_a_group_that_fits_no_more_is_surplus_and_its_prompt_comes_back_without_a_failure() -> None:
    ledger = make(Window(2, 0, Fraction(2), 2))
    seqs = sample(ledger)
    assert seqs == [0, 1, 2, 3]
    score(ledger, 2, 1.0, 0.0)
    score(ledger, 3, 1.0, 0.0)
    assert ledger.counts.causes == {"expired: surplus": 2}
    assert not score(ledger, 0, 1.0, 0.0), "a late result"
    assert ledger.counts.duplicates_ignored == 1
    ledger.check()
    assert ledger.batch(0) == Choice((2, 3))
    ledger.trained(0)
    again = sample(ledger, version=1)
    assert [ledger.prompt_index(seq) for seq in again] == [0, 1, 4, 5]
    assert [group.requeues for group in ledger.live()] == [0, 0, 0, 0]


def test_a_straggler_is_surplus_once_the_last_iteration_it_could_be_in_is_chosen() -> None:
    ledger = make(Window(1, 1, Fraction(2), 5))
    assert sample(ledger) == [0, 1, 2, 3]  # version 0, due by iteration 1
    score(ledger, 3, 1.0, 0.0)
    assert ledger.batch(0) == Choice((3,))
    assert ledger.counts.expired == 0, "iteration 1 can still take one of the others"
    ledger.trained(0)
    (straggler, *others) = [group.seq for group in ledger.live()]
    new = sample(ledger, version=1)
    assert new, "due by iteration 2"
    score(ledger, new[0], 1.0, 0.0, version=1)
    assert ledger.batch(1) == Choice((new[0],)), "taken although stragglers are due: they may go"
    causes = ledger.counts.causes["expired: surplus"]
    assert causes == 1 + len(others)
    assert not score(ledger, straggler, 1.0, 0.0)


def test_nothing_that_was_accepted_is_ever_surplus() -> None:
    ledger = make(Window(1, 1, Fraction(2), 5))
    sample(ledger)
    score(ledger, 0, 1.0, 0.0)
    score(ledger, 1, 1.0, 0.0)
    assert {group.seq for group in ledger.live()} == {0, 1}
    for iteration in range(2):
        assert ledger.batch(iteration) == Choice((iteration,))
        ledger.trained(iteration)


def test_groups_that_wait_to_be_sampled_again_do_not_keep_each_other_out() -> None:
    ledger = make(Window(4, 0, Fraction(2), 1))
    items = [ledger.start_sampling(0) for _ in range(8)]
    for item in items[:3]:
        assert item is not None
        ledger.take_prefixes([prefixes(ledger, seq) for seq in item.seqs], 0, "d", 0.0)
        score(ledger, item.seqs[0], 1.0, 0.0)
    for item in items[3:]:
        assert item is not None
        ledger.give_back(item, died=True)
    # One more is needed, two may be under way for it, five wait.
    assert len(sample(ledger)) == 2


@pytest.mark.parametrize("completed", [0, 1])
def test_a_restart_rebuilds_filter_surplus_and_the_order_of_prompts(completed: int) -> None:
    window = Window(2, 0, Fraction(2), 3)
    ledger = make(window)
    sample(ledger)
    score(ledger, 0, 0.0, 0.0)
    score(ledger, 2, 1.0, 0.0)
    score(ledger, 3, 1.0, 0.0)
    ledger.batch(0)
    records: list[Record] = list(ledger.records)
    if completed:
        ledger.trained(0)
    again = make(window)
    again.replay(records, completed)
    again.check()
    assert again.records == [], "everything was written down already"
    assert again.counts == ledger.counts
    assert again.pass_rate == ledger.pass_rate
    assert again.batches == ledger.batches
    assert sample(again, completed) == sample(ledger, completed)
    assert [again.prompt_index(each.seq) for each in again.live()] == [
        ledger.prompt_index(each.seq) for each in ledger.live()
    ]


def test_a_torn_journal_that_lost_the_surplus_records_ends_the_surplus_again() -> None:
    window = Window(2, 0, Fraction(2), 3)
    ledger = make(window)
    sample(ledger)
    score(ledger, 2, 1.0, 0.0)
    score(ledger, 3, 1.0, 0.0)
    records = [each for each in ledger.records if getattr(each, "cause", "") != "surplus"]
    again = make(window)
    again.replay(records, 0)
    again.check()
    assert ledger.batch(0) == again.batch(0)
    # What waited for a new version is not surplus before the run ends: it is sampled again.
    assert again.outstanding == 4


def test_a_late_result_does_not_enter_an_iteration_that_is_handed_out_already() -> None:
    ledger = make(Window(1, 1, iterations=4), accuracy_filter=None)
    first, second = ledger.start_sampling(0), ledger.start_sampling(0)
    assert first is not None and second is not None
    score(ledger, 0, 1.0)
    ledger.batch(0)
    ledger.trained(0)
    # Group 1 is lost, sampled again at version 1, and overtaken by group 2.
    ledger.give_back(second, died=False)
    assert sample(ledger, version=1) == [1, 2]
    score(ledger, 2, 1.0, version=1)
    assert ledger.batch(1) == Choice((2,))
    # Its lost worker delivers it after all, of version 0: iteration 1 was its last, and that is handed out.
    assert not score(ledger, 1, 1.0, version=0)
    assert score(ledger, 1, 1.0, version=1)
    ledger.trained(1)
    assert ledger.batch(2) == Choice((1,))


SPARING = AccuracyFilter(0.2, 0.8, limit_groups=2, min_pass_rate=0.9, fills=True)


def drawn(window: Window, *rewards: tuple[float, float], places: int | None = None) -> Ledger:
    """A ledger of which so many groups were judged, one after the other."""
    ledger = make(window, places, SPARING)
    for seq, each in zip(sample(ledger), rewards, strict=False):
        score(ledger, seq, *each)
        ledger.check()
    return ledger


def test_failed_groups_fill_an_iteration_once_f_times_as_many_failed_as_it_lacks() -> None:
    right, wrong, mixed = (1.0, 1.0), (0.0, 0.0), (1.0, 0.0)
    window = Window(3, 0, Fraction(2), iterations=2)
    early = drawn(window, right, mixed, wrong, wrong)
    assert isinstance(early.batch(0), NotYetChosen), "two are missing and three failed"
    assert early.states()["spare"] == 3
    ledger = drawn(window, right, mixed, wrong, wrong, wrong)
    choice = ledger.batch(0)
    assert isinstance(choice, Choice)
    assert sorted(choice.seqs) == [0, 1, 2], "the one that passed, and the first that failed"
    ledger.check()
    assert ledger.counts.causes == {"filtered: accuracy 0": 2, "expired: surplus": 1}
    assert ledger.pass_rate and (ledger.pass_rate.passed, ledger.pass_rate.judged) == (0, 2)


def test_spares_come_last_and_end_filtered_where_nobody_misses_them() -> None:
    ledger = drawn(Window(2, 0, Fraction(2), iterations=1), (0.0, 0.0), (1.0, 0.0), (1.0, 0.0))
    assert ledger.batch(0) == Choice((1, 2))
    assert ledger.counts.causes["filtered: accuracy 0"] == 1


def test_a_ledger_that_is_rebuilt_has_its_spares_and_fills_with_the_same_ones() -> None:
    window = Window(2, 0, Fraction(2), iterations=1)
    ledger = drawn(window, (0.0, 0.0), (1.0, 0.0), (1.0, 1.0))
    successor = make(window, None, SPARING)
    successor.replay(ledger.records, 0)
    assert successor.states()["spare"] == ledger.states()["spare"] == 2
    assert ledger.batch(0) == successor.batch(0) == Choice((0, 1))


def test_no_run_with_spares_waits_for_groups_that_never_pass() -> None:
    ledger = drawn(Window(2, 0, Fraction(2)), *[(0.0, 0.0)] * 3, places=3)
    choice = ledger.batch(0)
    assert isinstance(choice, Choice) and len(choice.seqs) == 2
    ledger.check()
    assert ledger.counts.issued == 3 and ledger.counts.filtered == 1
