"""Examples of a warm start: they are what a rollout could have written, and every one is used."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixrl.common.wire.packing import TokenIds
from prefixrl.learner.training.warm_start.examples import (
    Example,
    PrefixForm,
    batches_of,
    examples_of,
    micro_batches,
    split_examples,
)

FORM = PrefixForm(most_tokens=4, ends=frozenset({7, 9}), end=9, never=frozenset({5}))
"""At most four tokens; 7 and 9 end a prefix, 5 is never drawn."""


def ids(*tokens: int) -> TokenIds:
    return np.array(tokens, dtype=np.int32)


@pytest.mark.parametrize(
    ("text", "prefix"),
    [
        pytest.param((1, 2, 3, 4, 6), (1, 2, 3, 4), id="a longer text is cut"),
        pytest.param((1, 2, 3, 4), (1, 2, 3, 4), id="as long as a prefix may be"),
        pytest.param((1, 7, 3, 4), (1, 7), id="the first end is its last action"),
        pytest.param((1, 2, 3, 9), (1, 2, 3, 9), id="an end at the last place"),
        pytest.param((1, 2, 3, 4, 9), (1, 2, 3, 4), id="an end too late is never reached"),
        pytest.param((1, 2), (1, 2, 9), id="a shorter text gets an end"),
        pytest.param((), (9,), id="an empty text is an end"),
        pytest.param((1, 5, 2, 3), None, id="a token that is never drawn"),
        pytest.param((1, 7, 5, 3), (1, 7), id="one behind the end"),
    ],
)
def test_a_prefix_is_what_a_rollout_could_have_written(
    text: tuple[int, ...], prefix: tuple[int, ...] | None
) -> None:
    actual = FORM.prefix_of(ids(*text))
    assert (None if actual is None else tuple(actual.tolist())) == prefix


def test_equal_answers_count_as_often_as_they_come_and_a_problem_without_a_prompt_has_none() -> (
    None
):
    texts = [("a", "12"), ("a", "12"), ("b", "34"), ("lost", "1")]
    prompts = {"a": ids(1), "b": ids(2)}
    examples = examples_of(prompts, texts, lambda text: ids(*map(int, text)), FORM)
    assert [example.problem for example in examples] == ["a", "a", "b"]
    assert [example.prefix.tolist() for example in examples] == [[1, 2, 9], [1, 2, 9], [3, 4, 9]]


def drawn(sizes: list[tuple[int, int, int]]) -> list[Example]:
    """Examples of (problem, prompt tokens, prefix tokens)."""
    return [
        Example(f"p{problem}", np.zeros(prompt, np.int32), np.full(prefix, number, np.int32))
        for number, (problem, prompt, prefix) in enumerate(sizes)
    ]


SIZES = st.lists(
    st.tuples(st.integers(0, 9), st.integers(1, 40), st.integers(1, 8)), min_size=2, max_size=60
)


@given(SIZES, st.integers(0, 99))
def test_a_problem_is_on_one_side_alone_and_every_example_on_one(
    sizes: list[tuple[int, int, int]], seed: int
) -> None:
    examples = drawn(sizes)
    training, held_out = split_examples(examples, 0.1, seed)
    sides = [{example.problem for example in side} for side in (training, held_out)]
    assert not sides[0] & sides[1]
    assert len(training) + len(held_out) == len(examples)
    if len(sides[0] | sides[1]) > 1:
        assert training and held_out


@given(SIZES, st.integers(1, 9), st.integers(1, 200), st.integers(0, 99))
def test_every_example_is_in_one_micro_batch_which_keeps_the_limit(
    sizes: list[tuple[int, int, int]], rows: int, most_tokens: int, seed: int
) -> None:
    examples = drawn(sizes)
    batches = batches_of(examples, rows, seed)
    assert all(len(batch) == rows for batch in batches[:-1]) and len(batches[-1]) <= rows
    parts = [part for batch in batches for part in micro_batches(batch, most_tokens)]
    trained = sorted(int(example.prefix[0]) for part in parts for example in part)
    assert trained == list(range(len(examples)))
    for part in parts:
        width = max(example.prompt.size + example.prefix.size for example in part)
        assert len(part) == 1 or width * len(part) <= most_tokens
