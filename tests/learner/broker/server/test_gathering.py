"""The messages of one turn: what comes close together, and no more."""

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

from prefixrl.learner.broker.server import GATHER_S, MESSAGES, gathered


def source(messages: Iterator[Any], waits_s: list[float]) -> Callable[[float], Any]:
    def receive(wait_s: float) -> Any:
        waits_s.append(wait_s)
        return next(messages)

    return cast(Callable[[float], Any], receive)


def test_only_the_first_message_is_waited_for_and_what_comes_behind_it_is_taken_too() -> None:
    waits_s: list[float] = []
    came = itertools.chain(["a", None, "b"], itertools.repeat(None))
    assert list(gathered(source(came, waits_s), 0.7)) == ["a", "b"]
    assert waits_s[0] == 0.7 and set(waits_s[1:]) == {0.0}


def test_a_turn_is_not_over_before_the_time_in_which_it_gathers() -> None:
    began_s = time.monotonic()
    assert list(gathered(source(itertools.chain("a", itertools.repeat(None)), []), 0.7)) == ["a"]
    assert time.monotonic() - began_s >= GATHER_S


def test_a_turn_without_a_message_ends_with_its_wait() -> None:
    waits_s: list[float] = []
    assert list(gathered(source(itertools.repeat(None), waits_s), 0.7)) == []
    assert waits_s == [0.7]


def test_a_turn_takes_a_bounded_number_of_messages() -> None:
    assert list(gathered(source(itertools.count(1), []), 0.7)) == list(range(1, MESSAGES + 1))
