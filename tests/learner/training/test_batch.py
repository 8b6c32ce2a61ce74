"""Padding: every token at its place, nothing else counted, malformed rows refused by name."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixrl.learner.training.batch import Sample, filler_row, pad

tokens = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6)


def sample(prompt: list[int], sampled: list[int], reward: float = 0.0, logprobs: int | None = None) -> Sample:
    count = len(sampled) if logprobs is None else logprobs
    return Sample(
        np.array(prompt, dtype=np.int32),
        np.array(sampled, dtype=np.int32),
        -np.arange(1, count + 1, dtype=np.float32),
        reward,
        group=4,
        versions=np.zeros(len(sampled), dtype=np.int32),
    )


@given(st.lists(st.tuples(tokens, tokens, st.floats(0, 1, width=32)), min_size=1, max_size=5))
def test_every_token_is_predicted_from_the_one_before_it(rows: list[tuple[list[int], list[int], float]]) -> None:
    batch = pad([sample(*row) for row in rows], pad_id=9)
    for i, (prompt, sampled, reward) in enumerate(rows):
        whole = prompt + sampled
        assert batch.input_ids[i].tolist() == whole + [9] * (batch.input_ids.shape[1] - len(whole))
        assert batch.attention_mask[i].sum() == len(whole)
        assert batch.mask[i].sum() == len(sampled)
        assert batch.rewards[i] == reward
        for t, token in enumerate(sampled):
            assert batch.tokens[i, t] == token
            assert batch.behaviour[i, t] == -(t + 1)
            place = batch.action_positions[i, t]
            assert batch.input_ids[i, place] == whole[len(prompt) + t - 1]
            assert batch.input_ids[i, place + 1] == token


def test_an_eos_that_ended_the_prefix_is_a_token_like_any_other() -> None:
    batch = pad([sample([5, 6], [7, 1])], pad_id=1)
    assert batch.mask.tolist() == [[True, True]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1]]


def test_a_weightless_row_has_no_token_that_counts() -> None:
    batch = filler_row(3)
    assert batch.input_ids.tolist() == [[3, 3]]
    assert not batch.mask.any()


@pytest.mark.parametrize(
    ("row", "named"),
    [
        (sample([], [1]), "empty prompt"),
        (sample([1], []), "no sampled token"),
        (sample([1], [2, 3], logprobs=1), "1 logprobs for 2 tokens"),
    ],
)
def test_a_malformed_row_is_refused_by_its_group(row: Sample, named: str) -> None:
    with pytest.raises(ValueError, match=f"row 1 of group 4 has .*{named.split(' ', 1)[1]}"):
        pad([sample([1], [2]), row], pad_id=0)


def test_no_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="no rows"):
        pad([], pad_id=0)
