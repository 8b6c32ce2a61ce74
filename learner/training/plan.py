"""The plan of an iteration: rows of each rank and forward. Pure, equal on every rank.

A plan is `[minibatch][rank][micro-batch] -> lines`. A line is rows of one group that share their prompt: the prompt
once, then the rows end to end. Groups are shuffled, not rows, so that a group stays together
(docs/decisions/020-the-prompt-once.md).

ZeRO runs a collective in every backward, so all ranks must run the same number of them: a rank that would have fewer
gets empty micro-batches, for which the model runs a row of weight 0.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from math import ceil, inf, isqrt
from typing import TypeVar

import numpy as np

Value = TypeVar("Value")
Line = tuple[int, ...]
MicroBatch = tuple[Line, ...]
Plan = tuple[tuple[tuple[MicroBatch, ...], ...], ...]
Lengths = Sequence[tuple[int, int]]
"""(prompt tokens, sampled tokens) per row."""

SQUARE_TOKENS = 8192
"""Tokens of a line from which its attention costs more than its layers: 6 x hidden size, here for 1,365.

Attention over a line is computed as a whole square, also where its rows do not see each other.
"""

FORWARD_TOKENS = 256
"""Tokens whose arithmetic takes as long as a forward takes to read the weights, in bfloat16 on H100 to B200.

