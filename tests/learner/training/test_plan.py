"""The plan: every row once, equal counts per rank, within the token budget, balanced."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixrl.learner.training.plan import Plan, plan, plan_iteration, rows_of_rank, shuffled

lengths_of_rows = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), min_size=1, max_size=60)
shapes = st.tuples(st.integers(1, 5), st.integers(1, 9), st.integers(1, 200))


def planned(lengths: list[tuple[int, int]], shape: tuple[int, int, int]) -> Plan:
    ranks, minibatches, budget = shape
    return plan(lengths, ranks, minibatches, budget)


@given(lengths_of_rows, shapes)
def test_every_row_is_trained_exactly_once(lengths: list[tuple[int, int]], shape: tuple[int, int, int]) -> None:
    rows = [row for minibatch in planned(lengths, shape) for share in minibatch for micro in share for row in micro]
    assert sorted(rows) == list(range(len(lengths)))


@given(lengths_of_rows, shapes)
def test_all_ranks_run_as_many_forwards_in_a_minibatch(
    lengths: list[tuple[int, int]], shape: tuple[int, int, int]
) -> None:
    for minibatch in planned(lengths, shape):
        assert len(minibatch) == shape[0]
        assert len({len(share) for share in minibatch}) == 1
        assert all(any(share[index] for share in minibatch) for index in range(len(minibatch[0])))


@given(lengths_of_rows, shapes)
def test_a_minibatch_is_a_contiguous_run_and_none_is_empty(
    lengths: list[tuple[int, int]], shape: tuple[int, int, int]
) -> None:
    minibatches = planned(lengths, shape)
    assert len(minibatches) == min(shape[1], len(lengths))
    runs = [sorted(row for share in minibatch for micro in share for row in micro) for minibatch in minibatches]
    assert [row for run in runs for row in run] == list(range(len(lengths)))
    assert max(map(len, runs)) - min(map(len, runs)) <= 1
    assert min(map(len, runs)) >= 1


@given(lengths_of_rows, shapes)
def test_only_a_single_row_exceeds_the_padded_token_budget(
    lengths: list[tuple[int, int]], shape: tuple[int, int, int]
) -> None:
    for minibatch in planned(lengths, shape):
        for micro in (micro for share in minibatch for micro in share if len(micro) > 1):
            assert max(sum(lengths[row]) for row in micro) * len(micro) <= shape[2]


@given(lengths_of_rows, shapes)
def test_ranks_differ_by_at_most_the_longest_row(lengths: list[tuple[int, int]], shape: tuple[int, int, int]) -> None:
    for minibatch in planned(lengths, shape):
        loads = [sum(sum(lengths[row]) for micro in share for row in micro) for share in minibatch]
        longest = max(sum(lengths[row]) for share in minibatch for micro in share for row in micro)
        assert max(loads) - min(loads) <= longest


def test_a_hand_computed_plan() -> None:
    lengths = [(3, 2), (1, 1), (4, 4), (2, 1), (5, 1), (1, 2)]
    assert plan(lengths, ranks=2, minibatches=2, micro_batch_tokens=10) == ((((2,),), ((0, 1),)), (((4,),), ((3, 5),)))


def test_a_rank_without_rows_gets_forwards_of_weight_zero() -> None:
    assert plan([(2, 2)], ranks=3, minibatches=4, micro_batch_tokens=100) == ((((0,),), ((),), ((),)),)


@given(st.integers(0, 80), st.integers(0, 2**63 - 1))
def test_shuffling_is_a_permutation_that_depends_on_the_seed_alone(rows: int, seed: int) -> None:
    assert sorted(shuffled(rows, seed)) == list(range(rows))
    assert shuffled(rows, seed) == shuffled(rows, seed)


def test_the_shuffle_is_the_same_on_every_machine() -> None:
    assert shuffled(8, 7) == (0, 6, 7, 2, 4, 5, 1, 3)


@given(lengths_of_rows, shapes, st.integers(0, 1000))
def test_the_ranks_shares_of_an_iteration_are_all_of_it(
    lengths: list[tuple[int, int]], shape: tuple[int, int, int], seed: int
) -> None:
    whole = plan_iteration(lengths, seed, *shape)
    shares = [rows_of_rank(whole, rank) for rank in range(shape[0])]
    assert sorted(row for share in shares for row in share) == list(range(len(lengths)))
    assert all(list(share) == sorted(share) for share in shares)


@given(lengths_of_rows, shapes, st.integers(0, 1000))
def test_the_minibatches_of_an_iteration_hold_the_same_rows_for_any_number_of_ranks(
    lengths: list[tuple[int, int]], shape: tuple[int, int, int], seed: int
) -> None:
    def contents(ranks: int) -> list[set[int]]:
        whole = plan_iteration(lengths, seed, ranks, shape[1], shape[2])
        return [{row for share in minibatch for micro in share for row in micro} for minibatch in whole]

    assert contents(1) == contents(shape[0])


@pytest.mark.parametrize(
    ("lengths", "shape", "named"),
    [([], (1, 1, 1), "no rows"), ([(1, 1)], (0, 1, 1), "ranks"), ([(1, 1)], (1, 0, 1), "minibatches")],
)
def test_an_impossible_plan_is_refused(lengths: list[tuple[int, int]], shape: tuple[int, int, int], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        planned(lengths, shape)
