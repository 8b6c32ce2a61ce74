"""Packed arrays come back as they were sent, and malformed ones are refused with the position of the fault."""

import struct
from contextlib import nullcontext

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixrl.common.wire import packing
from prefixrl.common.wire.messages.groups import (
    GroupPrefixes,
    Prompt,
    Row,
    ScoredGroup,
    TaskKind,
    Verdict,
    VersionSpan,
)
from support.broker.scoring_world import check_scores

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=40)
LOGPROBS = st.lists(
    st.floats(max_value=0.0, allow_nan=False, allow_infinity=False, width=32), max_size=40
)


@given(IDS)
def test_token_ids_travel_as_little_endian_int32(ids: list[int]) -> None:
    packed = packing.pack_tokens(ids)
    assert packed == struct.pack(f"<{len(ids)}i", *ids)
    assert packing.token_ids(packed).tolist() == ids
    assert packing.pack_tokens(np.asarray(ids, dtype=np.int32)) == packed


@given(LOGPROBS)
def test_logprobs_travel_as_little_endian_float32(values: list[float]) -> None:
    packed = packing.pack_logprobs(values)
    assert packed == struct.pack(f"<{len(values)}f", *values)
    assert packing.logprobs(packed, len(values)).tolist() == values


@given(st.binary(max_size=30))
def test_bytes_that_are_no_whole_values_are_refused(data: bytes) -> None:
    if len(data) % 4:
        with pytest.raises(
            ValueError, match=f"packed token ids of {len(data)} bytes are not whole"
        ):
            packing.token_ids(data)
        with pytest.raises(ValueError, match="values for"):
            packing.logprobs(data, len(data) // 4)
    elif any(value < 0 for value in struct.unpack(f"<{len(data) // 4}i", data)):
        with pytest.raises(ValueError, match=r"token id -\d+ is negative"):
            packing.token_ids(data)
    else:
        assert packing.token_ids(data).size == len(data) // 4


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 0.5, 1e-3])
def test_what_is_no_logprob_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="finite and not above 0"):
        packing.logprobs(packing.pack_logprobs([-1.0, value, -2.0]), 3)


def test_rounding_above_zero_is_let_through() -> None:
    assert packing.logprobs(packing.pack_logprobs([1e-7]), 1).size == 1


def test_the_count_must_be_that_of_the_tokens() -> None:
    with pytest.raises(ValueError, match="packed logprobs hold 2 values for 3 tokens"):
        packing.logprobs(packing.pack_logprobs([-1.0, -2.0]), 3)


def row(tokens: int = 3) -> Row:
    ids, spans = list(range(tokens)), (VersionSpan(0, "d", tokens),)
    return Row(
        tokens=packing.pack_tokens(ids),
        logprobs=packing.pack_logprobs([-1.0] * tokens),
        finish="length",
        spans=spans,
    )


def group(*rows: Row, error: str = "") -> GroupPrefixes:
    prompt = Prompt("p-7", "1 + 1", "2")
    return GroupPrefixes(
        seq=5,
        prompt=prompt,
        seed=99,
        prompt_tokens=packing.pack_tokens([1, 2]),
        rows=rows,
        error=error,
    )


def scored(prefixes: GroupPrefixes, *rewards: float) -> ScoredGroup:
    verdicts = tuple(
        Verdict(
            reward=reward,
            status="ok",
            extracted="2",
            finish="eos",
            completion_tokens=4,
            elapsed_ms=10,
        )
        for reward in rewards
    )
    return ScoredGroup(
        prefixes=prefixes, version=0, weights_digest="d", verdicts=verdicts, scorer="scorer-0"
    )


def slow_fits(group: GroupPrefixes, limits: packing.GroupLimits) -> bool:
    """True if each part fits, looked at alone."""
    try:
        sizes = [packing.token_ids(group.prompt_tokens, limits.vocabulary).size]
        for row in group.rows:
            sizes.append(packing.token_ids(row.tokens, limits.vocabulary).size)
            packing.logprobs(row.logprobs, sizes[-1])
    except ValueError:
        return False
    return all(sizes) and sizes[0] <= limits.prompt_tokens and max(sizes[1:]) <= limits.row_tokens


