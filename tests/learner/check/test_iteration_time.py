"""Seconds of an iteration: at a GPU's speed only for what may be a GPU."""

import re
from pathlib import Path

import pytest

from prefixrl.common.config.load import CONFIG_FILE, load
from prefixrl.common.config.run import RunConfig
from prefixrl.learner.check.prompt_lengths import PromptLength
from prefixrl.learner.check.time import time_lines
from support.paths import EXAMPLE

PROMPTS = PromptLength(11, "prompts of about 11 tokens")
CPU = "learner.device=cpu"


def lines_of(*settings: str, path: Path = EXAMPLE / "run.toml") -> list[str]:
    return time_lines(load(path, settings), PROMPTS, 100)


def resolved(config: RunConfig, folder: Path) -> Path:
    """The file that a run keeps of its config, which names every key."""
    path = folder / CONFIG_FILE
    path.write_text(config.model_dump_json())
    return path


def test_a_learner_on_a_cpu_has_no_seconds_at_the_speed_of_a_gpu() -> None:
    learner, *engines = lines_of(CPU)
    assert "9 forward-equivalents over 2,400 tokens (prompts of about 11 tokens), 1 ranks" in learner
    assert "no seconds of it or of the run" in learner and "learner.device_tflops is not set" in learner
    assert not re.search(r"\d s\b", learner)
    # What follows from the engines' own speeds stays; a sum without the learner's part would be wrong.
    assert [line.split(":")[0] for line in engines] == ["an iteration of 1 rollouts", "an iteration of 2 scorers"]


@pytest.mark.parametrize("tflops", [0.01, 400.0])
def test_a_speed_that_the_user_set_counts_on_a_cpu_too_even_one_like_the_default(tflops: float) -> None:
    learner, *_, whole = lines_of(CPU, f"learner.device_tflops={tflops}")
    assert f"at learner.device_tflops = {tflops:g}, 1 ranks" in learner
    assert whole.startswith("an iteration, these side by side: ")


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_what_may_run_on_a_gpu_has_seconds_wherever_it_is_checked_and_whose_speed_it_is(device: str) -> None:
    learner, *_, whole = lines_of(f"learner.device={device}")
    assert "less than 0.1 s at learner.device_tflops = 400 (not set: about that of an H100)" in learner
    assert "0.3 s; 100 iterations: less than 0.1 h" in whole


def test_a_resolved_config_sets_no_speed_by_naming_its_default(tmp_path: Path) -> None:
    default = resolved(load(EXAMPLE / "run.toml", (CPU,)), tmp_path)
    assert lines_of(path=default) == lines_of(CPU)
    declared = (CPU, "learner.device_tflops=0.01")
    path = resolved(load(EXAMPLE / "run.toml", declared), tmp_path)
    assert lines_of(path=path) == lines_of(*declared)


def test_nothing_is_said_of_the_time_of_an_adapter_of_unknown_size() -> None:
    assert lines_of("adapter.model=org/model") == []
