"""`prefixrl init`: a run file to begin with, by the size of the adapter (docs/training.md)."""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from prefixrl.common.config.data import HUB, PROBLEM_SETS
from prefixrl.common.errors import ConfigError, DataError
from prefixrl.common.host.placement import gpus_here

Size = Literal["tiny", "1b", "7b"]
MOST_TINY_BYTES, MOST_1B_BYTES = 2**29, 2**33
"""Largest weights on disk of each size: a quarter of a billion, and four billion parameters in bfloat16."""
HELD_OUT = {"math_filtered": "math500", "math": "math500", "gsm8k": "gsm8k"}
"""Problem sets to judge on, by the one that is trained."""
REMARK_COLUMN = 28
QUESTIONS = ("question", "problem", "prompt", "query", "input", "instruction")
ANSWERS = ("answer", "gold", "gold_answer", "final_answer", "target", "ground_truth", "solution", "output")
"""Names that columns have elsewhere; the first one found is taken."""


@dataclass(frozen=True)
class Recipe:
    """Values that follow from the size of the adapter."""

    meant_for: str
    prefix_tokens: int
    rollout_temperature: float
    max_new_tokens: int
    groups: int
    iterations: int
    minibatches: int
    entropy: float
    kl: float
    actor_lr: float
    critic_lr: float
    dtype: str
    micro_batch_tokens: int
    checkpoint_every: int
    lora: bool = False


RECIPES: dict[Size, Recipe] = {
    "tiny": Recipe(
        meant_for="below 0.25 billion parameters, on a CPU: the values of deploy/examples/letters",
        prefix_tokens=8, rollout_temperature=1.0, max_new_tokens=64, groups=32, iterations=300, minibatches=1,
        entropy=0.03, kl=0.01, actor_lr=2.5e-4, critic_lr=1e-3, dtype="float32", micro_batch_tokens=4096,
        checkpoint_every=20,
    ),
    "1b": Recipe(
        meant_for="0.25 to 4 billion parameters: the values of the published recipe (deploy/examples/math_qwen2.5)",
        prefix_tokens=32, rollout_temperature=0.7, max_new_tokens=2048, groups=512, iterations=175, minibatches=8,
        entropy=1e-3, kl=1e-3, actor_lr=5e-7, critic_lr=9e-6, dtype="bfloat16", micro_batch_tokens=4096,
        checkpoint_every=10,
    ),
    "7b": Recipe(
        meant_for="above 4 billion parameters: the published recipe with low-rank matrices, at ten times its rates",
        prefix_tokens=32, rollout_temperature=0.7, max_new_tokens=2048, groups=512, iterations=175, minibatches=8,
        entropy=1e-3, kl=1e-3, actor_lr=5e-6, critic_lr=9e-5, dtype="bfloat16", micro_batch_tokens=4096,
        checkpoint_every=10, lora=True,
    ),
}  # fmt: skip


def run_file(size: Size | None, adapter: str, target: str, data: str, held_out: str | None) -> str:
    """Return the text of a run file; raises ConfigError or DataError for what is not there."""
    adapter, target = _model("--adapter", adapter), _model("--target", target)
    size = size or _size_of(adapter)
    columns = _columns(data)
    train, name = _data("--data", data), Path(data.removeprefix(HUB)).name.partition(".")[0]
    judged = held_out or HELD_OUT.get(data)
    said = _quoted(_data("--eval", judged)) if judged else None
    evaluation = f"eval = {said}" if said else '# eval = "heldout.jsonl"  # without it nothing is judged at the end'
    recipe = RECIPES[size]
    lora = LORA if recipe.lora else ""
    text = TEMPLATE.format(
        size=size, recipe=recipe, directory=_quoted(f"runs/{name}"), adapter=_quoted(adapter), target=_quoted(target),
        train=_quoted(train), evaluation=evaluation, columns=columns, rows=recipe.groups * 8, lora=lora,
        scorers=2 if size == "tiny" else max(1, len(gpus_here()) - 1),
    )  # fmt: skip
    return "\n".join(map(_aligned, text.splitlines())) + "\n"


def _aligned(line: str) -> str:
    """Return a line with its remark in the column of all remarks."""
    setting, mark, remark = line.partition("  # ")
    return f"{setting:<{REMARK_COLUMN}}{mark}{remark}" if mark and setting.strip() else line


def _quoted(text: str) -> str:
    """Return a text as TOML has it; JSON's form is one of TOML's."""
    return json.dumps(text, ensure_ascii=False)


