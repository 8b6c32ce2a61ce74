"""The plan of an iteration: rows of each rank and forward. Pure, equal on every rank.

A plan is `[minibatch][rank][micro-batch] -> row indices`. ZeRO runs a collective in every backward, so all ranks must
run the same number of them: a rank that would have fewer gets empty micro-batches, for which the model runs a row of
weight 0.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

MicroBatch = tuple[int, ...]
Plan = tuple[tuple[tuple[MicroBatch, ...], ...], ...]


def plan(lengths: Sequence[tuple[int, int]], ranks: int, minibatches: int, micro_batch_tokens: int) -> Plan:
    """Split rows, in the order given, into minibatches, ranks and micro-batches.

    Args:
        lengths: (prompt tokens, sampled tokens) per row.
        ranks: data-parallel processes.
        minibatches: optimiser steps; with fewer rows than that, one minibatch per row.
        micro_batch_tokens: padded tokens (longest row x rows) of one forward; a longer row stands alone.

    Returns:
        `[minibatch][rank][micro-batch]` -> row indices, () for a forward of weight 0. Every row exactly once; rows of a
        minibatch are a contiguous run of the order given; ranks differ by at most the longest row of the minibatch.

    Raises:
        ValueError: on no rows or a count below 1.
    """
    for name, count in (("ranks", ranks), ("minibatches", minibatches), ("micro_batch_tokens", micro_batch_tokens)):
        if count < 1:
            raise ValueError(f"{name} is {count}; it must be at least 1")
    if not lengths:
        raise ValueError("there are no rows to plan")
    sizes = [prompt + sampled for prompt, sampled in lengths]
    runs = _even_runs(len(sizes), min(minibatches, len(sizes)))
    return tuple(_minibatch(run, sizes, ranks, micro_batch_tokens) for run in runs)


def plan_iteration(
    lengths: Sequence[tuple[int, int]], seed: int, ranks: int, minibatches: int, micro_batch_tokens: int
) -> Plan:
    """Plan one iteration: rows are shuffled by its seed, so that minibatches mix groups."""
    order = shuffled(len(lengths), seed)
    in_order = plan([lengths[row] for row in order], ranks, minibatches, micro_batch_tokens)
    return tuple(
        tuple(tuple(tuple(order[position] for position in micro) for micro in share) for share in minibatch)
        for minibatch in in_order
    )


def shuffled(rows: int, seed: int) -> tuple[int, ...]:
    """Return a permutation of range(rows) that depends only on `rows` and `seed` (NumPy PCG64)."""
    return tuple(np.random.Generator(np.random.PCG64(seed)).permutation(rows).tolist())


def rows_of_rank(plan: Plan, rank: int) -> tuple[int, ...]:
    """Return the rows that one rank trains, ascending."""
    return tuple(sorted(row for minibatch in plan for micro in minibatch[rank] for row in micro))


def _even_runs(rows: int, parts: int) -> list[range]:
    edges = [rows * part // parts for part in range(parts + 1)]
    return [range(start, end) for start, end in pairwise(edges)]


def _minibatch(
    rows: range, sizes: Sequence[int], ranks: int, micro_batch_tokens: int
) -> tuple[tuple[MicroBatch, ...], ...]:
    packed = [_pack(share, sizes, micro_batch_tokens) for share in _balance(rows, sizes, ranks)]
    forwards = max(len(micros) for micros in packed)
    return tuple(tuple(micros) + ((),) * (forwards - len(micros)) for micros in packed)


def _balance(rows: range, sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Give the longest row to the shortest rank: ranks differ by at most one row's tokens."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for row in _longest_first(rows, sizes):
        rank = loads.index(min(loads))
        shares[rank].append(row)
        loads[rank] += sizes[row]
    return shares


def _pack(rows: Sequence[int], sizes: Sequence[int], micro_batch_tokens: int) -> list[MicroBatch]:
    """Put rows of similar length together: each micro-batch is as wide as its first row."""
    micros: list[list[int]] = []
    for row in _longest_first(rows, sizes):
        if micros and sizes[micros[-1][0]] * (len(micros[-1]) + 1) <= micro_batch_tokens:
            micros[-1].append(row)
        else:
            micros.append([row])
    return [tuple(micro) for micro in micros]


def _longest_first(rows: Sequence[int], sizes: Sequence[int]) -> list[int]:
    return sorted(rows, key=lambda row: (-sizes[row], row))
