"""Padding in one iteration of a batch of true size, beside forwards that are filled to the limit.

    python -m benchmarks.padding --json FILE

512 groups of 8 rows in 8 minibatches, the shape of the published recipe. Prompts are lognormal (median 100 tokens);
prefixes have 32 tokens, answers of direct mode are lognormal (median 500, at most 3,000). The plan is the learner's,
for 1 and 8 ranks and both sizes of `learner.micro_batch_tokens`. The other way to plan puts each line, longest first,
on the rank with the fewest tokens, and into the open forward while that has room. Nothing is timed: it is arithmetic.
"""

import time
from pathlib import Path

import click
import numpy as np

from benchmarks.results import Figure, Report, commit, options
from prefixrl.learner.training.plan import forward_tokens, line_tokens, plan_iteration

GROUPS, ROWS, MINIBATCHES, PREFIX_TOKENS, MOST_ANSWER_TOKENS = 512, 8, 8, 32, 3000
BUDGETS, RANKS = (4096, 16_384), (1, 8)

Lengths = list[tuple[int, int]]


def lengths_of(is_direct: bool, seed: int) -> Lengths:
    """(prompt tokens, sampled tokens) of every row, group by group."""
    draws = np.random.default_rng(seed)
    prompts = np.exp(draws.normal(np.log(100), 0.5, GROUPS)).astype(int).clip(20, 1024)
    answers = (
        np.exp(draws.normal(np.log(500), 0.7, GROUPS * ROWS))
        .astype(int)
        .clip(20, MOST_ANSWER_TOKENS)
    )
    sampled = answers if is_direct else np.full(GROUPS * ROWS, PREFIX_TOKENS)
    return [(int(prompts[row // ROWS]), int(tokens)) for row, tokens in enumerate(sampled)]


def padding(lengths: Lengths, ranks: int, budget: int, seed: int) -> tuple[float, float]:
    """Share of the computed tokens that is padding: by the learner's plan, and with forwards filled to the limit."""
    groups = [row // ROWS for row in range(len(lengths))]
    plan = plan_iteration(lengths, groups, seed, ranks, MINIBATCHES, budget)
    tokens, padded = forward_tokens(plan, lengths)
    filled = 0
    for minibatch in plan:
        lines = [line for share in minibatch for micro in share for line in micro]
        filled += filled_tokens([line_tokens(line, lengths) for line in lines], ranks, budget)
    return 1 - tokens / padded, 1 - tokens / filled


def filled_tokens(sizes: list[int], ranks: int, budget: int) -> int:
    """Padded tokens of lines that are dealt longest first, in forwards filled to the limit."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for size in sorted(sizes, reverse=True):
        min(shares, key=sum).append(size)
    total = 0
    for share in shares:
        width = count = 0
        for size in share:
            if width * (count + 1) > budget or not count:
                total += width * count
                width, count = size, 0
            count += 1
        total += width * count
    return total


@click.command()
@options
def main(path: Path, quick: bool) -> None:
    started_s, measured = time.monotonic(), commit()
    seeds = (0,) if quick else (0, 1, 2, 3, 4)
    figures = []
    for is_direct in (False, True):
        for ranks in RANKS:
            for budget in BUDGETS:
                found = [
                    padding(lengths_of(is_direct, seed), ranks, budget, seed) for seed in seeds
                ]
                ours, filled = (sorted(each) for each in zip(*found, strict=True))
                middle = len(seeds) // 2
                mode = "direct" if is_direct else "prefix"
                figures.append(
                    Figure(
                        name=f"padding, {mode} mode, {ranks} ranks, {budget} tokens",
                        unit="share of computed tokens",
                        value=ours[middle],
                        n=len(seeds),
                        spread=(ours[0], ours[-1]),
                        baseline=filled[middle],
                        baseline_name="forwards filled to the limit",
                        ratio=ours[middle] / filled[middle],
                        statistic="median",
                        spread_kind="least and largest value",
                    )
                )
    settings = {"groups": GROUPS, "rows": ROWS, "minibatches": MINIBATCHES, "seeds": seeds}
    Report("padding", quick, settings, figures, None, measured).finish(path, started_s)


if __name__ == "__main__":
    main()
