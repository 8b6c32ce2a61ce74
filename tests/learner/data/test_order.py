"""The order of prompts is a function of the seed, and every epoch shows every problem once."""

from collections import Counter

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from prefixrl.common.wire.messages.groups import Prompt
from prefixrl.learner.data.order import PERMUTATIONS_KEPT, PLACES_KEPT, Mixture, PromptOrder


def problems(count: int) -> list[Prompt]:
    return [Prompt(f"p{i}", f"{i}?", str(i)) for i in range(count)]


@given(count=st.integers(1, 30), seed=st.integers(0, 2**32), epoch=st.integers(0, 5))
def test_every_epoch_shows_every_problem_once(count: int, seed: int, epoch: int) -> None:
    order = PromptOrder(problems(count), seed, None)
    shown = [order.prompt(epoch * count + place).prompt_id for place in range(count)]
    assert Counter(shown) == Counter(f"p{i}" for i in range(count))


@given(
    count=st.integers(1, 30),
    seed=st.integers(0, 2**32),
    places=st.lists(st.integers(0, 200), max_size=20),
)
def test_a_prompt_index_holds_the_same_problem_in_whatever_order_it_is_asked_for(
    count: int, seed: int, places: list[int]
) -> None:
    first, second = (PromptOrder(problems(count), seed, None) for _ in range(2))
    actual = {place: first.prompt(place) for place in places}
    assert all(second.prompt(place) == actual[place] for place in reversed(places))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    order, other = (PromptOrder(problems(50), seed, None) for seed in (1, 2))
    first, second = ([order.prompt(start + i).prompt_id for i in range(50)] for start in (0, 50))
    assert first != second
    assert first != [other.prompt(i).prompt_id for i in range(50)]
    assert first != [f"p{i}" for i in range(50)]


def test_places_end_with_the_last_epoch_and_never_without_one() -> None:
    assert PromptOrder(problems(7), 1, 3).total == 21
    assert PromptOrder(problems(7), 1, None).total is None


sources = st.lists(st.tuples(st.integers(1, 12), st.floats(0.2, 5)), min_size=1, max_size=4)


def mixed(given: list[tuple[int, float]], seed: int) -> tuple[PromptOrder, list[list[str]]]:
    """An order over sources of these sizes and weights, and the ids of each."""
    sizes, weights = zip(*given, strict=True)
    try:
        mixture = Mixture(sizes, weights)
    except ValueError as error:
        assert "none of the" in str(error)
        assume(False)
    ids = [[f"{source}-{i}" for i in range(size)] for source, size in enumerate(sizes)]
    prompts = [Prompt(each, "?", "1") for names in ids for each in names]
    return PromptOrder(prompts, seed, None, mixture), ids


@given(given=sources, seed=st.integers(0, 2**32))
def test_every_epoch_gives_every_source_its_share_to_within_a_place(
    given: list[tuple[int, float]], seed: int
) -> None:
    order, ids = mixed(given, seed)
    places, weight = sum(map(len, ids)), sum(weight for _, weight in given)
    for epoch in range(3):
        shown = [order.prompt(epoch * places + i).prompt_id for i in range(places)]
        counts = Counter(each.partition("-")[0] for each in shown)
        for source, (_, own) in enumerate(given):
            assert abs(counts[str(source)] - own / weight * places) <= 1


@given(given=sources, seed=st.integers(0, 2**32))
def test_a_source_is_shown_whole_before_any_of_its_problems_comes_again(
    given: list[tuple[int, float]], seed: int
) -> None:
    order, ids = mixed(given, seed)
    epochs = 4
    seen = Counter(order.prompt(place).prompt_id for place in range(epochs * sum(map(len, ids))))
    for names in ids:
        counts = [seen[name] for name in names]
        assert max(counts) - min(counts) <= 1


def test_a_mixture_is_the_same_whoever_asks_and_in_whatever_order() -> None:
    given = [(3, 0.7), (40, 0.3)]
    first, second = mixed(given, 5)[0], mixed(given, 5)[0]
    shown = [first.prompt(place).prompt_id for place in range(200)]
    assert [second.prompt(place).prompt_id for place in reversed(range(200))] == shown[::-1]
    assert shown != [mixed(given, 6)[0].prompt(place).prompt_id for place in range(200)]
    assert shown[:43] != sorted(shown[:43]), "sources are interleaved"


def test_a_weight_that_gives_a_source_no_place_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"none of the 10 prompts of an epoch \(they get \[10, 0\]\)"
    ):
        Mixture([5, 5], [1000.0, 1.0])


@pytest.mark.parametrize(("places", "kept"), [(PLACES_KEPT, PERMUTATIONS_KEPT), (90, 10), (1, 8)])
def test_an_epoch_long_ago_has_the_order_that_it_had(
    places: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefixrl.learner.data.order.PLACES_KEPT", places)
    order = PromptOrder(problems(9), 5, None)
    first = [order.prompt(index) for index in range(9)]
    for epoch in range(1, 2 * PERMUTATIONS_KEPT):
        order.prompt(9 * epoch)
        assert len(order._permutations) <= kept
    assert [order.prompt(index) for index in range(9)] == first
