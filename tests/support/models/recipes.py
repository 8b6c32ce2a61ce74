"""The shipped recipes with a small data file in place of those from the hub."""

from pathlib import Path

from prefixrl.common.config.load import load
from prefixrl.common.config.run import RunConfig
from support.paths import EXAMPLES
from support.rows import jsonl


def settings_of(folder: Path) -> tuple[str, ...]:
    """Settings that put data and run into `folder`."""
    data = folder / "train.jsonl"
    question = "x" * 210  # as long as those of MATH on average
    jsonl(folder, [{"id": i, "question": question, "answer": 1} for i in range(9)], data.name)
    return f"data.train={data}", f"data.eval={data}", f"directory={folder}"


def recipe(name: str, folder: Path, *settings: str) -> RunConfig:
    return load(EXAMPLES / name / "run.toml", (*settings_of(folder), *settings))
