"""A run directory has one learner at a time and one config for its whole life."""

import errno
import json
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from prefixrl.common.config.implicit_reward import ImplicitRewardConfig
from prefixrl.common.config.load import from_json
from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import ConfigError
from prefixrl.deploy.view.run_state import is_locked
from prefixrl.learner.run.directory import RunDirectory, check_ports_are_free
from support.fakes import end, free_pair, run_on_disk, wait_until

HOLDER = """
import sys, time
from prefixrl.common.config.load import from_json
from prefixrl.common.config.implicit_reward import ImplicitRewardConfig
from prefixrl.learner.run.directory import RunDirectory
held = RunDirectory(from_json(open(sys.argv[1]).read()))
open(sys.argv[2], "w").close()
time.sleep(600)
"""


@contextmanager
def held(config: RunConfig) -> Iterator[RunDirectory]:
    directory = RunDirectory(config)
    try:
        yield directory
    finally:
        directory._lock.close()


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return run_on_disk(tmp_path)


def changed(config: RunConfig, section: str, **values: Any) -> RunConfig:
    document = config.model_dump()
    document[section] |= values
    return RunConfig.model_validate(document)


def test_the_config_of_a_run_is_written_down_whole(config: RunConfig) -> None:
    with held(config) as directory:
        assert from_json((directory.path / "config.json").read_text()) == config


def test_a_second_learner_is_refused_and_may_come_when_the_first_is_gone(config: RunConfig) -> None:
    with held(config), pytest.raises(ConfigError, match="another learner works in"):
        RunDirectory(config)
    with held(config):
        pass


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_named_as_that(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr("fcntl.flock", mock.Mock(side_effect=OSError(number, "not supported")))
    with pytest.raises(ConfigError, match=r"has no file locks \(.*-o flock"):
        RunDirectory(config)
    assert not is_locked(Path(config.directory))


def test_a_killed_learner_does_not_keep_its_directory(config: RunConfig, tmp_path: Path) -> None:
    known, locked = Path(config.directory) / "config.json", tmp_path / "locked"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(known), str(locked)])
    try:
        wait_until(locked.exists, "the lock")
        with pytest.raises(ConfigError, match="another learner works in"):
            RunDirectory(config)
    finally:
        end(holder)
    with held(config):
        pass


@pytest.mark.parametrize(
    ("section", "values", "named"),
    [
        pytest.param("algorithm", {"clip": 0.3}, "algorithm.clip: 0.2 -> 0.3", id="clip"),
        pytest.param(
            "rollout", {"prefix_tokens": 9}, "rollout.prefix_tokens: 32 -> 9", id="prefix_tokens"
        ),
        pytest.param("target", {"model": "org/other"}, "target.model: ", id="target.model"),
        pytest.param(
            "learner", {"dtype": "float32"}, "learner.dtype: 'bfloat16' -> 'float32'", id="dtype"
        ),
    ],
)
def test_what_changes_the_training_may_not_change_when_a_run_goes_on(
    section: str, values: dict[str, Any], named: str, config: RunConfig
) -> None:
    with held(config):
        pass
    before = (Path(config.directory) / "config.json").read_text()
    with pytest.raises(ConfigError, match=named) as caught:
        RunDirectory(changed(config, section, **values))
    assert "--fresh" in str(caught.value)
    assert (Path(config.directory) / "config.json").read_text() == before


SERVED = {"engine": "openai", "openai": {"url": "http://there/v1", "model": "a"}}


@pytest.mark.parametrize(
    ("key", "value"), [("model", "b"), ("dialect", "openai"), ("prompt", "text"), ("seeded", False)]
)
def test_another_served_target_is_another_run(tmp_path: Path, key: str, value: object) -> None:
    config = run_on_disk(tmp_path, scorer=SERVED)
    with held(config):
        pass
    other = changed(config, "scorer", openai=config.scorer.openai.model_dump() | {key: value})
    with pytest.raises(ConfigError, match=f"scorer.openai.{key}: "):
        RunDirectory(other)


def test_a_served_target_may_move(tmp_path: Path) -> None:
    config = run_on_disk(tmp_path, scorer=SERVED)
    with held(config):
        pass
    moved = {"url": "https://elsewhere/v1", "key_variable": "KEY", "requests": 3, "patience_s": 9.0}
    with held(changed(config, "scorer", openai=config.scorer.openai.model_dump() | moved)):
        pass


def test_what_does_not_change_the_training_may_change(config: RunConfig) -> None:
    with held(config):
        pass
    other = changed(changed(config, "broker", stall_s=9.0), "checkpoint", every=3)
    with held(other) as directory:
        assert from_json((directory.path / "config.json").read_text()) == other


