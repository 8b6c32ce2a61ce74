"""A whole run whose adapter and target stand in vLLM."""

from pathlib import Path

import pytest

from run_helper import SMALL, check_books, finish, launched

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def test_a_run_trains_with_both_models_in_vllm(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    engines = ("rollout.engine=vllm", "scorer.engine=vllm", "launch.scorers=1")
    with launched(directory, *SMALL, *engines) as process:
        summary = finish(process, directory, timeout_s=500)
    check_books(summary, directory)
    assert summary["engine"] == {"rollout": "vllm", "scorer": "vllm"}
    assert summary["groups"]["trained"] == 8 * 16
    assert not summary["losses"]
    assert "failed the probe" not in (directory / "logs/learner.log").read_text()
