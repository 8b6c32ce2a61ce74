"""What `launch` decides before it starts anything: which GPUs a process sees, and which folders `--fresh` may remove."""

import json
from pathlib import Path

import pytest

from prefixrl.common.config import load
from prefixrl.common.errors import ConfigError
from prefixrl.common.process import own
from prefixrl.deploy.launch import WELL_S, Child, _Devices, _throw_away
from run_helper import RUN_FILE


def test_gpus_are_dealt_out_in_turn_as_many_as_a_process_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4")
    devices = _Devices()
    dealt = [devices.deal(count)["CUDA_VISIBLE_DEVICES"] for count in (2, 1, 2, 1)]
    assert dealt == ["0,1", "2", "3,4", "0"]
    assert "ask for 6 GPUs, 5 are there: some share one" in devices.shared


@pytest.mark.parametrize(("there", "wanted"), [("0,1,2", (2, 1)), ("0,1", (0, 1)), ("", (1, 1))])
def test_nothing_is_said_of_gpus_that_nobody_shares(
    there: str, wanted: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", there)
    devices = _Devices()
    for count in wanted:
        devices.deal(count)
    assert devices.shared == ""


def test_an_empty_list_of_gpus_stays_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert _Devices().deal(1) == {}


def test_a_process_that_needs_no_gpu_sees_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    devices = _Devices()
    assert devices.deal(0) == {"CUDA_VISIBLE_DEVICES": ""}
    assert devices.deal(1) == {"CUDA_VISIBLE_DEVICES": "0"}


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


def test_a_process_that_ran_well_has_all_its_restarts_again(tmp_path: Path) -> None:
    child = Child("rollout-0", [], tmp_path / "log", {}, restarts=9, started_s=1000.0)
    assert child.has_restarts_left(10, now_s=1010.0)
    child.restarts += 1
    child.started_s = 1010.0
    assert not child.has_restarts_left(10, now_s=1010.0 + WELL_S - 1)
    assert child.has_restarts_left(10, now_s=1010.0 + WELL_S)
    assert child.restarts == 0