@given(
    prompt=st.lists(st.integers(-1, 9), max_size=3),
    rows=st.lists(
        st.lists(
            st.tuples(st.integers(-1, 9), st.sampled_from([-1.0, 0.0, 0.5, np.nan, -np.inf])),
            max_size=4,
        ),
        min_size=1,
        max_size=3,
    ),
    torn=st.sampled_from([b"", b"", b"", b"x", b"1234"]),
)
def test_a_group_is_refused_where_a_look_at_each_part_finds_a_fault(
    prompt: list[int], rows: list[list[tuple[int, float]]], torn: bytes
) -> None:
    made = [
        Row(
            tokens=packing.pack_tokens([token for token, _ in row]),
            logprobs=packing.pack_logprobs([value for _, value in row]) + torn,
            finish="length",
            spans=(),
        )
        for row in rows
    ]
    packed = packing.pack_tokens(prompt)
    group = GroupPrefixes(
        seq=1, prompt=Prompt("p", "?", "1"), seed=0, prompt_tokens=packed, rows=tuple(made)
    )
    limits = packing.GroupLimits(prompt_tokens=2, row_tokens=3, vocabulary=8)
    with nullcontext() if slow_fits(group, limits) else pytest.raises(ValueError, match="group 1"):
        packing.check_prefixes(group, len(made), limits=limits)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_a_group_as_it_was_asked_for_passes(lengths: list[int]) -> None:
    prefixes = group(*map(row, lengths))
    packing.check_prefixes(prefixes, len(lengths))
    check_scores(scored(prefixes, *([1.0] * len(lengths))), len(lengths))


def test_a_group_that_could_not_be_sampled_passes_without_rows() -> None:
    packing.check_prefixes(group(error="prompt has 2000 tokens"), 8)
    with pytest.raises(ValueError, match=r"^group 5 .* holds 1 rows beside its error: too long"):
        packing.check_prefixes(group(row(), error="too long"), 1)


def test_an_adapter_saw_a_prompt_and_wrote_something() -> None:
    """The learner cannot train a row without tokens; a fixed prefix that no adapter wrote may be empty."""
    no_prompt = msgspec.structs.replace(group(row(), row()), prompt_tokens=b"")
    for empty, place in ((group(row(), row(0)), "row 1"), (no_prompt, "prompt")):
        message = rf"^group 5 \(prompt p-7\), {place}: there is no token$"
        with pytest.raises(ValueError, match=message):
            packing.check_prefixes(empty, 2)
        by_adapter = scored(empty, 1.0, 0.0)
        with pytest.raises(ValueError, match=message):
            check_scores(by_adapter, 2)
        check_scores(msgspec.structs.replace(by_adapter, version=-1), 2)


BROKEN_PREFIXES = {
    "a row too few": (group(row()), "holds 1 rows, the task asked for 2"),
    "a row too many": (group(row(), row(), row()), "holds 3 rows, the task asked for 2"),
    "ragged ids": (
        group(row(), Row(tokens=b"12345", logprobs=b"", finish="length", spans=())),
        "row 1: packed token ids of 5 bytes",
    ),
    "a logprob too few": (
        group(
            row(),
            Row(
                tokens=packing.pack_tokens([1, 2]),
                logprobs=packing.pack_logprobs([-1.0]),
                finish="eos",
                spans=(),
            ),
        ),
        "row 1: packed logprobs hold 1 values for 2 tokens",
    ),
    "a positive logprob": (
        group(
            Row(
                tokens=packing.pack_tokens([1]),
                logprobs=packing.pack_logprobs([0.1]),
                finish="eos",
                spans=(),
            ),
            row(),
        ),
        "row 0: logprobs must be finite",
    ),
}


@pytest.mark.parametrize(("broken", "reason"), BROKEN_PREFIXES.values(), ids=BROKEN_PREFIXES.keys())
def test_malformed_prefixes_are_refused_with_group_and_row(
    broken: GroupPrefixes, reason: str
) -> None:
    with pytest.raises(ValueError, match=rf"^group 5 \(prompt p-7\).* {reason}"):
        packing.check_prefixes(broken, 2)
    with pytest.raises(ValueError, match=rf"^group 5 \(prompt p-7\).* {reason}"):
        check_scores(scored(broken, *([1.0] * len(broken.rows))), 2)


def test_a_malformed_prompt_names_its_group() -> None:
    broken = msgspec.structs.replace(group(row(), row()), prompt_tokens=b"123")
    with pytest.raises(ValueError, match=r"^group 5 \(prompt p-7\), prompt: packed token ids of 3"):
        packing.check_prefixes(broken, 2)


