"""`prefixrl init`: a run file to begin with, by the size of the adapter (docs/training.md)."""

import os
import re
from pathlib import Path
from typing import Any, Literal

import click

from prefixrl.common.config.data import HUB, PROBLEM_SETS
from prefixrl.common.config.foreign.files import read_toml
from prefixrl.common.config.prompting import GGUF
from prefixrl.common.config.section import toml
from prefixrl.common.errors import ConfigError, DataError
from prefixrl.common.host.placement import gpus_here
from prefixrl.common.host.template import rendered

Size = Literal["tiny", "small", "1b", "7b"]
MOST_BYTES: dict[Size, int] = {"tiny": 2**26, "small": 600_000_000, "1b": 2**33}
"""Largest weights on disk of each size, in bfloat16: 0.03, 0.3 and four billion parameters."""
HELD_OUT = {"math_filtered": "math500", "math": "math500", "gsm8k": "gsm8k"}
"""Problem sets to judge on, by the one that is trained."""
REMARK_COLUMN = 28
RECIPES: dict[Size, dict[str, Any]] = read_toml(
    Path(__file__).parent / "tables/recipes.toml", "the table of recipes"
)  # type: ignore[assignment]
"""Values that follow from the size of the adapter."""


def run_file(size: Size | None, adapter: str, target: str, data: str, held_out: str | None) -> str:
    """Return the text of a run file; raises ConfigError or DataError for what is not there."""
    adapter = _model("--adapter", adapter)
    target = _model("--target", target)
    size = size or _size_of(adapter)
    judged = held_out or HELD_OUT.get(data)
    file = Path(data.removeprefix(HUB))
    name = file.resolve().parent.name if file.stem == "train" else file.name.partition(".")[0]
    text = rendered(
        "prefixrl.deploy",
        "examples/run.toml.j2",
        size=size,
        recipe=RECIPES[size],
        directory=toml(f"runs/{name}"),
        adapter=toml(adapter),
        target=toml(target),
        has_families=_has_families(data),
        train=toml(_data("--data", data)),
        judged=toml(_data("--eval", judged)) if judged else None,
        scorers=2 if size == "tiny" else max(1, len(gpus_here()) - 1),
    )
    return "\n".join(map(_aligned, text.splitlines())) + "\n"


def _aligned(line: str) -> str:
    """Return a line with its remark in the column of all remarks."""
    setting, mark, remark = line.partition("  # ")
    return f"{setting:<{REMARK_COLUMN}}{mark}{remark}" if mark and setting.strip() else line


def _model(option: str, model: str) -> str:
    """Return an absolute folder, or a hub name; raises DataError."""
    folder = Path(os.path.expanduser(model))
    if folder.is_dir():
        if not (folder / "config.json").exists():
            raise DataError(f"{option} {model}: the folder holds no model (no config.json){GGUF}")
        return str(folder.resolve())
    if folder.exists() or not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", model):
        raise DataError(
            f"{option} {model}: there is no such folder (looked at {folder.resolve()}), nor is it a hub name "
            f"(OWNER/NAME: openai-community/gpt2, not gpt2){GGUF}"
        )
    return model


def _data(option: str, data: str) -> str:
    """Return a problem set, a hub dataset or an absolute path; raises DataError."""
    if data in PROBLEM_SETS or data.startswith(HUB):
        return data
    path = Path(os.path.expanduser(data))
    if not path.exists():
        names = ", ".join(PROBLEM_SETS)
        raise DataError(
            f"{option} {data}: there is no such file or folder (looked at {path.resolve()}), no problem set of that "
            f"name ({names}), and no dataset of the hub (hf:OWNER/NAME)"
        )
    return str(path.resolve())


def _has_families(data: str) -> bool:
    """Return True if the first row of a JSONL file has a family; its other columns are found by their usual names."""
    path = Path(os.path.expanduser(data))
    if path.suffix != ".jsonl" or not path.is_file():
        return False
    with path.open("rb") as file:
        return b'"family":' in file.readline()


def _size_of(adapter: str) -> Size:
    """Return the size of a local model by its files; raises ConfigError for another."""
    weights = sum(path.stat().st_size for path in Path(adapter).glob("*.safetensors"))
    if not weights:
        raise ConfigError(
            f"give --size, one of {', '.join(RECIPES)}: it follows from the weights of the adapter, and {adapter} is "
            f"no folder on this host that has them"
        )
    return next((size for size, most in MOST_BYTES.items() if weights <= most), "7b")


SIZE = (
    "By the adapter's parameters: below 0.03, 0.3, 4, or above 4 billion.  [default: by its files]"
)
MODEL = "A Hugging Face folder or hub name."
DATA = "A problem set, file, folder or hf:OWNER/NAME."


@click.command("init")
@click.option("--size", type=click.Choice([*RECIPES]), help=SIZE)
@click.option("--adapter", required=True, metavar="MODEL", help=MODEL)
@click.option("--target", required=True, metavar="MODEL", help=MODEL)
@click.option("--data", required=True, metavar="SET", help=DATA)
@click.option("--eval", "held_out", metavar="SET", help="Held-out problems, likewise.")
def init_command(
    size: Size | None, adapter: str, target: str, data: str, held_out: str | None
) -> None:
    """Print a run file to begin with, its values by the size of the adapter.

    For example: prefixrl init --adapter A --target T --data train.jsonl > run.toml
    """
    click.echo(run_file(size, adapter, target, data, held_out), nl=False)
