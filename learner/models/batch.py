"""From batches to samples, and from samples to padded tensors. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefixrl.common.wire.messages.groups import ScoredGroup
from prefixrl.common.wire.messages.learner import Batch
from prefixrl.common.wire.packing import Logprobs, TokenIds, logprobs, token_ids, token_versions


@dataclass(frozen=True)
class Sample:
    """One sampled prefix (in direct mode: one answer) with its verdict."""

    prompt_tokens: TokenIds
    tokens: TokenIds
    """As sampled, with the EOS that ended them."""
    logprobs: Logprobs
    reward: float
    group: int
    versions: TokenIds
    steps: tuple[tuple[int, float], ...] = ()
    """Tokens up to the end of each step, and its score; empty without a process reward model."""


@dataclass(frozen=True)
class IterationData:
    """One rank's view of an iteration: lengths of all rows, tokens of this rank's rows."""

    iteration: int
    seed: int
    lengths: tuple[tuple[int, int], ...]
    """(prompt tokens, sampled tokens) of every row of the iteration, in training order, all ranks."""
    rewards: tuple[float, ...]
    groups: tuple[int, ...]
    samples: Mapping[int, Sample]
    """By row index: at least the rows the plan gives this rank."""
    verdicts: tuple[float, ...] = ()
    """The verifier's reward of every row; empty where `rewards` are just these."""

    parts: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """By name the parts of every row's reward; empty without any."""

    @property
    def outcomes(self) -> tuple[float, ...]:
        """The verifier's reward of every row, without scores of steps."""
        return self.verdicts or self.rewards


@dataclass(frozen=True)
class PaddedRows:
    """Lines padded on the right: a line is a prompt and the rows that share it, end to end.

    Tensors are (lines, width), int64, or hold something of each sampled token, (rows, tokens), 0 under padding.
    """

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    """Each row continues the shared prompt."""
    segments: Tensor | None
    """(lines, width) int64: 0 in the prompt, 1, 2, ... in the rows of the line, -1 under padding. None where every line
    holds one row, for which a causal mask is enough."""
    actions: Tensor
    """(sampled tokens,) int64: where in the flattened lines each is predicted, the first at the last prompt token."""
    cells: Tensor
    """(sampled tokens,) int64: their places in flattened (rows, tokens)."""
    mask: Tensor
    tokens: Tensor
    behaviour: Tensor
    """Logprobs of the engine."""
    versions: Tensor
    rewards: Tensor

    def to(self, device: torch.device) -> "PaddedRows":
        """The same rows on another device."""
        moved = {
            name: tensor.to(device) for name, tensor in vars(self).items() if tensor is not None
        }
        return replace(self, **moved)

    def inputs(self) -> dict[str, Tensor]:
        """Return what a model needs."""
        names = (
            "input_ids",
            "attention_mask",
            "position_ids",
            "segments",
            "actions",
            "cells",
            "tokens",
        )
        return {name: tensor for name in names if (tensor := getattr(self, name)) is not None}


@dataclass(frozen=True)
class PreparedMicroBatch:
    """One micro-batch with all that stays fixed in the iteration; tensors are (rows, tokens)."""

    rows: tuple[int, ...]
    batch: PaddedRows
    proximal: Tensor
    reference: Tensor | None
    old_values: Tensor
    advantages: Tensor
    returns: Tensor
    ages: Tensor
    """Versions between the one that sampled a token and the one that is trained."""
    process: Tensor | None = None
    """Process rewards less their baseline, times their coefficient; None without a reward model."""
    steps: Tensor | None = None
    """Scores of steps at the tokens that end them, likewise; None where no score is a reward of its own."""
    is_proximal_late: bool = False
    """True before the first optimiser step if its forward is to tell `proximal`; 0 until then."""


MicroBatches = list[list[PreparedMicroBatch]]
"""Those of a rank, by minibatch."""


def pad(samples: Sequence[Sample], pad_id: int) -> PaddedRows:
    """Stack rows of any lengths, each as a line with its own prompt; errors as `pad_lines`."""
    return pad_lines([[sample] for sample in samples], pad_id)