@pytest.mark.parametrize("reward", [-0.1, 1.1, np.nan, np.inf])
def test_a_reward_outside_0_to_1_is_refused_with_group_and_row(reward: float) -> None:
    with pytest.raises(ValueError, match=rf"^group 5 \(prompt p-7\), row 1: reward {reward} is"):
        check_scores(scored(group(row(), row()), 1.0, reward), 2)


def test_every_row_needs_a_verdict() -> None:
    with pytest.raises(ValueError, match=r"^group 5 \(prompt p-7\) holds 1 verdicts for 2 rows"):
        check_scores(scored(group(row(), row()), 1.0), 2)


@pytest.mark.parametrize(("kind", "gold"), [("train", ""), ("train", "2"), ("eval", "2")])
def test_only_an_evaluation_without_a_gold_answer_may_go_unjudged(
    kind: TaskKind, gold: str
) -> None:
    prefixes = msgspec.structs.replace(group(row(), row()), prompt=Prompt("p-7", "1 + 1", gold))
    unjudged = Verdict(
        reward=0.0,
        status="no_gold",
        extracted="2",
        finish="eos",
        completion_tokens=4,
        elapsed_ms=10,
    )
    judged = scored(prefixes, 1.0, 0.0)
    some = msgspec.structs.replace(judged, verdicts=(judged.verdicts[0], unjudged))
    check_scores(judged, 2, kind=kind)
    with pytest.raises(
        ValueError, match=r"^group 5 \(prompt p-7\), row 1: status no_gold in a group"
    ):
        check_scores(some, 2, kind=kind)
    asked = msgspec.structs.replace(prefixes, prompt=Prompt("p-7", "1 + 1", ""))
    check_scores(msgspec.structs.replace(some, prefixes=asked), 2, kind="eval")


def spanned(*spans: tuple[int, int], tokens: int = 3) -> GroupPrefixes:
    named = tuple(VersionSpan(version, f"d{version}", size) for version, size in spans)
    return group(row(), msgspec.structs.replace(row(tokens), spans=named))


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.integers(0, 3))
def test_tokens_have_the_versions_of_their_spans(sizes: list[int], oldest: int) -> None:
    spans = [(oldest + 2 * place, size) for place, size in enumerate(sizes)]
    made = spanned(*spans, tokens=sum(sizes)).rows[1]
    slow = [version for version, size in spans for _ in range(size)]
    assert packing.token_versions(made).tolist() == slow
    packing.check_spans(group(made), oldest, may_cross=True)


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (spanned((0, 2)), r"row 1: spans \[\(0, 2\)\] \(version, tokens\) for 3 tokens"),
        (spanned((0, 2), (1, 2)), "for 3 tokens"),
        (spanned((0, 4), (1, -1)), "for 3 tokens"),
        (spanned((0, 3), (1, 0)), "for 3 tokens"),
        (spanned(), "for 3 tokens"),
        (spanned((2, 1), (1, 2)), "do not rise"),
        (spanned((1, 1), (1, 2)), "do not rise"),
    ],
)
def test_spans_that_do_not_fit_their_row_are_refused_with_group_and_row(
    broken: GroupPrefixes, reason: str
) -> None:
    with pytest.raises(
        ValueError, match=rf"^group 5 \(prompt p-7\), row 1: .*{reason.removeprefix('row 1: ')}"
    ):
        packing.check_spans(broken, 0, may_cross=True)


def test_a_token_older_than_the_result_says_or_a_second_version_where_none_may_be_is_refused() -> (
    None
):
    crossed = spanned((0, 1), (4, 2))
    packing.check_spans(crossed, 0, may_cross=True)
    with pytest.raises(ValueError, match="a token of version 0 in a result of version 1"):
        packing.check_spans(crossed, 1, may_cross=True)
    with pytest.raises(ValueError, match=r"row 1: tokens of versions \[0, 4\], one is allowed"):
        packing.check_spans(crossed, 0, may_cross=False)


def test_what_no_adapter_wrote_has_no_version() -> None:
    fixed = msgspec.structs.replace(row(), spans=())
    packing.check_spans(group(fixed), -1, may_cross=False)
    with pytest.raises(ValueError, match="although no adapter wrote it"):
        packing.check_spans(group(row()), -1, may_cross=True)


def test_the_digests_of_a_result_are_those_of_all_its_spans() -> None:
    actual = packing.digests([spanned((0, 1), (4, 2)), spanned((7, 3))])
    assert actual == {(0, "d"), (0, "d0"), (4, "d4"), (7, "d7")}
