"""Whole runs with vLLM: one that trains, and one whose engine keeps its old weights."""

import re
from pathlib import Path

import pytest

from prefixrl.common.errors import ConfigError
from support.models import vllm_world as world
from support.runs.run_helper import SMALL, check_books, finish, inspect, launched, logs

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.mark.proof
def test_a_run_trains_with_both_models_in_vllm(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    engines = ("rollout.engine=vllm", "scorer.engine=vllm", "launch.scorers=1")
    # What loads on a busy machine is not to be taken for lost.
    with launched(directory, *SMALL, *engines, "broker.silence_s=120") as process:
        summary = finish(process, directory, timeout_s=500)
    check_books(summary, directory)
    assert summary["engine"] == {"rollout": "vllm", "scorer": "vllm"}
    assert summary["groups"]["trained"] == 8 * 16
    assert not summary["losses"]
    assert "failed the proof" not in (directory / "logs/learner.log").read_text()


@pytest.mark.chaos
def test_an_engine_that_keeps_its_old_weights_is_refused_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets no work after its first version, and ends with the reason after three failed proofs."""
    world.plant(tmp_path, world.NOTHING_IS_COPIED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    directory = tmp_path / "run"
    # Steps large enough that no two versions agree within the tolerance.
    settings = ("rollout.engine=vllm", "launch.scorers=1", "learner.actor_lr=1e-2")
    with launched(directory, *SMALL, *settings) as process:
        output, _ = process.communicate(timeout=500)
    assert process.returncode == ConfigError.exit_code, output + logs(directory)
    assert "rollout-0 ended with exit code 3; a restart would fail" in output
    said = re.sub(r"\s+", " ", output)
    assert "the engine does not hold version" in said and "after 3 installations" in said
    assert (directory / "logs/learner.log").read_text().count("failed the proof") == 3
    assert {line["version_sampled"] for line in inspect(directory)} == {0}
