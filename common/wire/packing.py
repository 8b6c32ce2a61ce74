"""Packed arrays in messages (their only writers and readers) and checks of received groups."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prefixrl.common.wire.messages.groups import (
    GroupPrefixes,
    Row,
    ScoredGroup,
    TaskKind,
    TextVerdict,
    Verdict,
)
from prefixrl.common.wire.messages.weights import WeightsNote
from prefixrl.common.wire.verdicts import row_verdict

TokenIds = NDArray[np.int32]
Logprobs = NDArray[np.float32]
ProbeRow = tuple[TokenIds, TokenIds]
"""Tokens given, and tokens scored after them."""
TOKEN_BYTES = 4
MOST_LOGPROB = 1e-6
"""Roundings make a probability of 1 a little larger."""
MOST_CHARS_PER_TOKEN = 1024
"""More than the longest token of any vocabulary: a text that is longer was not written by its tokens."""


@dataclass(frozen=True)
class GroupLimits:
    """Most that a group may hold."""

    prompt_tokens: int = 2**31
    row_tokens: int = 2**31
    vocabulary: int = 2**31
    """Token ids are below it."""


UNLIMITED = GroupLimits()


def pack_tokens(ids: list[int] | TokenIds) -> bytes:
    """Pack token ids as little-endian int32 bytes."""
    return np.asarray(ids, dtype="<i4").tobytes()


def pack_logprobs(values: list[float] | Logprobs) -> bytes:
    """Pack logprobs as little-endian float32 bytes."""
    return np.asarray(values, dtype="<f4").tobytes()


def token_ids(packed: bytes, vocabulary: int = UNLIMITED.vocabulary) -> TokenIds:
    """Read packed token ids, shape (tokens,); ValueError unless all are of the vocabulary."""
    if len(packed) % 4:
        raise ValueError(f"packed token ids of {len(packed)} bytes are not whole int32 values")
    ids = np.frombuffer(packed, dtype="<i4")
    # As unsigned numbers negative ids are the largest of all.
    if ids.size and int(ids.view("<u4").max()) >= vocabulary:
        if int(ids.min()) < 0:
            raise ValueError(f"token id {int(ids.min())} is negative")
        raise ValueError(f"token id {int(ids.max())} is not below the vocabulary of {vocabulary}")
    return ids


def probe_rows(tokens: TokenIds, sizes: Sequence[tuple[int, int]]) -> list[ProbeRow]:
    """Return the rows of a probe, given and scored tokens; ValueError unless the sizes fit."""
    sizes = sizes or ((min(1, tokens.size), max(0, tokens.size - 1)),)
    if sum(map(sum, sizes)) != tokens.size:
        raise ValueError(f"a probe of {tokens.size} tokens with rows of {sum(map(sum, sizes))}")
    ends = np.cumsum([size for row in sizes for size in row])
    parts = np.split(tokens, ends[:-1])
    return list(zip(parts[::2], parts[1::2], strict=True))


def probe_positions(note: WeightsNote) -> int:
    """Return the number of tokens of a probe that are scored."""
    return (
        sum(scored for _, scored in note.probe_rows)
        if note.probe_rows
        else max(0, len(note.probe_tokens) // 4 - 1)
    )


def logprobs(packed: bytes, tokens: int) -> Logprobs:
    """Read packed logprobs, shape (tokens,); raises ValueError unless all are finite and <= 0."""
    if len(packed) != 4 * tokens:
        raise ValueError(f"packed logprobs hold {len(packed) / 4:g} values for {tokens} tokens")
    values = np.frombuffer(packed, dtype="<f4")
    if values.size and not (np.isfinite(values).all() and float(values.max()) <= MOST_LOGPROB):
        raise ValueError("logprobs must be finite and not above 0")
    return values


def check_prefixes(
    group: GroupPrefixes,
    rows_per_group: int,
    limits: GroupLimits = UNLIMITED,
) -> None:
    """Raise ValueError naming the group unless a received group of prefixes fits its task.

    An adapter saw its prompt and wrote at least one token per row.
    """
    where = f"group {group.seq} (prompt {group.prompt.prompt_id})"
    if group.error:
        if group.rows:
            raise ValueError(
                f"{where} holds {len(group.rows)} rows beside its error: {group.error}"
            )
        return
    if len(group.rows) != rows_per_group:
        raise ValueError(
            f"{where} holds {len(group.rows)} rows, the task asked for {rows_per_group}"
        )
    if not _fits(group, limits):
        _tell_fault(group, where, limits)


def _fits(group: GroupPrefixes, limits: GroupLimits) -> bool:
    """Check all numbers of a group at once; return False if a part may have a fault."""
    rows = group.rows
    prompt_bytes = len(group.prompt_tokens)
    sizes = [len(row.tokens) for row in rows]
    if not (prompt_bytes and all(sizes)):
        return False
    if prompt_bytes % TOKEN_BYTES or prompt_bytes > TOKEN_BYTES * limits.prompt_tokens:
        return False
    for row, size_bytes in zip(rows, sizes, strict=True):
        if (
            size_bytes % TOKEN_BYTES
            or size_bytes > TOKEN_BYTES * limits.row_tokens
            or len(row.logprobs) != size_bytes
        ):
            return False
        if row.text and len(row.text) > MOST_CHARS_PER_TOKEN * size_bytes // TOKEN_BYTES:
            return False
    # One array for all rows: every result passes here, and numpy costs most per call.
    ids = np.frombuffer(b"".join([group.prompt_tokens, *(row.tokens for row in rows)]), dtype="<u4")
    values = np.frombuffer(b"".join([row.logprobs for row in rows]), dtype="<f4")
    if ids.size and int(ids.max()) >= limits.vocabulary:
        return False
    # NaN fails both comparisons.
    return not values.size or bool(
        -math.inf < float(values.min()) and float(values.max()) <= MOST_LOGPROB
    )


def _tell_fault(group: GroupPrefixes, where: str, limits: GroupLimits) -> None:
    parts = [
        ("prompt", group.prompt_tokens),
        *((f"row {index}", row.tokens) for index, row in enumerate(group.rows)),
    ]
    for index, (part, tokens) in enumerate(parts, start=-1):
        most = limits.prompt_tokens if index < 0 else limits.row_tokens
        try:
            size = token_ids(tokens, limits.vocabulary).size
            if size > most:
                raise ValueError(f"{size} tokens, allowed are {most}")
            if index >= 0:
                logprobs(group.rows[index].logprobs, size)
                _check_length(group.rows[index].text or "", MOST_CHARS_PER_TOKEN * size)
        except ValueError as error:
            raise ValueError(f"{where}, {part}: {error}") from None
        if not size:
            raise ValueError(f"{where}, {part}: there is no token")


def _check_length(text: str, most: int) -> None:
    if len(text) > most:
        raise ValueError(f"a text of {len(text)} characters, allowed are {most}")


def token_versions(row: Row) -> TokenIds:
    """Return the version that sampled each token of a row, shape (tokens,)."""
    versions = np.asarray([span.version for span in row.spans], dtype=np.int32)
    return np.repeat(versions, [span.tokens for span in row.spans])


def check_spans(group: GroupPrefixes, version: int, may_cross: bool) -> None:
    """Raise ValueError unless every token of a row has one version, rising along the row.

    `version` is the oldest one allowed, -1 where no adapter wrote; `may_cross`: a row may have several.
    """
    for index, row in enumerate(group.rows):
        if len(row.spans) == 1 and row.spans[0].version == version >= 0:
            size = row.spans[0].tokens
            if size and size == len(row.tokens) // TOKEN_BYTES:
                continue  # as nearly always: all of it is of one version, that of the result
        where = f"group {group.seq} (prompt {group.prompt.prompt_id}), row {index}"
        spans = [(span.version, span.tokens) for span in row.spans]
        if version < 0:
            if spans:
                raise ValueError(f"{where}: spans {spans} although no adapter wrote it")
            continue
        tokens = len(row.tokens) // TOKEN_BYTES
        if any(size < 1 for _, size in spans) or sum(size for _, size in spans) != tokens:
            raise ValueError(f"{where}: spans {spans} (version, tokens) for {tokens} tokens")
        # Weights only get newer while a row is written.
        versions = [each for each, _ in spans]
        if versions != sorted(set(versions)):
            raise ValueError(f"{where}: versions {versions} of its spans do not rise")
        if versions[0] < version:
            raise ValueError(
                f"{where}: a token of version {versions[0]} in a result of version {version}"
            )
        if versions != [version] and not may_cross:
            raise ValueError(
                f'{where}: tokens of versions {versions}, one is allowed, {version} (swap = "drain", or evaluation)'
            )


def digests(groups: Iterable[GroupPrefixes]) -> set[tuple[int, str]]:
    """Return every (version, weights digest) that wrote a token of these groups."""
    return {
        (span.version, span.weights_digest)
        for group in groups
        for row in group.rows
        for span in row.spans
    }


def check_verdicts(
    group: ScoredGroup,
    continuations: int = 1,
    kind: TaskKind = "train",
    most_chars: int = 2**31,
    has_step_rewards: bool = False,
) -> None:
    """Raise ValueError naming the group unless its verdicts are those of its rows, without too much text."""
    where = f"group {group.prefixes.seq} (prompt {group.prefixes.prompt.prompt_id})"
    if len(group.verdicts) != len(group.prefixes.rows):
        raise ValueError(
            f"{where} holds {len(group.verdicts)} verdicts for {len(group.prefixes.rows)} rows"
        )
    gold = group.prefixes.prompt.gold
    for index, verdict in enumerate(group.verdicts):
        try:
            texts = _checked_texts(verdict, continuations, most_chars)
            # The learner indexes the row's tokens by these ends.
            if has_step_rewards and kind == "train" and verdict.process is not None:
                tokens = token_ids(group.prefixes.rows[index].tokens).size
                ends = verdict.process.ends
                count = len(verdict.process.scores)
                if count != len(ends) or any(not 0 < end <= tokens for end in ends):
                    raise ValueError(
                        f"{count} scores of steps with ends {ends} in a row of {tokens} tokens"
                    )
        except ValueError as error:
            raise ValueError(f"{where}, row {index}: {error}") from None
        # A missing gold explains a missing verdict only in an evaluation of problems without one.
        if (kind == "train" or gold) and "no_gold" in [each.status for each in texts]:
            raise ValueError(
                f"{where}, row {index}: status no_gold in a group of kind {kind} with gold answer {gold!r}"
            )


def _checked_texts(
    verdict: Verdict, continuations: int, most_chars: int
) -> tuple[TextVerdict, ...]:
    """Return the verdicts on a row's texts; ValueError unless each can be true."""
    texts = verdict.texts
    if len(texts) != continuations:
        raise ValueError(f"verdicts on {len(texts)} continuations, asked for were {continuations}")
    for text in (*verdict.continuations, verdict):
        if not 0.0 <= text.reward <= 1.0:  # NaN is neither
            raise ValueError(f"reward {text.reward} is outside [0, 1]")
        _check_length(text.completion, most_chars)
        process = text.process
        if (
            process
            and process.ends
            and (
                len(process.ends) != len(process.scores)
                or list(process.ends) != sorted(process.ends)
            )
        ):
            raise ValueError(
                f"{len(process.scores)} scores of steps with ends {process.ends}, which must rise, one each"
            )
    # Rows are trained by this verdict, so it must be the one that their texts lead to.
    if verdict.continuations and verdict != row_verdict(verdict.continuations):
        raise ValueError("its verdict does not follow from those of its continuations")
    return texts
