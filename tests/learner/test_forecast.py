"""`--check` on the shipped recipes and on the example: the arithmetic a person would do by hand."""

import json
from pathlib import Path

import pytest

from prefixrl.common.config import load
from prefixrl.learner.forecast import forecast, parameters

EXAMPLES = Path(__file__).resolve().parents[2] / "deploy/examples"


def rows(path: Path, count: int) -> Path:
    path.write_text(
        "".join(json.dumps({"id": i, "question": "?", "answer": 1}) + "\n" for i in range(count))
    )
    return path


def test_the_qwen_recipe_has_the_published_batch_arithmetic(tmp_path: Path) -> None:
    data = rows(tmp_path / "train.jsonl", 8888)
    config = load(
        EXAMPLES / "math_qwen2.5/run.toml",
        (f"data.train={data}", f"data.eval={data}", f"directory={tmp_path}"),
    )
    said = forecast(config)
    assert "88880 groups in 174 iterations" in said
    assert "512 groups x 8 rows = 4096 rows, 1 x 8 optimiser steps; 1392 in all" in said
    assert "at most 1024 groups = 8192 prefixes" in said
    # 1.5e9 x 2 models x (2 + 4 + 8 + 4) bytes, and a reference of 2 bytes each.
    assert f"learner: {1.5e9 * (2 * 18 + 2) / 2**30:.2f} GiB" in said
    assert f"a scorer: {7e9 * 2 / 2**30:.2f} GiB" in said


def test_the_llama_recipe_loads(tmp_path: Path) -> None:
    data = rows(tmp_path / "train.jsonl", 7500)
    config = load(
        EXAMPLES / "math_llama3.1/run.toml",
        (f"data.train={data}", f"data.eval={data}", f"directory={tmp_path}"),
    )
    assert "75000 groups in 147 iterations" in forecast(config)


def test_sizes_come_from_files_where_there_are_any() -> None:
    count, source = parameters(str(EXAMPLES / "arithmetic/target")) or (0, "")
    assert source == "from its files"
    assert 0.7e6 < count < 0.9e6


@pytest.mark.parametrize(
    ("name", "count"),
    [("Qwen/Qwen2.5-7B", 7e9), ("Qwen/Qwen2.5-0.5B-Instruct", 0.5e9), ("org/model", None)],
)
def test_a_hub_name_tells_the_size_or_nothing_does(name: str, count: float | None) -> None:
    known = parameters(name)
    assert (known[0] if known else None) == count