A forward of fewer tokens is no faster, so one more forward is worth as many tokens of padding.
"""


def plan(
    lengths: Lengths,
    groups: Sequence[int],
    ranks: int,
    minibatches: int,
    micro_batch_tokens: int,
    is_shared: bool,
) -> Plan:
    """Split rows, in the order given, into minibatches, ranks, micro-batches and lines.

    Args:
        lengths: (prompt tokens, sampled tokens) per row.
        groups: of each row; rows of a group have one prompt and stand together.
        ranks: data-parallel processes.
        minibatches: optimiser steps; with fewer rows than that, one minibatch per row.
        micro_batch_tokens: padded tokens (longest line x lines) of one forward; a longer row stands alone.
        is_shared: False: every row is a line of its own, and has its own prompt.

    Returns:
        `[minibatch][rank][micro-batch]` -> lines, () for a forward of weight 0. Every row exactly once; rows of a
        minibatch are a contiguous run of the order given. In tokens without padding the busiest rank has at most
        the mean of all and one row, with its prompt, where rows do not share it, and at most one line more than the
        shortest where they do. Padded tokens and `FORWARD_TOKENS` for each micro-batch cost the busiest rank least.

    Raises:
        ValueError: on no rows or a count below 1.
    """
    for name, count in (
        ("ranks", ranks),
        ("minibatches", minibatches),
        ("micro_batch_tokens", micro_batch_tokens),
    ):
        if count < 1:
            raise ValueError(f"{name} is {count}; it must be at least 1")
    if not lengths:
        raise ValueError("there are no rows to plan")
    planned = []
    parts = min(minibatches, len(lengths))
    # Minibatches have equal numbers of rows, up to one: every optimiser step weighs about the same.
    for start, end in pairwise(len(lengths) * part // parts for part in range(parts + 1)):
        pieces = [list(rows) for _, rows in groupby(range(start, end), key=lambda row: groups[row])]
        packed = _deal(pieces, lengths, ranks, micro_batch_tokens, is_shared)
        # Ranks with fewer forwards get empty ones: a collective waits for every rank.
        forwards = max(len(micros) for micros in packed)
        planned.append(tuple(tuple(micros) + ((),) * (forwards - len(micros)) for micros in packed))
    return tuple(planned)


def plan_iteration(
    lengths: Lengths,
    groups: Sequence[int],
    seed: int,
    ranks: int,
    minibatches: int,
    micro_batch_tokens: int,
    is_shared: bool = True,
) -> Plan:
    """Plan one iteration: its seed shuffles the groups; rows of a group stay together."""
    order = shuffled_rows(groups, seed)
    in_order = plan(
        [lengths[row] for row in order],
        [groups[row] for row in order],
        ranks,
        minibatches,
        micro_batch_tokens,
        is_shared,
    )
    # Back from places in the shuffled order to row numbers of the batch.
    return tuple(
        tuple(
            tuple(tuple(tuple(order[place] for place in line) for line in micro) for micro in share)
            for share in minibatch
        )
        for minibatch in in_order
    )


def by_group(values: Iterable[Value], groups: Iterable[int]) -> dict[int, list[Value]]:
    """Return the values of each group, in their order; `groups`: the group of each value."""
    members: dict[int, list[Value]] = defaultdict(list)
    for value, group in zip(values, groups, strict=True):
        members[group].append(value)
    return members


def shuffled_rows(groups: Sequence[int], seed: int) -> tuple[int, ...]:
    """Return the rows group by group, groups in an order that depends only on number and seed."""
    whole = list(by_group(range(len(groups)), groups).values())
    return tuple(row for place in shuffled(len(whole), seed) for row in whole[place])


def shuffled(count: int, seed: int) -> tuple[int, ...]:
    """Return a permutation of range(count) by `count` and `seed` alone (NumPy PCG64)."""
    return tuple(np.random.Generator(np.random.PCG64(seed)).permutation(count).tolist())


def rows_of_rank(plan: Plan, rank: int) -> tuple[int, ...]:
    """Return the rows that one rank trains, ascending."""
    return tuple(
        sorted(
            row for minibatch in plan for micro in minibatch[rank] for line in micro for row in line
        )
    )


def groups_of_rank(plan: Plan, groups: Sequence[int], rank: int) -> list[int]:
    """Return the groups of which one rank trains a row, ascending; `groups`: of each row."""
    return sorted({groups[row] for row in rows_of_rank(plan, rank)})


def line_tokens(line: Line, lengths: Lengths, is_shared: bool = True) -> int:
    """Return the tokens of a line: the prompt once, or once per row, and every row."""
    return lengths[line[0]][0] * (1 if is_shared else len(line)) + sum(
        [lengths[row][1] for row in line]
    )


def forward_tokens(plan: Plan, lengths: Lengths) -> tuple[int, int]:
    """Return the tokens of one forward of all ranks, without and with padding."""
    micros = [micro for minibatch in plan for share in minibatch for micro in share if micro]
    sizes = [[line_tokens(line, lengths) for line in micro] for micro in micros]
    return sum(map(sum, sizes)), sum(max(micro) * len(micro) for micro in sizes)


def cheapest_rows(prompt: int, sampled: int, rows: int) -> int:
    """Return how many rows of a group a line should hold, by what a row then costs.

    A line of k rows of r tokens after a prompt of P costs T + T^2 / S, with T = P + k r tokens and S = `SQUARE_TOKENS`.
    Per row that is least at k r = sqrt(P (S + P)).

    Args:
        prompt: tokens of the prompt, P.
        sampled: tokens of all rows together.
        rows: their number.
    """
    return max(1, isqrt(prompt * (SQUARE_TOKENS + prompt)) * rows // sampled)


def _deal(
    pieces: Sequence[Sequence[int]],
    lengths: Lengths,
    ranks: int,
    micro_batch_tokens: int,
    is_shared: bool,
) -> list[list[MicroBatch]]:
    """Give each rank micro-batches, those at which the busiest rank is best off.

    Groups are halved again and again, and their lines dealt in two ways.
    """
    best: tuple[int, list[list[MicroBatch]]] | None = None
    most = max(map(len, pieces))
    # Where rows have their own prompts, halving a group costs no tokens: a group stays whole only where that is fair.
    alone = [sum(lengths[row]) for piece in pieces for row in piece]
    fair = inf if is_shared else sum(alone) / ranks + max(alone)
    while True:
        lines = [
            line for piece in pieces for line in _lines(piece, lengths, most, micro_batch_tokens)
        ]
        loads, lines = _longest_first(lines, lengths, is_shared)
        for deal in (_deal_evenly, _deal_neighbours) if ranks > 1 else (_deal_neighbours,):
            shares = deal(loads, ranks)
            # Too uneven where rows have prompts of their own: halving on costs no tokens there.
            if most > 1 and max(sum(loads[place] for place in share) for share in shares) > fair:
                continue
            of_ranks = [[lines[place] for place in share] for share in shares]
            # Rows of a group were dealt together, but each carries its own prompt in the forward.
            if not is_shared:
                of_ranks = [[(row,) for line in share for row in line] for share in of_ranks]
            packed = [_pack(share, lengths, micro_batch_tokens) for share in of_ranks]
            busiest = max(
                sum(line_tokens(each[0], lengths) * len(each) + FORWARD_TOKENS for each in micros)
                for micros in packed
            )
            if best is None or busiest < best[0]:
                best = busiest, packed
        if ranks == 1 or most == 1:
            assert best is not None, "single rows are dealt fairly"
            return best[1]
        most = ceil(most / 2)


def _lines(
    piece: Sequence[int], lengths: Lengths, most: int, micro_batch_tokens: int
) -> Iterator[Line]:
    """Cut rows of one group into lines of at most `most` rows, of about as many each."""
    prompt, rows, sampled = lengths[piece[0]][0], len(piece), sum(lengths[row][1] for row in piece)
    fitting = max(1, (micro_batch_tokens - prompt) * rows // sampled)
    most = min(most, fitting, cheapest_rows(prompt, sampled, rows))
    most = ceil(rows / ceil(rows / most))
    line: list[int] = []
    tokens = prompt
    for row in piece:
        if line and (len(line) == most or tokens + lengths[row][1] > micro_batch_tokens):
            yield tuple(line)
            line, tokens = [], prompt
        line.append(row)
        tokens += lengths[row][1]
    yield tuple(line)


def _deal_evenly(loads: Sequence[int], ranks: int) -> list[list[int]]:
    """Give each place of `loads`, largest first, to the rank with the least.

    The loads of ranks differ by one of `loads` at most.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    totals = [0] * ranks
    for place, load in enumerate(loads):
        rank = totals.index(min(totals))
        shares[rank].append(place)
        totals[rank] += load
    return shares


