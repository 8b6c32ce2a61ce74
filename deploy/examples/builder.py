"""The parts that every `build.py` of an example has: its command line, and saving a model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from transformers import PreTrainedTokenizerFast


def command_of(build: Callable[[Path, int, int], None], folder: Path, steps: int) -> click.Command:
    """Return the command line of `build(out, steps, seed)`.

    Args:
        folder: of the example, which is the default of --out.
        steps: the default of --steps.
    """

    @click.command(help=build.__doc__)
    @click.option(
        "--out",
        type=click.Path(file_okay=False, path_type=Path),
        default=folder,
        help="Folder to write to.",
    )
    @click.option("--steps", type=click.IntRange(min=1), default=steps, show_default=True)
    @click.option("--seed", type=int, default=0, show_default=True)
    def main(out: Path, steps: int, seed: int) -> None:
        build(out, steps, seed)

    return main


def begin(seed: int) -> None:
    """Make what torch computes from now on repeatable."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)


def save(model: Any, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a model folder that other accounts can read: safetensors makes files for their owner alone."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