def _model(option: str, model: str) -> str:
    """Return an absolute folder, or a hub name; raises DataError."""
    folder = Path(os.path.expanduser(model))
    if folder.is_dir():
        if not (folder / "config.json").exists():
            raise DataError(f"{option} {model}: the folder holds no model (no config.json)")
        return str(folder.resolve())
    if folder.exists() or not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", model):
        raise DataError(
            f"{option} {model}: there is no such folder (looked at {folder.resolve()}), nor is it a hub name"
        )
    return model


def _data(option: str, data: str) -> str:
    """Return a problem set, a hub dataset or an absolute path; raises DataError."""
    if data in PROBLEM_SETS or data.startswith(HUB):
        return data
    path = Path(os.path.expanduser(data))
    if not path.exists():
        known = ", ".join(PROBLEM_SETS)
        raise DataError(
            f"{option} {data}: there is no such file or folder (looked at {path.resolve()}), no problem set of that "
            f"name ({known}), and no dataset of the hub (hf:OWNER/NAME)"
        )
    return str(path.resolve())


def _columns(data: str) -> str:
    """Return lines that name the columns of a JSONL file; raises DataError for missing ones."""
    path = Path(os.path.expanduser(data))
    if data in PROBLEM_SETS or path.suffix != ".jsonl" or not path.is_file():
        return ""
    with path.open("rb") as file:
        first = file.readline()
    try:
        row = msgspec.json.decode(first, type=dict[str, object])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DataError(f"--data {data}: its first line is no JSON object ({error}); is it JSONL in UTF-8?") from None
    lines = ""
    for key, known in (("question_column", QUESTIONS), ("answer_column", ANSWERS)):
        found = next((name for name in known if name in row), None)
        if found is None:
            raise DataError(
                f"--data {data}: its first row has the columns {', '.join(row)}, none of which is a "
                f"{known[0]} (known names: {', '.join(known)}); rename one, or write {key} into the file by hand"
            )
        lines += "" if found == known[0] else f"{key} = {_quoted(found)}\n"
    return lines + ('family_column = "family"\n' if "family" in row else "")


def _size_of(adapter: str) -> Size:
    """Return the size of a local model by its files; raises ConfigError for another."""
    weights = sum(path.stat().st_size for path in Path(adapter).glob("*.safetensors")) if Path(adapter).is_dir() else 0
    if not weights:
        raise ConfigError(
            f"give --size, one of {', '.join(RECIPES)}: it follows from the weights of the adapter, and {adapter} is "
            f"no folder on this host that has them"
        )
    return "tiny" if weights <= MOST_TINY_BYTES else "1b" if weights <= MOST_1B_BYTES else "7b"


LORA = """\
gradient_checkpointing = true

[learner.lora]  # without this section all weights are trained, at a tenth of the rates above
rank = 32
alpha = 64
"""
TEMPLATE = """\
# A run file by `prefixrl init --size {size}`, for adapters
# {recipe.meant_for}.
# `prefixrl launch FILE --check` says what follows from it; `prefixrl config KEY` explains a key. What to change first:
# groups_per_iteration, actor_lr, prefix_tokens, max_new_tokens, scorers.
directory = {directory}  # everything that the run leaves; relative to where you start the command
seed = 42

[adapter]
model = {adapter}

[target]
model = {target}

[data]
train = {train}
{evaluation}
{columns}
[rollout]
prefix_tokens = {recipe.prefix_tokens}  # most tokens that the adapter writes
temperature = {recipe.rollout_temperature}

[scorer]
max_new_tokens = {recipe.max_new_tokens}  # most tokens that the target adds; a cut answer has mostly reward 0
temperature = 0.7
keep_completions = true  # `prefixrl samples` shows them

[algorithm]
name = "gae"
groups_per_iteration = {recipe.groups}  # x 8 prefixes = {rows:,} completions per iteration
samples_per_prompt = 8
iterations = {recipe.iterations}  # or data.epochs; too few where the entropy has not fallen at the end
minibatches = {recipe.minibatches}  # optimiser steps per iteration
max_staleness = 2  # age of samples in versions; 0 is synchronous
entropy = {recipe.entropy:g}  # raise it where the adapter collapses onto one prefix
kl = {recipe.kl:g}  # holds the adapter to what it was

[learner]
actor_lr = {recipe.actor_lr:g}
critic_lr = {recipe.critic_lr:g}
dtype = "{recipe.dtype}"
micro_batch_tokens = {recipe.micro_batch_tokens}  # as many as fit: --check prints the memory
{lora}
[checkpoint]
every = {recipe.checkpoint_every}

[launch]
rollouts = 1
scorers = {scorers}  # `prefixrl advise RUN` says how many would keep the learner busy
"""