def _deal_neighbours(loads: Sequence[int], ranks: int) -> list[list[int]]:
    """Give every rank neighbouring places of `loads`, largest first.

    The loads of ranks differ by one of `loads` at most.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    dealt, total = 0, sum(loads)
    for place, load in enumerate(loads):
        shares[(2 * dealt + load) * ranks // (2 * total)].append(place)
        dealt += load
    totals = [sum(loads[place] for place in share) for share in shares]
    while max(totals) - min(totals) > loads[0]:
        full, free = totals.index(max(totals)), totals.index(min(totals))
        # The place that is nearest to those of the other rank.
        place = shares[full].pop(-1 if full < free else 0)
        shares[free].insert(0 if full < free else len(shares[free]), place)
        totals[full] -= loads[place]
        totals[free] += loads[place]
    return shares


def _pack(lines: Sequence[Line], lengths: Lengths, micro_batch_tokens: int) -> list[MicroBatch]:
    """Cut lines, the longest first, into the micro-batches that cost least together."""
    sizes, ordered = _longest_first(lines, lengths)
    count = len(ordered)
    # From each place on: the least cost, and the end of the first micro-batch.
    costs, ends, numbers = np.zeros(count + 1, dtype=np.int64), [0] * count, np.arange(1, count + 1)
    for first in reversed(range(count)):
        most = max(1, micro_batch_tokens // sizes[first])
        candidates = sizes[first] * numbers[: min(count - first, most)]
        candidates += costs[first + 1 : first + most + 1]
        least = int(candidates.argmin())
        costs[first], ends[first] = candidates[least] + FORWARD_TOKENS, first + least + 1
    micros, first = [], 0
    while first < count:
        micros.append(tuple(ordered[first : ends[first]]))
        first = ends[first]
    return micros


def _longest_first(
    lines: Sequence[Line], lengths: Lengths, is_shared: bool = True
) -> tuple[list[int], list[Line]]:
    """Return tokens and lines, the most first; of equal ones the first rows come first."""
    ordered = sorted((-line_tokens(line, lengths, is_shared), line) for line in lines)
    return [-tokens for tokens, _ in ordered], [line for _, line in ordered]
