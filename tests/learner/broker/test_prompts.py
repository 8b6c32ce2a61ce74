"""The order of prompts is a function of the seed, and every epoch shows every problem once."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from prefixrl.common.messages import Prompt
from prefixrl.learner.broker.prompts import PromptOrder


def problems(count: int) -> list[Prompt]:
    return [Prompt(f"p{i}", f"{i}?", str(i)) for i in range(count)]


@given(count=st.integers(1, 30), seed=st.integers(0, 2**32), epoch=st.integers(0, 5))
def test_every_epoch_shows_every_problem_once(count: int, seed: int, epoch: int) -> None:
    order = PromptOrder(problems(count), seed, None)
    shown = [order.identity(epoch * count + place) for place in range(count)]
    assert Counter(shown) == Counter(f"p{i}" for i in range(count))


@given(
    count=st.integers(1, 30),
    seed=st.integers(0, 2**32),
    places=st.lists(st.integers(0, 200), max_size=20),
)
def test_a_place_holds_the_same_problem_in_whatever_order_places_are_asked_for(
    count: int, seed: int, places: list[int]
) -> None:
    first, second = (PromptOrder(problems(count), seed, None) for _ in range(2))
    found = {place: first.prompt(place) for place in places}
    assert all(second.prompt(place) == found[place] for place in reversed(places))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    order, other = (PromptOrder(problems(50), seed, None) for seed in (1, 2))
    first, second = ([order.identity(start + i) for i in range(50)] for start in (0, 50))
    assert first != second
    assert first != [other.identity(i) for i in range(50)]
    assert first != [f"p{i}" for i in range(50)]


def test_places_end_with_the_last_epoch_and_never_without_one() -> None:
    assert PromptOrder(problems(7), 1, 3).places == 21
    assert PromptOrder(problems(7), 1, None).places is None
