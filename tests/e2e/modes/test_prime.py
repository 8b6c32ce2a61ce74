"""A run with an implicit reward model on real processes, and after its learner was killed: the same run."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from support.runs.run_helper import (
    ROOT,
    check_books,
    child,
    finish,
    launched,
    trained_iterations,
    wait_for,
)

pytestmark = [pytest.mark.timeout(600), pytest.mark.nightly]

RUN_FILE = ROOT / "deploy/examples/arithmetic_direct/run.toml"
PRIME = (
    "algorithm.name=prime",
    "algorithm.groups_per_iteration=16",
    "algorithm.iterations=7",
    "algorithm.max_staleness=0",
    "algorithm.minibatches=2",
    "implicit_reward.lr=1e-4",
    "checkpoint.every=3",
    "evaluation.problems=32",
    "broker.silence_s=2",
    "bitwise=true",
)


def figures(directory: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line)["figures"]
        for line in (directory / "metrics.jsonl").read_text().splitlines()
    ]


def weights(directory: Path, folder: str) -> bytes:
    newest = max((directory / "checkpoints").glob("step_*"))
    assert newest.name == "step_00000007"
    return (newest / folder / "model.safetensors").read_bytes()


def test_a_run_whose_learner_was_killed_ends_with_the_same_adapter_and_reward_model(
    tmp_path: Path,
) -> None:
    with launched(tmp_path / "whole", *PRIME, run_file=RUN_FILE) as process:
        check_books(finish(process, tmp_path / "whole"), tmp_path / "whole")
    with launched(tmp_path / "killed", *PRIME, run_file=RUN_FILE) as process:
        wait_for(lambda: trained_iterations(tmp_path / "killed") >= 5, "the fifth iteration")
        wait_for(lambda: child(process, "prefixrl-learner"), "the learner").send_signal(
            signal.SIGKILL
        )
        check_books(finish(process, tmp_path / "killed"), tmp_path / "killed")
    for folder in ("hf", "hf_reward"):
        assert weights(tmp_path / "whole", folder) == weights(tmp_path / "killed", folder), folder
    actual = figures(tmp_path / "whole")
    assert actual == figures(tmp_path / "killed")
    assert actual[0]["process_largest_return"] == 0.0 < actual[-1]["process_largest_return"]
    ranked = [each["reward_model_accuracy"] for each in actual if "reward_model_accuracy" in each]
    assert ranked and all(0.0 <= each <= 1.0 for each in ranked)
    assert all(0.1 < each["reward_model_loss"] < 0.8 for each in actual[1:])
