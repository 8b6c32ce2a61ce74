"""Packed arrays in messages: the only writers and readers, which check length and range, and what a group must look like."""

import math

import numpy as np
from numpy.typing import NDArray

from prefixrl.common.messages import GroupPrefixes, ScoredGroup


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


def check_prefixes(group: GroupPrefixes, rows_per_group: int) -> None:
    """Raise ValueError naming the group when a received group of prefixes is not what was asked for."""
    where = f"group {group.seq} (prompt {group.prompt.prompt_id})"
    if group.error:
        return
    if len(group.rows) != rows_per_group:
        raise ValueError(
            f"{where} holds {len(group.rows)} rows, the task asked for {rows_per_group}"
        )
    token_ids(group.prompt_tokens)
    for index, row in enumerate(group.rows):
        try:
            logprobs(row.logprobs, token_ids(row.tokens).size)
        except ValueError as error:
            raise ValueError(f"{where}, row {index}: {error}") from None


def check_scores(group: ScoredGroup, rows_per_group: int) -> None:
    """Raise ValueError naming the group when a received scored group is malformed."""
    check_prefixes(group.prefixes, rows_per_group)
    where = f"group {group.prefixes.seq} (prompt {group.prefixes.prompt.prompt_id})"
    if len(group.verdicts) != len(group.prefixes.rows):
        raise ValueError(
            f"{where} holds {len(group.verdicts)} verdicts for {len(group.prefixes.rows)} rows"
        )
    for index, verdict in enumerate(group.verdicts):
        if not (math.isfinite(verdict.reward) and 0.0 <= verdict.reward <= 1.0):
            raise ValueError(f"{where}, row {index}: reward {verdict.reward} is outside [0, 1]")
