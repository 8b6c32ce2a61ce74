"""The share of tokens that a bound on a row's ratio takes the gradient from, by length of the row, noise and drift.

Noise is what an engine computes otherwise than the learner: the log ratio of a token is normal with variance 2 k and
mean -k, where k is the mismatch KL per token. Nothing was learned there, so a bound should take nothing. Drift is a
policy that has moved: every token is d nats further the way that its advantage pushes it; there a bound is to act.

    row         1.6 on the whole row, whatever its length
    root        1.6 on rows of up to 32 tokens, of n tokens 1.6 to the power of the root of n / 32: `bound_ratio`
    length      1.6 to the power of n / 32
    token       1.6 on each token by itself

    python -m benchmarks.bound_noise [--quick] --json FILE
"""

import math
import time
from pathlib import Path

import click
import torch
from torch import Tensor

from benchmarks.results import Figure, Report, commit, options
from prefixrl.common.config.algorithm import BOUND_TOKENS
from prefixrl.learner.training.ppo import is_past_ratio

LENGTHS = (8, 32, 64, 256, 1000, 3072, 4096)
NOISES = (0.0, 1e-5, 1e-4, 5e-4, 1e-3)
DRIFTS = (0.0, 0.003, 0.01, 0.03, 0.1)
BOUND, LOGPROB = 1.6, -1.0


def shares(theta: Tensor, behaviour: Tensor, advantages: Tensor) -> dict[str, Tensor]:
    """Return where each rule bounds a token, by its name; all (rows, tokens)."""
    mask, tokens = torch.ones_like(theta, dtype=torch.bool), theta.shape[1]
    moved, pushed = (theta - behaviour).sum(dim=1, keepdim=True), advantages.sign()
    limit = math.log(BOUND)
    return {
        "row": (pushed * moved > limit).expand_as(theta),
        "root": is_past_ratio(theta, behaviour, mask, advantages, BOUND),
        "length": (pushed * moved > limit * max(1.0, tokens / BOUND_TOKENS)).expand_as(theta),
        "token": pushed * (theta - behaviour) > limit,
    }


def cell(tokens: int, noise: float, drift: float, rows: int) -> list[Figure]:
    """Figures of one cell: of all rows, and of those of negative advantage."""
    draws = torch.Generator().manual_seed(1)
    behaviour = torch.full((rows, tokens), LOGPROB, dtype=torch.float64)
    signs = (
        torch.where(torch.rand((rows, 1), generator=draws) < 0.5, -1.0, 1.0)
        .double()
        .expand(rows, tokens)
    )
    noisy = (
        math.sqrt(2 * noise) * torch.randn((rows, tokens), generator=draws, dtype=torch.float64)
        - noise
    )
    found = shares(behaviour + noisy + drift * signs, behaviour, signs)
    name = f"{tokens} tokens, noise {noise:g}, drift {drift:g}"
    figures = []
    for rule, is_bounded in found.items():
        for kind, part in (("", is_bounded), (" of negative rows", is_bounded[signs[:, 0] < 0])):
            value = part.double().mean().item()
            figures.append(Figure(f"{name}: {rule}{kind}", "share", value, rows, (value, value)))
    return figures


@click.command()
@options
def main(path: Path, quick: bool) -> None:
    """Compute and write the figures."""
    at, started_s = commit(), time.monotonic()
    rows = 100 if quick else 2000
    figures: list[Figure] = []
    for tokens in LENGTHS:
        for noise, drift in [
            *((each, 0.0) for each in NOISES[1:]),
            *((1e-4, each) for each in DRIFTS[1:]),
        ]:
            found = cell(tokens, noise, drift, rows)
            print(*(f"{each.name} {each.value:.3f}" for each in found[::2]), sep="; ", flush=True)
            figures += found
    Report("bound_noise", quick, {"bound": BOUND, "rows": rows}, figures, {}, at).finish(
        path, started_s
    )


if __name__ == "__main__":
    main()
