"""Padding: every token at its place, nothing else counted, malformed rows refused by name."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixrl.learner.models.batch import Sample, filler_row, pad, pad_lines

tokens = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6)


def sample(
    prompt: list[int], sampled: list[int], reward: float = 0.0, logprobs: int | None = None
) -> Sample:
    count = len(sampled) if logprobs is None else logprobs
    return Sample(
        np.array(prompt, dtype=np.int32),
        np.array(sampled, dtype=np.int32),
        -np.arange(1, count + 1, dtype=np.float32),
        reward,
        group=4,
        versions=np.zeros(len(sampled), dtype=np.int32),
    )


lines_of_rows = st.lists(
    st.tuples(
        tokens, st.lists(st.tuples(tokens, st.floats(0, 1, width=32)), min_size=1, max_size=4)
    ),
    min_size=1,
    max_size=4,
)


@given(lines_of_rows)
def test_every_token_is_predicted_from_the_one_before_it(
    lines: list[tuple[list[int], list[tuple[list[int], float]]]],
) -> None:
    batch = pad_lines([[sample(prompt, *row) for row in rows] for prompt, rows in lines], pad_id=9)
    width, longest = batch.input_ids.shape[1], batch.tokens.shape[1]
    place_of = dict(zip(batch.cells.tolist(), batch.actions.tolist(), strict=True))
    row = 0
    for i, (prompt, rows) in enumerate(lines):
        line = prompt + [token for sampled, _ in rows for token in sampled]
        assert batch.input_ids[i].tolist() == line + [9] * (width - len(line))
        assert batch.attention_mask[i].sum() == len(line)
        assert batch.position_ids[i, : len(prompt)].tolist() == list(range(len(prompt)))
        start = len(prompt)
        for segment, (sampled, reward) in enumerate(rows, start=1):
            assert batch.mask[row].sum() == len(sampled)
            assert batch.rewards[row] == reward
            for t, token in enumerate(sampled):
                place = place_of.pop(row * longest + t)
                assert batch.tokens[row, t] == token == batch.input_ids[i, start + t]
                assert batch.behaviour[row, t] == -(t + 1)
                assert batch.position_ids[i, start + t] == len(prompt) + t
                assert place == i * width + (len(prompt) - 1 if t == 0 else start + t - 1)
                if batch.segments is not None:
                    assert batch.segments[i, start + t] == segment
            start, row = start + len(sampled), row + 1
    assert not place_of
    assert (batch.segments is None) == all(len(rows) == 1 for _, rows in lines)


def test_rows_of_a_line_with_other_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match="group 4 share a line, but their prompts differ"):
        pad_lines([[sample([1, 2], [3]), sample([1, 5], [3])]], pad_id=0)


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
