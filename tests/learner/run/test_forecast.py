"""`--check` on the shipped recipes and on the example: the arithmetic a person would do by hand."""

import json
from pathlib import Path

import pytest

from prefixrl.common.config.load import load
from prefixrl.common.errors import ConfigError
from prefixrl.learner.run.forecast import forecast, parameters
from support.paths import EXAMPLES


def rows(path: Path, count: int) -> Path:
    path.write_text("".join(json.dumps({"id": i, "question": "?", "answer": 1}) + "\n" for i in range(count)))
    return path


def test_the_qwen_recipe_has_the_published_batch_arithmetic(tmp_path: Path) -> None:
    data = rows(tmp_path / "train.jsonl", 8888)
    config = load(
        EXAMPLES / "math_qwen2.5/run.toml", (f"data.train={data}", f"data.eval={data}", f"directory={tmp_path}")
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
        EXAMPLES / "math_llama3.1/run.toml", (f"data.train={data}", f"data.eval={data}", f"directory={tmp_path}")
    )
    assert "75000 groups in 147 iterations" in forecast(config)


def test_sizes_come_from_files_where_there_are_any() -> None:
    count, source = parameters(str(EXAMPLES / "arithmetic/target")) or (0, "")
    assert source == "from its files"
    assert 0.7e6 < count < 0.9e6


@pytest.mark.parametrize(
    ("name", "count"), [("Qwen/Qwen2.5-7B", 7e9), ("Qwen/Qwen2.5-0.5B-Instruct", 0.5e9), ("org/model", None)]
)
def test_a_hub_name_tells_the_size_or_nothing_does(name: str, count: float | None) -> None:
    known = parameters(name)
    assert (known[0] if known else None) == count


def test_a_direct_run_counts_answers_and_has_no_target() -> None:
    said = forecast(load(EXAMPLES / "arithmetic_direct/run.toml"))
    assert "at most 96 groups = 768 answers of up to 24 tokens" in said
    assert "no target: a scorer loads the adapter's tokenizer and needs no device" in said


# --- memory of the learner, for the example's adapter: 2 layers, 64 wide, 256 inside, 40 tokens, tied ---------------

ARITHMETIC = EXAMPLES / "arithmetic/run.toml"
LAYER = 4 * 64 * 64 + 3 * 64 * 256 + 2 * 64
WHOLE = 40 * 64 + 2 * LAYER + 64
LOW_RANK = 4 * 2 * (4 * (64 + 64) + 3 * (64 + 256))
"""Rank 4: in each of 2 layers, q, k, v and o from 64 to 64, gate, up and down between 64 and 256."""


def learner_bytes(*settings: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the forecast of the learner's memory."""
    monkeypatch.setattr("prefixrl.learner.run.forecast.GIB", 0.01)  # "%.2f" of it is then exact
    said = forecast(load(ARITHMETIC, ("learner.dtype=bfloat16", *settings)))
    (line,) = (each for each in said.splitlines() if each.startswith("learner: "))
    return round(float(line.split()[1]) / 100)


CRITIC, LORA, EMA = "algorithm.name=gae", "learner.lora={rank=4}", "learner.ema_decay=0.9"
GROUP, NO_KL = "algorithm.name=grpo", "algorithm.kl=0.0"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ((CRITIC,), 2 * 18 * WHOLE + 2 * WHOLE),
        ((CRITIC, NO_KL, EMA), 2 * 18 * WHOLE + 4 * WHOLE),
        ((GROUP, LORA), 2 * WHOLE + 18 * LOW_RANK),
        ((CRITIC, LORA), 2 * 2 * WHOLE + 18 * (2 * LOW_RANK + 64)),
        ((CRITIC, LORA, EMA), 2 * 2 * WHOLE + 18 * (2 * LOW_RANK + 64) + 4 * LOW_RANK),
        ((GROUP, "learner.lora={rank=4, target_modules=['q_proj']}"), 2 * WHOLE + 18 * 4 * 2 * (64 + 64)),
    ],
)
def test_memory_is_what_is_trained_with_its_optimiser_what_is_frozen_and_the_average(
    settings: tuple[str, ...], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert learner_bytes(*settings, monkeypatch=monkeypatch) == expected


def test_low_rank_matrices_of_an_adapter_that_is_not_here_are_not_counted_and_that_is_said() -> None:
    said = forecast(load(ARITHMETIC, ("adapter.model=Qwen/Qwen2.5-1.5B", LORA, CRITIC)))
    assert "(2 frozen, low-rank matrices not counted before the adapter is downloaded)" in said
    assert "1,500.0 M" in said


def test_matrices_for_no_layer_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"target_modules = \['nowhere'\]"):
        forecast(load(ARITHMETIC, ("learner.lora={target_modules=['nowhere']}",)))
