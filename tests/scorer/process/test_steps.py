"""Steps of an answer, where they end in its tokens, and one score from theirs."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from prefixrl.common.prompts.rendering import pieces_of
from prefixrl.common.wire.verdicts import aggregated
from prefixrl.scorer.process.steps import Step, combined_reward, split_steps, token_ends

SCORES = [0.9, 0.5, 0.8]


@pytest.mark.parametrize(
    ("how", "expected"), [("last", 0.8), ("min", 0.5), ("mean", 2.2 / 3), ("product", 0.36)]
)
def test_one_score_comes_from_those_of_the_steps(how: str, expected: float) -> None:
    assert aggregated(SCORES, how) == pytest.approx(expected)  # type: ignore[arg-type]
    assert aggregated([], how) == 0.0  # type: ignore[arg-type]


def test_the_reward_adds_both_sources_and_stays_a_reward() -> None:
    assert combined_reward(1.0, 0.5, 0.25, 0.75) == pytest.approx(0.25 + 0.75 * 0.5)
    assert combined_reward(0.0, 1.0, 0.25, 0.75) == 0.75
    assert combined_reward(1.0, 1.0, 0.1 + 0.2, 0.7) == 1.0  # rounding is cut


def test_blank_pieces_are_no_steps_and_an_end_is_before_the_separator() -> None:
    assert split_steps("\n\nAdd 1. \n\n \n\nSo 2.\n", "\n\n", 9) == [
        Step("Add 1.", 8),
        Step("So 2.", 19),
    ]
    assert split_steps(" \n ", "\n\n", 9) == split_steps("", "\n\n", 9) == []


def test_what_follows_the_most_steps_belongs_to_the_last() -> None:
    assert [step.text for step in split_steps("a;b;c;d", ";", 3)] == ["a", "b", "c;d"]
    assert [step.text for step in split_steps("a;b", ";", 1)] == ["a;b"]


@given(st.text(alphabet="ab ;\n", max_size=40), st.sampled_from([";", "\n", "ab"]))
def test_steps_are_those_of_a_plain_split(answer: str, separator: str) -> None:
    steps = split_steps(answer, separator, 1000)
    assert [step.text for step in steps] == [
        each.strip() for each in answer.split(separator) if each.strip()
    ]
    for step in steps:
        assert answer[: step.end].endswith(step.text)
        assert answer[step.end :].lstrip() == "" or answer[step.end :].lstrip(" \n").startswith(
            separator.lstrip(" \n")
        )


def slow_ends(pieces: list[str], ends: list[int]) -> tuple[int, ...]:
    return tuple(
        min(n for n in range(1, len(pieces) + 1) if len("".join(pieces[:n])) >= end) for end in ends
    )


@given(st.lists(st.text(max_size=3), min_size=1, max_size=12).filter("".join), st.data())
def test_ends_in_tokens_are_those_of_ever_longer_texts(
    pieces: list[str], data: st.DataObject
) -> None:
    length = len("".join(pieces))
    ends = sorted(set(data.draw(st.lists(st.integers(1, length), max_size=5))))
    assert token_ends(pieces, ends) == slow_ends(pieces, ends)


def test_a_step_beyond_all_tokens_is_refused_with_both_lengths() -> None:
    with pytest.raises(ValueError, match="ends after 4 characters, all tokens together have 3"):
        token_ends(["ab", "c"], [2, 4])


def test_a_character_of_several_tokens_belongs_to_the_last_of_them() -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE({letter: number for number, letter in enumerate(letters)}, merges=[])
    )
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    encoded = tokenizer.encode("Ж=é;ok")
    import numpy as np

    pieces = pieces_of(tokenizer, np.asarray(encoded.ids, dtype=np.int32))
    assert pieces == ["", "Ж", "=", "", "é", ";", "o", "k"]
    assert token_ends(pieces, [step.end for step in split_steps("Ж=é;ok", ";", 9)]) == (5, 8)
    assert math.prod(SCORES) == pytest.approx(0.36)