def pad_lines(lines: Sequence[Sequence[Sample]], pad_id: int) -> PaddedRows:
    """Stack lines of any lengths, whose rows share their prompt; raise ValueError for rows that cannot be trained."""
    samples = [sample for line in lines for sample in line]
    if not samples:
        raise ValueError("there are no rows to pad")
    for row, sample in enumerate(samples):
        _check(row, sample)
    width = max(len(line[0].prompt_tokens) + sum(len(row.tokens) for row in line) for line in lines)
    input_ids = np.full((len(lines), width), pad_id, dtype=np.int64)
    positions = np.tile(np.arange(width), (len(lines), 1))
    segments = np.full((len(lines), width), -1, dtype=np.int64)
    begins: list[tuple[int, int, int, int]] = []
    """By row: cell of its first token and of its line's, tokens of its prompt, number in its line."""
    for index, line in enumerate(lines):
        prompt = line[0].prompt_tokens
        input_ids[index, : len(prompt)], segments[index, : len(prompt)] = prompt, 0
        cell = index * width + len(prompt)
        for segment, sample in enumerate(line, start=1):
            if sample.prompt_tokens is not prompt and not np.array_equal(
                sample.prompt_tokens, prompt
            ):
                raise ValueError(
                    f"rows of group {sample.group} share a line, but their prompts differ"
                )
            begins.append((cell, index * width, len(prompt), segment))
            cell += len(sample.tokens)
    # All rows at once: some calls of numpy for each row would hold a small model up.
    sizes = np.array([len(sample.tokens) for sample in samples])
    # One entry per sampled token from here on, the rows end to end.
    first, line_at, prompt_sizes, segment_of = np.repeat(np.array(begins), sizes, axis=0).T
    offsets = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    places, mask = first + offsets, np.arange(sizes.max())[None, :] < sizes[:, None]
    sampled = np.concatenate([sample.tokens for sample in samples])
    input_ids.reshape(-1)[places], segments.reshape(-1)[places] = sampled, segment_of
    # Positions go on after the prompt, as if the other rows of the line were not there.
    positions.reshape(-1)[places] = prompt_sizes + offsets
    return PaddedRows(
        input_ids=torch.from_numpy(input_ids),
        attention_mask=torch.from_numpy((segments >= 0).astype(np.int64)),
        position_ids=torch.from_numpy(positions),
        segments=torch.from_numpy(segments) if len(samples) > len(lines) else None,
        # The cell before a token predicts it: for a row's first token that is the end of the
        # prompt, wherever in the line the row stands.
        actions=torch.from_numpy(np.where(offsets == 0, line_at + prompt_sizes, places) - 1),
        cells=torch.from_numpy(np.flatnonzero(mask)),
        mask=torch.from_numpy(mask),
        tokens=_in_rows(sampled.astype(np.int64), mask),
        behaviour=_in_rows(np.concatenate([sample.logprobs for sample in samples]), mask),
        versions=_in_rows(
            np.concatenate([sample.versions for sample in samples]).astype(np.int64), mask
        ),
        rewards=torch.tensor([sample.reward for sample in samples], dtype=torch.float32),
    )


def _in_rows(values: NDArray[Any], mask: NDArray[np.bool_]) -> Tensor:
    """Spread the values of all sampled tokens over (rows, tokens), 0 under padding."""
    padded = np.zeros(mask.shape, dtype=values.dtype)
    padded[mask] = values
    return torch.from_numpy(padded)


def filler_row(pad_id: int) -> PaddedRows:
    """Make a row with no counted token, for a rank that must run a forward without rows."""
    token, zero = np.full(1, pad_id, dtype=np.int32), np.zeros(1, dtype=np.int32)
    row = pad(
        [Sample(token, token, zero.astype(np.float32), reward=0.0, group=0, versions=zero)], pad_id
    )
    return replace(row, mask=torch.zeros_like(row.mask))


def _check(row: int, sample: Sample) -> None:
    count = len(sample.tokens)
    if len(sample.prompt_tokens) == 0:
        fault = "an empty prompt: nothing predicts its first token"
    elif count == 0:
        fault = "no sampled token: leave such rows out of the batch"
    elif len(sample.logprobs) != count:
        fault = f"{len(sample.logprobs)} logprobs for {count} tokens"
    elif len(sample.versions) != count:
        fault = f"versions of {len(sample.versions)} tokens for {count}"
    else:
        return
    raise ValueError(f"row {row} of group {sample.group} has {fault}")


def iteration_data(batch: Batch, shard: Mapping[int, ScoredGroup]) -> IterationData:
    """Return this rank's view of an iteration; ValueError where a payload is not the group that the batch names.

    `shard` holds groups of which this rank has rows, by index in the batch; it is empty before the rank has planned.
    """
    lengths = tuple(length for group in batch.groups for length in group.lengths)
    rewards = tuple(reward for group in batch.groups for reward in group.rewards)
    verdicts = tuple(
        outcome for group in batch.groups for outcome in group.outcomes or group.rewards
    )
    groups = tuple(index for index, group in enumerate(batch.groups) for _ in group.lengths)
    first_row = list(accumulate((len(group.lengths) for group in batch.groups), initial=0))
    samples: dict[int, Sample] = {}
    for index, scored in shard.items():
        if scored.prefixes.seq != batch.groups[index].seq:
            raise ValueError(
                f"payload holds group {scored.prefixes.seq}, the batch names {batch.groups[index].seq}"
            )
        for offset, sample in enumerate(_samples(scored, index)):
            samples[first_row[index] + offset] = sample
    parts = _parts_by_name(batch)
    return IterationData(
        batch.iteration, batch.seed, lengths, rewards, groups, samples, verdicts, parts
    )


def _parts_by_name(batch: Batch) -> dict[str, tuple[float, ...]]:
    """Return each part of every row's reward; 0 in a group that has none of that name."""
    names = dict.fromkeys(name for group in batch.groups for name in group.row_parts)
    return {
        name: tuple(
            part
            for group in batch.groups
            for part in group.row_parts.get(name) or (0.0,) * len(group.lengths)
        )
        for name in names
    }


def _samples(scored: ScoredGroup, group: int) -> list[Sample]:
    prompt = token_ids(scored.prefixes.prompt_tokens)
    samples = []
    for row, verdict in scored.judged_rows:
        if not verdict.is_judged:
            continue
        tokens = token_ids(row.tokens)
        behaviour = logprobs(row.logprobs, tokens.size)
        versions = token_versions(row)
        # Without ends no score has a token; scorers refuse such a text where one must have.
        process = verdict.process
        steps = (
            tuple(zip(process.ends, process.scores, strict=True))
            if process and process.ends
            else ()
        )
        samples.append(Sample(prompt, tokens, behaviour, verdict.reward, group, versions, steps))
    return samples
