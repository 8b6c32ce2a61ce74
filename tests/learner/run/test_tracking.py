"""Trackers are looked for before a run begins, and outlive what the learner outlives."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from prefixrl.common.config.learner import TRACKERS, LogConfig, WandbConfig
from prefixrl.common.errors import ConfigError
from prefixrl.common.run.directory_format import write_format
from prefixrl.learner.run.tracking import Tracking, check_packages
from support.paths import EXAMPLES
from support.runs.metrics_lines import metrics_line, write_metrics


@pytest.mark.parametrize("key", TRACKERS)
def test_a_tracker_that_is_not_installed_is_refused_with_the_remedy(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, key, None)
    value = {"tensorboard": True, "wandb": WandbConfig()}.get(key, "project")
    with pytest.raises(
        ConfigError, match=rf"log.{key} needs {key}: pip install 'prefixrl\[trackers\]'"
    ):
        check_packages(LogConfig.model_validate({key: value}))
    check_packages(LogConfig())


def test_a_tracker_without_a_package_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    without = TRACKERS["trackio"]._replace(package="")
    monkeypatch.setitem(TRACKERS, "trackio", without)
    monkeypatch.setitem(sys.modules, "trackio", None)
    check_packages(LogConfig(trackio="project"))


@pytest.mark.nightly
@pytest.mark.slow
def test_a_check_of_the_run_file_finds_it_before_the_run_begins(tmp_path: Path) -> None:
    hidden = f"import sys; sys.modules['wandb'] = None; sys.argv[1:] = {[str(EXAMPLES / 'arithmetic/run.toml')]!r}"
    for flags in (["--check"], []):
        given = [*flags, "--set", "log.wandb={}", "--set", f"directory={tmp_path / 'run'}"]
        program = f"{hidden} + {given!r}; from prefixrl.learner.__main__ import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 2 and "error: log.wandb needs wandb" in done.stderr
        assert not (tmp_path / "run").exists()


def test_a_tracker_that_ended_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracking = Tracking(tmp_path)  # without a config.json it ends at once
    tracking._process.wait()
    tracking.check()
    tracking.check()
    tracking.close()
    (record,) = caplog.records
    assert "the tracker ([log]) ended with exit code" in record.getMessage()
    assert f"`prefixrl track {tmp_path}` sends all" in record.getMessage()


@pytest.mark.nightly
def test_a_stop_signal_to_every_process_leaves_the_tracker_to_the_learner(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    write_format(tmp_path)
    config = {
        "adapter": {"model": "a"},
        "rollout": {"engine": "simulated"},
        "log": {"tensorboard": True},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    tracking = Tracking(tmp_path)
    tracking._process.send_signal(signal.SIGTERM)
    write_metrics(tmp_path, [metrics_line(0)])
    tracking.close()
    assert tracking._process.returncode == 0
    assert list((tmp_path / "tensorboard").iterdir())
