"""Attention of one token per row on a CPU, beside what transformers does for the same layer.

Both get a mask, as rows in one block of a cache need; keys and values are columns of a wider block. transformers
repeats keys and values for every head that shares them and calls torch's kernel. `embedded/cached_attention.py` does
neither (in bfloat16 it calls the kernel, but repeats nothing). One thread, three layers in turn so that caches of the
processor are not all warm. Milliseconds per layer and step are those of the CPU, medians of rounds in turn.

    python -m benchmarks.decode_attention [--quick] --json FILE
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click
import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from benchmarks.results import Figure, Report, commit, options
from prefixrl.common.engines.embedded.cached_attention import one_token

LAYERS, SPARE = 3, 20
ROUNDS, QUICK_ROUNDS = 15, 3
SPREAD = "least and largest value"


@dataclass(frozen=True)
class Shape:
    """Rows in their seats, and the heads of a model."""

    name: str
    rows: int
    heads: int
    shared: int
    """Heads of keys and values."""
    size: int
    columns: int


SHAPES = (
    Shape("the example's target, 128 rows of 45 tokens", 128, 4, 4, 32, 45),
    Shape("Qwen2.5-0.5B, 32 rows of 200 tokens", 32, 14, 2, 64, 200),
    Shape("Qwen2.5-1.5B, 8 rows of 1,000 tokens", 8, 12, 2, 128, 1000),
)


def works(shape: Shape, dtype: torch.dtype) -> dict[str, Callable[[], Tensor]]:
    """The same step by both ways."""
    made = torch.Generator().manual_seed(1)
    block = shape.rows, shape.shared, shape.columns + SPARE, shape.size
    caches = [
        [torch.randn(block, generator=made).to(dtype) for _ in range(2)] for _ in range(LAYERS)
    ]
    query = torch.randn(shape.rows, shape.heads, 1, shape.size, generator=made).to(dtype)
    mask = torch.rand(shape.rows, 1, 1, shape.columns, generator=made) > 0.1
    mask[..., -1] = True
    layer, scaling = nn.Module(), shape.size**-0.5
    layer.num_key_value_groups = shape.heads // shape.shared  # type: ignore[assignment]
    used = slice(0, shape.columns)

    def theirs() -> Tensor:
        for keys, values in caches:
            output = sdpa_attention_forward(
                layer, query, keys[:, :, used], values[:, :, used], mask, scaling=scaling
            )
        return output[0]

    def ours() -> Tensor:
        for keys, values in caches:
            found = one_token(query, keys[:, :, used], values[:, :, used], mask, scaling)
        return found

    return {"theirs": theirs, "ours": ours}


def timed_ms(work: Callable[[], Tensor]) -> float:
    """CPU milliseconds per layer, over at least a twentieth of a second."""
    begin_s, calls = time.process_time(), 0
    while (spent_s := time.process_time() - begin_s) < 0.05:
        work()
        calls += 1
    return 1e3 * spent_s / (calls * LAYERS)


@torch.inference_mode()
def measured(shape: Shape, dtype: torch.dtype, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of both ways, in turn."""
    both = works(shape, dtype)
    gap = (both["theirs"]() - both["ours"]()).abs().max().item()
    assert gap < (1e-4 if dtype == torch.float32 else 0.05), f"{shape.name}: they differ by {gap}"
    found: dict[str, list[float]] = {name: [] for name in both}
    for _ in range(rounds):
        for name, work in both.items():
            found[name].append(timed_ms(work))
    return found


@click.command()
@options
def main(path: Path, quick: bool) -> None:
    """Measure and write the figures."""
    at, started_s = commit(), time.monotonic()
    torch.set_num_threads(1)
    figures, details = [], {}
    for dtype, name in ((torch.float32, "float32"), (torch.bfloat16, "bfloat16")):
        for shape in SHAPES:
            label = f"{shape.name}, {name}"
            found = details[label] = measured(shape, dtype, QUICK_ROUNDS if quick else ROUNDS)
            ours, theirs = found["ours"], found["theirs"]
            value, against = statistics.median(ours), statistics.median(theirs)
            spread = min(ours), max(ours)
            figures.append(
                Figure(
                    label,
                    "ms",
                    value,
                    len(ours),
                    spread,
                    against,
                    "transformers",
                    value / against,
                    "median",
                    SPREAD,
                )
            )
            print(label, figures[-1].ratio, flush=True)
    settings = {"shapes": [vars(shape) for shape in SHAPES], "layers": LAYERS}
    Report("decode_attention", quick, settings, figures, details, at).finish(path, started_s)


if __name__ == "__main__":
    main()
