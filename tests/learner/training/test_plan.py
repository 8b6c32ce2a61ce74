"""The plan: every row once, equal counts per rank, within the token budget, balanced; groups stay together."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixrl.learner.training import plan as planning

Rows = tuple[list[tuple[int, int]], list[int]]


@st.composite
def grouped_rows(draw: st.DrawFn) -> Rows:
    """Lengths and groups of up to 60 rows; rows of a group have one prompt and stand together."""
    lengths, groups = [], []
    for group in range(draw(st.integers(1, 12))):
        prompt = draw(st.integers(1, 40))
        for sampled in draw(st.lists(st.integers(1, 20), min_size=1, max_size=8)):
            lengths.append((prompt, sampled))
            groups.append(group)
    return lengths[:60], groups[:60]


shapes = st.tuples(st.integers(1, 5), st.integers(1, 9), st.integers(1, 200))


def planned(rows: Rows, shape: tuple[int, int, int], is_shared: bool = True) -> planning.Plan:
    ranks, minibatches, budget = shape
    return planning.plan(*rows, ranks, minibatches, budget, is_shared)


def flat(micros: object) -> list[int]:
    """All rows in a part of a plan."""
    return [micros] if isinstance(micros, int) else [row for part in micros for row in flat(part)]  # type: ignore[attr-defined]


@given(grouped_rows(), shapes, st.booleans())
def test_every_row_is_trained_exactly_once(
    rows: Rows, shape: tuple[int, int, int], is_shared: bool
) -> None:
    assert sorted(flat(planned(rows, shape, is_shared))) == list(range(len(rows[0])))


@given(grouped_rows(), shapes, st.booleans())
def test_the_groups_of_a_rank_hold_every_row_that_its_plan_gives_it_and_no_other_group_is_fetched(
    rows: Rows, shape: tuple[int, int, int], is_shared: bool
) -> None:
    made, groups, fetched = planned(rows, shape, is_shared), rows[1], set[int]()
    for rank in range(shape[0]):
        own = planning.groups_of_rank(made, groups, rank)
        assert own == sorted({groups[row] for minibatch in made for row in flat(minibatch[rank])})
        fetched |= set(own)
    assert fetched == set(groups)


@given(grouped_rows(), shapes, st.booleans())
def test_all_ranks_run_as_many_forwards_in_a_minibatch(
    rows: Rows, shape: tuple[int, int, int], is_shared: bool
) -> None:
    for minibatch in planned(rows, shape, is_shared):
        assert len(minibatch) == shape[0]
        assert len({len(share) for share in minibatch}) == 1
        assert all(any(share[index] for share in minibatch) for index in range(len(minibatch[0])))


@given(grouped_rows(), shapes)
def test_a_minibatch_is_a_contiguous_run_and_none_is_empty(
    rows: Rows, shape: tuple[int, int, int]
) -> None:
    minibatches = planned(rows, shape)
    assert len(minibatches) == min(shape[1], len(rows[0]))
    runs = [sorted(flat(minibatch)) for minibatch in minibatches]
    assert [row for run in runs for row in run] == list(range(len(rows[0])))
    assert max(map(len, runs)) - min(map(len, runs)) <= 1
    assert min(map(len, runs)) >= 1


@given(grouped_rows(), shapes, st.booleans())
def test_only_a_single_row_exceeds_the_padded_token_budget(
    rows: Rows, shape: tuple[int, int, int], is_shared: bool
) -> None:
    for minibatch in planned(rows, shape, is_shared):
        for micro in (micro for share in minibatch for micro in share if len(flat(micro)) > 1):
            assert (
                max(planning.line_tokens(line, rows[0]) for line in micro) * len(micro) <= shape[2]
            )


@given(grouped_rows(), shapes)
def test_ranks_differ_by_at_most_the_longest_line(rows: Rows, shape: tuple[int, int, int]) -> None:
    for minibatch in planned(rows, shape):
        shares = [
            [planning.line_tokens(line, rows[0]) for micro in share for line in micro]
            for share in minibatch
        ]
        loads = [sum(share) for share in shares]
        assert max(loads) - min(loads) <= max(max(share) for share in shares if share)


@given(grouped_rows(), shapes)
def test_no_rank_has_more_than_the_mean_and_one_row_where_prompts_are_not_shared(
    rows: Rows, shape: tuple[int, int, int]
) -> None:
    for minibatch in planned(rows, shape, is_shared=False):
        loads = [sum(sum(rows[0][row]) for row in flat(share)) for share in minibatch]
        longest = max(sum(rows[0][row]) for row in flat(minibatch))
        assert max(loads) <= sum(loads) / len(loads) + longest


def test_rows_with_their_own_prompts_are_dealt_by_what_they_cost_then() -> None:
    # Shared, the long prompt weighs as much as the rest; alone, each of its rows does.
    lengths, groups = [(100, 10)] * 4 + [(10, 10)] * 4, [0] * 4 + [1] * 4
    for is_shared, most in ((True, 140), (False, 260)):
        (minibatch,) = planning.plan(lengths, groups, 2, 1, 10_000, is_shared)
        loads = [
            sum(planning.line_tokens(line, lengths) for micro in share for line in micro)
            for share in minibatch
        ]
        assert max(loads) == most


@given(grouped_rows(), shapes)
def test_the_rows_of_a_line_are_of_one_group_and_each_alone_where_prompts_are_not_shared(
    rows: Rows, shape: tuple[int, int, int]
) -> None:
    shared, alone = (planned(rows, shape, is_shared) for is_shared in (True, False))
    for whole in (shared, alone):
        for line in (
            line for minibatch in whole for share in minibatch for micro in share for line in micro
        ):
            assert len({rows[1][row] for row in line}) == 1
            assert whole is shared or len(line) == 1


def test_a_group_is_one_line_and_one_forward_where_it_fits() -> None:
    lengths, groups = [(200, 32)] * 16, [0] * 8 + [1] * 8
    first, second = tuple(range(8)), tuple(range(8, 16))
    assert planning.plan(lengths, groups, 1, 1, 16_384, True) == ((((first, second),),),)
    assert planning.plan(lengths, groups, 2, 1, 16_384, True) == ((((first,),), ((second,),)),)
    assert planning.forward_tokens(planning.plan(lengths, groups, 1, 1, 16_384, True), lengths) == (
        912,
        912,
    )
    assert planning.forward_tokens(
        planning.plan(lengths, groups, 1, 1, 16_384, False), lengths
    ) == (3712, 3712)


def test_a_group_too_long_for_a_forward_is_cut_into_even_lines_that_repeat_the_prompt() -> None:
    lengths, groups = [(200, 32)] * 8, [0] * 8
    assert planning.plan(lengths, groups, 1, 1, 400, True) == (
        ((((0, 1, 2, 3),), ((4, 5, 6, 7),)),),
    )
    assert planning.plan(lengths, groups, 1, 1, 1, True) == (
        (tuple(((row,),) for row in range(8)),),
    )


def test_one_group_is_cut_where_that_keeps_ranks_busy() -> None:
    lengths = [(20, 60)] * 8
    assert planning.plan(lengths, [0] * 8, 2, 1, 10_000, True) == (
        (((((0, 1, 2, 3),),), (((4, 5, 6, 7),),))),
    )
    # Prompts so long beside rows that a second one costs a rank as much as the rows it takes off the other.
    assert len(planning.plan([(1000, 1)] * 2, [0] * 2, 2, 1, 10_000, True)[0][1][0]) == 1


@given(st.integers(1, 4000), st.integers(1, 3000), st.integers(1, 40))
def test_the_cheapest_number_of_rows_is_the_one_that_a_search_finds(
    prompt: int, sampled: int, rows: int
) -> None:
    def cost(count: int) -> float:
        tokens = prompt + count * sampled
        return (tokens + tokens**2 / planning.SQUARE_TOKENS) / count

    actual = min(planning.cheapest_rows(prompt, sampled * rows, rows), rows)
    best = min(range(1, rows + 1), key=cost)
    # The formula is that of the continuous minimum, rounded down.
    assert abs(actual - best) <= 1


@given(grouped_rows(), st.integers(1, 2000))
def test_micro_batches_cost_as_little_as_any_way_to_cut_the_sorted_lines(
    rows: Rows, budget: int
) -> None:
    def least_cost(sizes: tuple[int, ...]) -> int:
        if not sizes:
            return 0
        fitting = [
            count for count in range(1, len(sizes) + 1) if count == 1 or sizes[0] * count <= budget
        ]
        return min(
            sizes[0] * count + planning.FORWARD_TOKENS + least_cost_of[sizes[count:]]
            for count in fitting
        )

    lengths, groups = rows
    ((share,),) = planning.plan(lengths, groups, 1, 1, budget, True)
    micros = [[planning.line_tokens(line, lengths) for line in micro] for micro in share]
    sizes = tuple(sorted((size for micro in micros for size in micro), reverse=True))
    least_cost_of: dict[tuple[int, ...], int] = {}
    for first in reversed(range(len(sizes) + 1)):
        least_cost_of[sizes[first:]] = least_cost(sizes[first:])
    assert (
        sum(max(micro) * len(micro) + planning.FORWARD_TOKENS for micro in micros)
        == least_cost_of[sizes]
    )


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("budget", [4096, 16_384])
@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("is_direct", [True, False])
def test_at_most_a_tenth_of_the_computed_tokens_is_padding_in_a_batch_of_true_size(
    is_direct: bool, is_shared: bool, budget: int, ranks: int
) -> None:
    draws = np.random.default_rng(0)
    prompts = np.exp(draws.normal(np.log(100), 0.5, 512)).astype(int) + 20
    answers = (
        np.exp(draws.normal(np.log(500), 0.7, 4096)).astype(int).clip(1, 3000)
        if is_direct
        else [32] * 4096
    )
    lengths = [(int(prompts[row // 8]), int(sampled)) for row, sampled in enumerate(answers)]
    tokens, padded = planning.forward_tokens(
        planning.plan_iteration(
            lengths, [row // 8 for row in range(4096)], 1, ranks, 8, budget, is_shared
        ),
        lengths,
    )
    assert tokens >= 0.9 * padded


def test_a_hand_computed_plan() -> None:
    lengths = [(3, 2), (1, 1), (4, 4), (2, 1), (5, 1), (1, 2)]
    alone = [0, 1, 2, 3, 4, 5]
    assert planning.plan(
        lengths, alone, ranks=2, minibatches=2, micro_batch_tokens=10, is_shared=True
    ) == (
        ((((2,),),), (((0,), (1,)),)),
        ((((4,),),), (((3,), (5,)),)),
    )


def test_a_rank_without_rows_gets_forwards_of_weight_zero() -> None:
    assert planning.plan([(2, 2)], [0], 3, 4, 100, True) == (((((0,),),), ((),), ((),)),)


@given(st.integers(0, 80), st.integers(0, 2**63 - 1))
def test_shuffling_is_a_permutation_that_depends_on_the_seed_alone(count: int, seed: int) -> None:
    assert sorted(planning.shuffled(count, seed)) == list(range(count))
    assert planning.shuffled(count, seed) == planning.shuffled(count, seed)


def test_the_shuffle_is_the_same_on_every_machine() -> None:
    assert planning.shuffled(8, 7) == (0, 6, 7, 2, 4, 5, 1, 3)
    assert planning.shuffled_rows([5, 5, 2, 2, 2, 9], 3) == (5, 2, 3, 4, 0, 1)


@given(grouped_rows(), shapes, st.integers(0, 1000))
def test_the_ranks_shares_of_an_iteration_are_all_of_it(
    rows: Rows, shape: tuple[int, int, int], seed: int
) -> None:
    whole = planning.plan_iteration(*rows, seed, *shape)
    shares = [planning.rows_of_rank(whole, rank) for rank in range(shape[0])]
    assert sorted(row for share in shares for row in share) == list(range(len(rows[0])))
    assert all(list(share) == sorted(share) for share in shares)


@given(grouped_rows(), shapes, st.integers(0, 1000))
def test_the_minibatches_of_an_iteration_hold_the_same_rows_for_any_number_of_ranks(
    rows: Rows, shape: tuple[int, int, int], seed: int
) -> None:
    def contents(ranks: int) -> list[set[int]]:
        return [
            set(flat(minibatch))
            for minibatch in planning.plan_iteration(*rows, seed, ranks, shape[1], shape[2])
        ]

    assert contents(1) == contents(shape[0])


@given(grouped_rows(), shapes, st.integers(0, 1000))
def test_at_most_one_group_is_torn_at_each_edge_of_a_minibatch(
    rows: Rows, shape: tuple[int, int, int], seed: int
) -> None:
    minibatches = [
        {rows[1][row] for row in flat(each)}
        for each in planning.plan_iteration(*rows, seed, *shape)
    ]
    assert sum(map(len, minibatches)) - len(set(rows[1])) <= len(minibatches) - 1


@pytest.mark.parametrize(
    ("lengths", "shape", "named"),
    [
        ([], (1, 1, 1), "no rows"),
        ([(1, 1)], (0, 1, 1), "ranks"),
        ([(1, 1)], (1, 0, 1), "minibatches"),
    ],
)
def test_an_impossible_plan_is_refused(
    lengths: list[tuple[int, int]], shape: tuple[int, int, int], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        planned((lengths, [0] * len(lengths)), shape)
