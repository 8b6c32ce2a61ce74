"""The commands about keys, as an operator types them."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from prefixrl.common.errors import ConfigError
from prefixrl.common.wire.address import ENDPOINT_FILE
from prefixrl.common.wire.keys import read_client_key
from prefixrl.common.worker.allowed import Allowed, check, flags
from prefixrl.deploy.commands.keygen import command_for
from support.fakes import run_on_disk


def keygen(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "prefixrl.deploy", "keygen", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.slow
def test_keys_are_made_listed_added_and_removed(tmp_path: Path) -> None:
    made = keygen(str(tmp_path), "--new")
    assert made.returncode == 0, made.stderr
    assert [line.split()[:2] for line in made.stdout.splitlines()] == [
        [role] * 2 for role in ("worker", "rank", "operator")
    ]
    added = keygen(str(tmp_path), "--worker", "node-7")
    name, role, path = added.stdout.splitlines()[-1].split()
    assert (name, role, read_client_key(Path(path)).name) == ("node-7", "worker", "node-7")
    assert "node-7" not in keygen(str(tmp_path), "--remove", "node-7").stdout
    again = keygen(str(tmp_path), "--remove", "node-7")
    assert (
        again.returncode == 2
        and again.stderr.startswith("error: ")
        and "no key named 'node-7'" in again.stderr
    )


@pytest.mark.parametrize("there", [True, False], ids=["without a run", "misspelt"])
def test_no_keys_are_made_in_a_directory_without_a_run(there: bool, tmp_path: Path) -> None:
    directory = tmp_path / "runs" / "mien"
    if there:
        directory.mkdir(parents=True)
    refused = keygen(str(directory), "--worker", "node-7")
    assert refused.returncode == 2
    said = "holds no run" if there else "does not exist"
    assert refused.stderr.startswith(
        f"error: {directory} {said}; give the directory of a run, or --new"
    )
    assert not (directory / "keys").exists() and directory.exists() == there


def test_a_run_that_has_begun_gets_more_keys(tmp_path: Path) -> None:
    directory = Path(run_on_disk(tmp_path).directory)
    assert keygen(str(directory), "--worker", "node-7").returncode == 0


def test_the_command_for_another_host_is_one_that_can_be_typed(tmp_path: Path) -> None:
    config = run_on_disk(tmp_path)
    directory = Path(config.directory)
    (directory / ENDPOINT_FILE).write_text("tcp://node1:5555")
    *notes, command = command_for(directory, "scorer", "worker").splitlines()
    assert shlex.split(command) == [
        "prefixrl-scorer",
        "--connect",
        "tcp://node1:5555",
        "--key",
        "worker.key",
    ]
    assert all(note.startswith("# ") for note in notes)
    assert str(directory / "keys" / "worker.key") in notes[0]
    assert "broker.listen" not in "".join(notes)


@pytest.mark.parametrize(
    "endpoint", ["tcp://127.0.0.1:5555", "tcp://localhost:5555", "ipc:///tmp/x"]
)
def test_an_address_that_no_other_host_reaches_is_told(tmp_path: Path, endpoint: str) -> None:
    directory = Path(run_on_disk(tmp_path).directory)
    (directory / ENDPOINT_FILE).write_text(endpoint)
    assert "--set broker.listen=" in command_for(directory, "rollout", "worker")


def test_only_a_workers_key_of_a_started_run_makes_a_command(tmp_path: Path) -> None:
    directory = Path(run_on_disk(tmp_path).directory)
    with pytest.raises(ConfigError, match="names no endpoint yet"):
        command_for(directory, "scorer", "worker")
    with pytest.raises(ConfigError, match="is no worker's key"):
        command_for(directory, "scorer", "rank")
    with pytest.raises(ConfigError, match="there is no key"):
        command_for(directory, "scorer", "node-7")


def test_code_and_secrets_are_used_only_if_the_command_line_names_them(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("def score(**_): return 1.0\n")
    openai = {"url": "http://127.0.0.1:1/v1", "key_variable": "MY_KEY"}
    config = run_on_disk(
        tmp_path / "run-a",
        reward={"function": f"{mine}:score", "environment": ["JUDGE"]},
        scorer={"engine": "openai", "openai": openai},
    )
    given = flags(config)
    assert given == ["--allow-function", f"{mine}:score", "--secret", "MY_KEY", "--secret", "JUDGE"]
    check(config, Allowed((given[1],), (given[3], given[5])))
    with pytest.raises(
        ConfigError, match=r"hands the environment variable JUDGE to its .* --secret JUDGE"
    ):
        check(config, Allowed((given[1],), ("MY_KEY",)))
    with pytest.raises(ConfigError, match=f"--allow-function {mine}:score"):
        check(config, Allowed((f"{tmp_path}/other.py:score",), ("MY_KEY",)))
    with pytest.raises(
        ConfigError, match=r"sends the environment variable MY_KEY .* --secret MY_KEY"
    ):
        check(config, Allowed((given[1],), ("HOME",)))
    judged = run_on_disk(
        tmp_path / "run-b", reward={"url": "http://judge:1/r", "key_variable": "JUDGE"}
    )
    assert flags(judged) == ["--secret", "JUDGE"]
    with pytest.raises(
        ConfigError, match="sends the environment variable JUDGE to http://judge:1/r"
    ):
        check(judged, Allowed())