@pytest.mark.parametrize("name", ["data.train", "adapter.model", "target.model"])
def test_inputs_that_changed_under_their_names_are_refused_when_a_run_goes_on(
    name: str, config: RunConfig
) -> None:
    with held(config):
        pass
    section = getattr(config, name.partition(".")[0])
    path = Path(section.train[0].path if name == "data.train" else section.model)
    file = path if path.is_file() else path / "model.safetensors"
    before = file.read_bytes()
    file.write_bytes(before[:-2] + b"\n\n")
    with pytest.raises(ConfigError, match=f"input files were others: {name} changed since"):
        RunDirectory(config)
    file.write_bytes(before)
    with held(config):
        pass


@pytest.mark.parametrize(
    "name", ["adapter.model", "implicit_reward.model", "implicit_reward.reference_model"]
)
def test_models_that_only_the_learner_loads_are_inputs_too(name: str, tmp_path: Path) -> None:
    usual = run_on_disk(tmp_path)
    for each in ("prm", "ref", "step/hf"):
        shutil.copytree(tmp_path / "adapter", tmp_path / each)
    reward = ImplicitRewardConfig(
        model=str(tmp_path / "prm"), reference_model=str(tmp_path / "ref")
    )
    config = usual.model_copy(update={"implicit_reward": reward})
    config = changed(config, "adapter", init_from=str(tmp_path / "step"), reference="model")
    (Path(config.directory) / "config.json").write_text(config.model_dump_json())
    with held(config):
        pass
    folder = {"adapter.model": "adapter", "implicit_reward.model": "prm"}.get(name, "ref")
    (tmp_path / folder / "model.safetensors").write_bytes(b"others")
    with pytest.raises(ConfigError, match=f"input files were others: {name} changed since"):
        RunDirectory(config)


def test_an_input_that_an_earlier_release_did_not_record_is_recorded_now(
    config: RunConfig, tmp_path: Path
) -> None:
    with held(config) as directory:
        known = directory.path / "inputs.json"
    shutil.copytree(tmp_path / "adapter", tmp_path / "prm")
    prime = config.model_copy(
        update={"implicit_reward": ImplicitRewardConfig(model=str(tmp_path / "prm"))}
    )
    (directory.path / "config.json").write_text(prime.model_dump_json())
    assert json.loads(known.read_bytes())["implicit_reward_model"] == ""
    with held(prime):
        assert json.loads(known.read_bytes())["implicit_reward_model"]


def test_a_directory_that_cannot_be_made_is_refused(config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used: Not a directory"):
        RunDirectory(config.model_copy(update={"directory": str(tmp_path / "file" / "run")}))


def test_a_taken_port_is_named_and_a_free_one_is_not() -> None:
    port = free_pair()
    with socket.create_server(("127.0.0.1", port)):
        endpoint = f"tcp://127.0.0.1:{port}"
        with pytest.raises(ConfigError, match=f"broker.listen = '{endpoint}' cannot be bound"):
            check_ports_are_free(endpoint)
    check_ports_are_free(endpoint)


def test_a_fixed_port_needs_the_next_one_for_the_weights() -> None:
    port = free_pair()
    with (
        socket.create_server(("127.0.0.1", port + 1)),
        pytest.raises(ConfigError, match="port of the weights"),
    ):
        check_ports_are_free(f"tcp://127.0.0.1:{port}")


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "lo", "localhost"])
@pytest.mark.parametrize("is_fixed", [True, False])
def test_all_interfaces_one_of_them_or_a_name_may_be_listened_on(host: str, is_fixed: bool) -> None:
    check_ports_are_free(f"tcp://{host}:{free_pair() if is_fixed else 0}")


@pytest.mark.parametrize("port", [0, 5555])
def test_an_address_of_another_host_is_refused_with_those_of_this_one(port: int) -> None:
    with pytest.raises(ConfigError, match=r"this host has .*lo \(127\.0\.0\.1\)"):
        check_ports_are_free(f"tcp://198.51.100.1:{port}")


def test_a_port_that_becomes_free_is_waited_for() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        going = threading.Timer(0.5, taken.close)
        going.start()
        check_ports_are_free(endpoint, patience_s=60.0)
        going.join()


@pytest.mark.parametrize(
    "endpoint",
    [
        pytest.param("tcp://127.0.0.1", id="no port"),
        pytest.param("tcp://127.0.0.1:http", id="a port by name"),
        pytest.param("tcp://127.0.0.1:99999", id="a port out of range"),
        pytest.param("5555", id="a port alone"),
        pytest.param("tcp://127.0.0.1:65535", id="no port for weights"),
        pytest.param("tcp://no.such.invalid:1", id="an unknown host"),
    ],
)
def test_what_is_no_endpoint_is_refused_by_name(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=endpoint):
        check_ports_are_free(endpoint)


def test_a_changed_seed_is_named_too(config: RunConfig) -> None:
    with held(config):
        pass
    with pytest.raises(ConfigError, match="seed: 42 -> 7"):
        RunDirectory(config.model_copy(update={"seed": 7}))


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:0", "ipc:///tmp/some/where"])
def test_an_endpoint_without_a_fixed_port_is_always_free(endpoint: str) -> None:
    check_ports_are_free(endpoint)
