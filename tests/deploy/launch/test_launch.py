"""`launch` deals GPUs out, removes run directories only, and restarts what ends."""

import json
import os
import sys
from pathlib import Path

import pytest

from prefixrl.common.config.load import load
from prefixrl.common.errors import ConfigError
from prefixrl.common.host.process import own
from prefixrl.deploy.launch import child_process as child
from prefixrl.deploy.launch import launch
from prefixrl.deploy.launch.child_process import Child
from prefixrl.deploy.launch.launch import Launcher, _throw_away
from support.fakes import run_on_disk
from support.runs.run_helper import RUN_FILE


def test_fresh_refuses_a_folder_that_is_no_run(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ConfigError, match="holds no run"):
        _throw_away(tmp_path)
    assert (tmp_path / "model.safetensors").exists()


def test_fresh_removes_a_run_but_not_one_that_is_going_on(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "config.json").write_text(load(RUN_FILE).model_dump_json())
    with own(directory), pytest.raises(ConfigError, match="another learner works in"):
        _throw_away(directory)
    _throw_away(directory)
    assert not directory.exists()


WORKER = """
from pathlib import Path
with Path("starts").open("a") as starts:
    starts.write(Path("run/endpoint").read_text() + "\\n")
"""
"""Goes at once, as one that is sent home or told to go, and notes where the broker is."""
LEARNER = """
import os, signal, sys, time
from pathlib import Path
starts, incarnation = Path("starts"), Path("incarnation")
mine = int(incarnation.read_text()) if incarnation.exists() else 0
incarnation.write_text(str(mine + 1))
def open_at(endpoint):
    Path("new").write_text(endpoint)
    Path("new").rename("run/endpoint")
def started():
    return starts.read_text().split() if starts.exists() else []
open_at(f"first-{mine}")
"""
"""A learner's beginning: its broker opens; `started` are the workers' endpoints so far."""


def launcher_of(folder: Path, learner: str) -> Launcher:
    """A launcher of two scripts in place of a learner and a worker."""
    config = run_on_disk(folder)
    (folder / "run/logs").mkdir()
    launcher = Launcher(config, ["prefixrl.learner"])
    launcher.learner.command = [sys.executable, "-c", LEARNER + learner]
    log = folder / "run/logs/scorer-0.log"
    worker = Child("scorer-0", [sys.executable, "-c", WORKER], log, dict(os.environ))
    launcher.workers = [worker]
    return launcher


def test_a_worker_that_goes_while_the_learner_goes_on_is_started_again_where_the_broker_is_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "STOPPED_BY_BROKER_S", 0.5)
    launcher = launcher_of(
        tmp_path,
        """
while not started(): time.sleep(0.05)
Path("run/endpoint").write_text("second")
while started()[-1:] != ["second"]: time.sleep(0.05)
""",
    )
    assert launcher.run_and_stop(lambda: False) == 0
    assert set((tmp_path / "starts").read_text().split()) == {"first-0", "second"}


def test_a_worker_that_went_is_not_started_again_when_the_learner_ends_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "STOPPED_BY_BROKER_S", 600.0)
    launcher = launcher_of(tmp_path, "while not started(): time.sleep(0.05)\ntime.sleep(2)")
    assert launcher.run_and_stop(lambda: False) == 0
    assert (tmp_path / "starts").read_text().split() == ["first-0"]


def test_a_worker_that_goes_again_and_again_ends_the_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "STOPPED_BY_BROKER_S", 0.0)
    monkeypatch.setattr(child, "WORKER_RESTARTS", 2)
    launcher = launcher_of(tmp_path, "time.sleep(600)")
    with pytest.raises(ConfigError, match="scorer-0 ended with exit code 0; a restart would fail"):
        launcher.run_and_stop(lambda: False)
    assert (tmp_path / "starts").read_text().split() == ["first-0"] * 3


def test_workers_that_went_are_started_again_with_the_learner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "STOPPED_BY_BROKER_S", 1e9)
    launcher = launcher_of(
        tmp_path,
        """
while len(started()) <= mine: time.sleep(0.05)
if mine == 0:
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)
""",
    )
    assert launcher.run_and_stop(lambda: False) == 0
    assert (tmp_path / "starts").read_text().split() == ["first-0", "first-1"]
    assert launcher.workers[0].budget.used == 0
