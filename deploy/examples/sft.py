"""Fine-tune the adapter of a run on its good prefixes by maximum likelihood: the supervised baseline of Prefix-RL.

    python deploy/examples/sft.py RUN --out DIR [--until-version N] [--min-reward R] [--epochs N] [--lr LR]

The prefixes are those that the run judged: their exact tokens, behind the exact tokens of their prompts. Each text of a
prompt counts once, however often it was sampled. With `--until-version 0` only those of the adapter before training are
used, as by rejection sampling; without it the run is a better teacher. The result is a model folder: a run with
`adapter.model = "DIR"` and `algorithm.iterations = 1` judges it as its adapter before training.
"""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import click
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from prefixrl.common.config.load import from_json
from prefixrl.common.errors import ConfigError
from prefixrl.common.host.hub import model_folder
from prefixrl.common.journal import journal
from prefixrl.common.journal.records import GroupScored
from prefixrl.common.prompts.tokenizer import load_tokenizer
from prefixrl.common.wire.packing import token_ids

LanguageModel: TypeAlias = Any
IGNORED = -100
GRAD_CLIP = 1.0
BATCH_ROWS = 32


@dataclass(frozen=True)
class Lesson:
    """A prompt and a prefix that was rewarded, as token ids."""

    prompt: tuple[int, ...]
    prefix: tuple[int, ...]


def lessons(run: Path, min_reward: float, until_version: int | None) -> list[Lesson]:
    """Return the good prefixes of a run, each once; raise ConfigError where there are none."""
    path = run / journal.FOLDER
    if not journal.exists(path):
        raise ConfigError(f"{run} holds no run (no journal in {path})")
    found: dict[Lesson, None] = {}
    for record in journal.read(path):
        if not isinstance(record, GroupScored):
            continue
        group = record.group
        prompt = tuple(token_ids(group.prefixes.prompt_tokens).tolist())
        for row, verdict in zip(group.prefixes.rows, group.verdicts, strict=True):
            is_early = (
                until_version is None or max(span.version for span in row.spans) <= until_version
            )
            if is_early and verdict.is_judged and verdict.reward >= min_reward and row.tokens:
                found[Lesson(prompt, tuple(token_ids(row.tokens).tolist()))] = None
    if not found:
        until = "" if until_version is None else f" of versions up to {until_version}"
        raise ConfigError(
            f"{run} has no prefix{until} with a reward of {min_reward:g} or more; lower --min-reward"
        )
    return list(found)


def padded(rows: Sequence[Lesson], pad: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, mask and labels, all (rows, tokens) int64, padded on the right; prefixes are labelled."""
    longest = max(len(row.prompt) + len(row.prefix) for row in rows)
    ids, labels = torch.full((len(rows), longest), pad), torch.full((len(rows), longest), IGNORED)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        begin, end = len(row.prompt), len(row.prompt) + len(row.prefix)
        ids[number, :end] = torch.tensor(row.prompt + row.prefix)
        labels[number, begin:end] = ids[number, begin:end]
        mask[number, :end] = 1
    return ids, mask, labels


def loss_of(model: LanguageModel, rows: Sequence[Lesson], pad: int) -> Tensor:
    """Return the mean negative log-likelihood of the prefixes' tokens, prompts left out."""
    ids, mask, labels = padded(rows, pad)
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1].float()
    loss: Tensor = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED
    )
    return loss


def epochs_of(
    rows: Sequence[Lesson], batch_rows: int, epochs: int, seed: int
) -> Iterator[list[Lesson]]:
    """Yield batches, every lesson once an epoch, in an order that follows from the seed."""
    for epoch in range(epochs):
        order = list(rows)
        random.Random(f"{seed} {epoch}").shuffle(order)
        yield from (order[start : start + batch_rows] for start in range(0, len(order), batch_rows))


def fit(model: LanguageModel, batches: Sequence[list[Lesson]], pad: int, lr: float) -> float:
    """Take a step of AdamW for every batch, the rate falling by a cosine; return the last loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    model.train()
    last = math.nan
    for step, rows in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = lr * 0.5 * (1.0 + math.cos(math.pi * step / len(batches)))
        loss = loss_of(model, rows, pad)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP)
        optimizer.step()
        last = loss.item()
    model.eval()
    return last


@click.command()
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    help="Folder of the result.",
)
@click.option(
    "--min-reward",
    type=float,
    default=1.0,
    show_default=True,
    help="Least reward of a good prefix.",
)
@click.option("--until-version", type=int, help="Only prefixes of these versions of the adapter.")
@click.option("--epochs", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--lr", type=float, default=1e-5, show_default=True)
def main(
    run: Path, out: Path, min_reward: float, until_version: int | None, epochs: int, lr: float
) -> None:
    """Fine-tune the adapter that RUN began with on RUN's good prefixes, and write it to a folder."""
    config = from_json((run / "config.json").read_text(encoding="utf-8"))
    try:
        rows = lessons(run, min_reward, until_version)
    except ConfigError as error:
        raise click.ClickException(str(error)) from None
    torch.manual_seed(config.seed)
    folder = model_folder(config.adapter.start)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), load_tokenizer(str(folder))
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    batches = list(epochs_of(rows, BATCH_ROWS, epochs, config.seed))
    last = fit(model, batches, pad, lr)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    click.echo(f"{len(rows)} prefixes, {len(batches)} steps, last loss {last:.3f}: {out}")


if __name__ == "__main__":
    main()
