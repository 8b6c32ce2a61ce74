"""A run with low-rank matrices, from prompts to its summary."""

import subprocess
import sys
from pathlib import Path

import pytest

from support.runs.run_helper import SMALL, check_books, finish, launched

LOW_RANK = ("learner.lora={rank=4}", "learner.actor_lr=5e-4")


@pytest.mark.nightly
@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    "engine",
    ["transformers", pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.timeout(600)])],
)
def test_rollouts_get_matrices_and_prove_every_version(engine: str, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    # What loads on a busy machine is not to be taken for lost.
    settings = (*SMALL, *LOW_RANK, f"rollout.engine={engine}", "broker.silence_s=120")
    with launched(directory, *settings) as process:
        summary = finish(process, directory, timeout_s=250 if engine == "transformers" else 500)
    check_books(summary, directory)
    assert summary["engine"]["rollout"] == engine and not summary["losses"]
    learner = (directory / "logs/learner.log").read_text()
    assert "failed the proof" not in learner
    if engine == "transformers":
        command = [
            sys.executable,
            "-m",
            "prefixrl.deploy",
            "eval",
            str(directory),
            "--arm",
            "adapter",
        ]
        judged = subprocess.run(command, capture_output=True, text=True, timeout=200)
        assert judged.returncode == 0, judged.stdout + judged.stderr
    assert (
        "version 0: 535808 bytes in 20 tensors" in learner
        and "version 8: 47104 bytes in 28 tensors" in learner
    )
