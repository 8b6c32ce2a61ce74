"""Packed arrays in messages: the only writers and readers, which check length and range, and what a group must look like."""

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from prefixrl.common.continuations import row_verdict
from prefixrl.common.messages import GroupPrefixes, Kind, Row, ScoredGroup, Verdict


def pack_tokens(ids: list[int] | NDArray[np.int32]) -> bytes:
    """Token ids to little-endian int32 bytes."""
    return np.asarray(ids, dtype="<i4").tobytes()


def pack_logprobs(values: list[float] | NDArray[np.float32]) -> bytes:
    """Logprobs to little-endian float32 bytes."""
    return np.asarray(values, dtype="<f4").tobytes()


def token_ids(packed: bytes) -> NDArray[np.int32]:
    """Read packed token ids, shape (tokens,); raises ValueError on a ragged length or a negative id."""
    if len(packed) % 4:
        raise ValueError(f"packed token ids of {len(packed)} bytes are not whole int32 values")
    ids = np.frombuffer(packed, dtype="<i4")
    if ids.size and int(ids.min()) < 0:
        raise ValueError(f"token id {int(ids.min())} is negative")
    return ids


def logprobs(packed: bytes, tokens: int) -> NDArray[np.float32]:
    """Read packed logprobs, shape (tokens,); raises ValueError unless there are `tokens` finite values <= 0."""
    if len(packed) != 4 * tokens:
        raise ValueError(f"packed logprobs hold {len(packed) / 4:g} values for {tokens} tokens")
    values = np.frombuffer(packed, dtype="<f4")
    if values.size and not (np.isfinite(values).all() and float(values.max()) <= 1e-6):
        raise ValueError("logprobs must be finite and not above 0")
    return values


def check_prefixes(group: GroupPrefixes, rows_per_group: int, is_by_adapter: bool = True) -> None:
    """Raise ValueError naming the group when a received group of prefixes is not what was asked for.

    Args:
        group: As received.
        rows_per_group: What the task asked for.
        is_by_adapter: An adapter saw a prompt and wrote at least one token per row; without one both may be empty.
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
    place = "prompt"
    try:
        sizes = [("prompt", token_ids(group.prompt_tokens).size)]
        for index, row in enumerate(group.rows):
            place = f"row {index}"
            sizes.append((place, token_ids(row.tokens).size))
            logprobs(row.logprobs, sizes[-1][1])
    except ValueError as error:
        raise ValueError(f"{where}, {place}: {error}") from None
    for place, size in sizes:
        if is_by_adapter and not size:
            raise ValueError(f"{where}, {place}: there is no token")


def token_versions(row: Row) -> NDArray[np.int32]:
    """The version that sampled each token of a row, shape (tokens,)."""
    versions = np.asarray([span.version for span in row.spans], dtype=np.int32)
    return np.repeat(versions, [span.tokens for span in row.spans])


def check_spans(group: GroupPrefixes, version: int, may_cross: bool) -> None:
    """Raise ValueError naming group and row unless every token has one version, rising along the row.

    Args:
        group: Its rows hold as many tokens as they say.
        version: The oldest there may be; -1 where no adapter wrote anything.
        may_cross: New weights may have been installed in the middle of a row.
    """
    for index, row in enumerate(group.rows):
        where = f"group {group.seq} (prompt {group.prompt.prompt_id}), row {index}"
        spans = [(span.version, span.tokens) for span in row.spans]
        if version < 0:
            if spans:
                raise ValueError(f"{where}: spans {spans} although no adapter wrote it")
            continue
        tokens = token_ids(row.tokens).size
        if any(size < 1 for _, size in spans) or sum(size for _, size in spans) != tokens:
            raise ValueError(f"{where}: spans {spans} (version, tokens) for {tokens} tokens")
        versions = [each for each, _ in spans]
        if versions != sorted(set(versions)):
            raise ValueError(f"{where}: versions {versions} of its spans do not rise")
        if versions[0] < version:
            raise ValueError(
                f"{where}: a token of version {versions[0]} in a result of version {version}"
            )
        if versions != [version] and not may_cross:
            raise ValueError(
                f"{where}: tokens of versions {versions}, one is allowed, {version}: weights are swapped between tasks"
                ' (rollout.swap = "drain", and always in evaluations)'
            )


def digests(groups: Iterable[GroupPrefixes]) -> set[tuple[int, str]]:
    """(version, weights digest) of everything that wrote a token of these groups."""
    return {
        (span.version, span.weights_digest)
        for group in groups
        for row in group.rows
        for span in row.spans
    }


def check_scores(
    group: ScoredGroup, rows_per_group: int, continuations: int = 1, kind: Kind = "train"
) -> None:
    """Raise ValueError naming the group when a received scored group is malformed.

    Args:
        continuations: texts that were to be judged per row.
        kind: only a text of an evaluation may go unjudged for want of a gold answer.
    """
    check_prefixes(group.prefixes, rows_per_group, is_by_adapter=group.version >= 0)
    where = f"group {group.prefixes.seq} (prompt {group.prefixes.prompt.prompt_id})"
    if len(group.verdicts) != len(group.prefixes.rows):
        raise ValueError(
            f"{where} holds {len(group.verdicts)} verdicts for {len(group.prefixes.rows)} rows"
        )
    for index, verdict in enumerate(group.verdicts):
        _check_verdict(verdict, continuations, f"{where}, row {index}")
        needs_verdict = kind == "train" or group.prefixes.prompt.gold
        if needs_verdict and any(each.status == "no_gold" for each in verdict.texts):
            raise ValueError(
                f"{where}, row {index}: status no_gold in a group of kind {kind} with the gold answer "
                f"{group.prefixes.prompt.gold!r}; it is for evaluations of problems without one"
            )


def _check_verdict(verdict: Verdict, continuations: int, where: str) -> None:
    if len(verdict.texts) != continuations:
        raise ValueError(
            f"{where}: verdicts on {len(verdict.texts)} continuations, asked for were {continuations}"
        )
    for each in (*verdict.continuations, verdict):
        if not (math.isfinite(each.reward) and 0.0 <= each.reward <= 1.0):
            raise ValueError(f"{where}: reward {each.reward} is outside [0, 1]")
    if verdict.continuations and verdict != row_verdict(verdict.continuations):
        raise ValueError(f"{where}: its verdict is not what its continuations amount to")
