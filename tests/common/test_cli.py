"""The commands as a person meets them: quick help, and one message with exit code 2 for whatever they got wrong."""

import importlib
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from prefixrl.deploy.__main__ import main
from prefixrl.deploy.commands import GONE
from support.paths import EXAMPLE
from support.tiers import mostly_nightly

HEAVY = {"deepspeed", "matplotlib", "numpy", "torch", "transformers", "vllm", "zmq"}

HELP = {
    "deploy": ["inspect", "launch", "report", "status"],
    "deploy launch": ["--fresh", "--set KEY=VALUE", "Executes the Python files", "RUN_FILE"],
    "deploy status": ["--json", "RUN_DIRECTORY"],
    "deploy inspect": ["--json", "RUN_DIRECTORY"],
    "deploy example": ["DIRECTORY", "NAME"],
    "deploy headroom": ["RUN"],
    "deploy dashboard": ["FOLDER", "--host", "--key-file", "--key-variable", "--port"],
    "deploy report": ["RUN_DIRECTORY"],
    "deploy config": ["--json-schema", "--markdown", "KEY"],
    "deploy samples": ["--best", "--follow", "--json", "--worst", "RUN_DIRECTORY"],
    "deploy export": ["--out", "RUN_DIRECTORY"],
    "deploy track": [
        "--follow",
        "--mlflow EXPERIMENT",
        "--offline",
        "--tensorboard",
        "--trackio PROJECT",
        "--wandb PROJECT",
        "RUN_DIRECTORY",
    ],
    "deploy list": ["--json", "FOLDER"],
    "deploy compare": ["RUNS"],
    "learner": ["--check", "--set KEY=VALUE", "Executes the Python files", "RUN_FILE"],
    "deploy keygen": ["--new", "--remove", "--worker", "RUN_DIRECTORY"],
    "deploy worker-command": ["--key", "--role", "RUN_DIRECTORY"],
    "rollout": ["--connect", "--device", "--engine", "--grace-s", "--key", "--model", "--run"],
    "scorer": [
        "--allow-function",
        "--connect",
        "--device",
        "--engine",
        "--grace-s",
        "--key",
        "--model",
        "--run",
        "--secret",
    ],
}
"""Names in --help of each command."""
STARTERS = ("learner", "deploy launch")
MISTAKES = {
    "a misspelt key": (
        "algorithm.groups_per_iterations=4",
        "algorithm.groups_per_iterations: unknown key; did you mean 'groups_per_iteration'?",
    ),
    "a wrong type": ("algorithm.clip=wide", 'algorithm.clip = "wide": '),
    "a missing model": (
        "adapter.model=./gone",
        "adapter.model = './gone': there is no such folder",
    ),
}


def run(command: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    module, *words = command.split()
    return subprocess.run(
        [sys.executable, "-m", f"prefixrl.{module}", *words, *arguments],
        env=os.environ,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("command", HELP)
def test_help_names_every_option(command: str) -> None:
    module, *words = command.split()
    main = importlib.import_module(f"prefixrl.{module}.__main__").main
    done = CliRunner().invoke(main, [*words, "--help"], catch_exceptions=False)
    assert done.exit_code == 0 and done.output.startswith("Usage: ")
    assert {text for text in {*HELP[command], "--help"} if text not in done.output} == set()


@pytest.mark.parametrize("module", ["deploy", "learner", "rollout", "scorer"])
def test_help_loads_nothing_heavy(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    done = run(module, "--help")
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "prefixrl.common.errors" in imported
    assert not {name for name in imported if name.partition(".")[0] in HEAVY}


def test_every_command_is_there_as_its_list_says_and_needs_no_torch() -> None:
    code = (
        "import sys; from prefixrl.deploy.__main__ import COMMANDS, main\n"
        "assert all(main.get_command(None, name).name == name for name in COMMANDS)\n"
        f"print(*{HEAVY - {'numpy', 'zmq'}} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize("command", mostly_nightly(STARTERS, 1))
@pytest.mark.parametrize(("setting", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_in_the_configuration_is_one_message(
    command: str, setting: str, message: str, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    flags = ("--set", setting, "--set", f"directory={directory}")
    done = run(command, str(EXAMPLE / "run.toml"), *flags)
    assert_one_message(done, message)
    assert not directory.exists(), "a refused run leaves nothing behind"


@pytest.mark.slow
@pytest.mark.parametrize("command", mostly_nightly(STARTERS, 1))
def test_a_port_in_use_is_one_message(command: str, tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        endpoint = f"tcp://127.0.0.1:{holder.getsockname()[1]}"
        flags = ("--set", f"broker.listen={endpoint}", "--set", f"directory={tmp_path / 'run'}")
        arguments = (str(EXAMPLE / "run.toml"), *flags)
        for _ in range(2):  # the second log holds the first failure too
            assert_one_message(
                run(command, *arguments),
                f"broker.listen = {endpoint!r} cannot be bound: Address already in use; choose another port",
            )


def test_a_run_file_that_is_not_there_is_one_message(tmp_path: Path) -> None:
    for command in STARTERS:
        assert_one_message(run(command, str(tmp_path / "gone.toml")), "cannot read the run file")


@pytest.mark.parametrize("command", ["status", "inspect", "report"])
def test_a_folder_without_a_run_is_one_message(command: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(
        importlib.import_module("prefixrl.deploy.__main__").main, [command, str(tmp_path)]
    )
    assert (
        done.exit_code == 2 and done.stderr.startswith("error: ") and str(tmp_path) in done.stderr
    )
    assert len(done.stderr.splitlines()) <= 2


@pytest.mark.parametrize("command", ["rollout", pytest.param("scorer", marks=pytest.mark.slow)])
@pytest.mark.parametrize("endpoint", ["localhost:5555", "tcp://127.0.0.1:port", "tcp://127.0.0.1"])
def test_an_address_that_is_none_is_one_message(command: str, endpoint: str) -> None:
    assert_one_message(run(command, "--connect", endpoint, "--key", "worker.key"), repr(endpoint))


@pytest.mark.parametrize(
    "flags", [(), ("--connect", "tcp://n7:1"), ("--run", "a", "--connect", "tcp://n7:1")]
)
def test_a_worker_without_one_way_to_its_run_is_one_message(flags: tuple[str, ...]) -> None:
    assert_one_message(run("scorer", *flags), "give --run DIRECTORY")


@pytest.mark.slow
def test_check_prints_what_follows_and_starts_nothing(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    flags = ("--check", "--set", f"directory={directory}", "--set", "algorithm.iterations=7")
    done = run("learner", str(EXAMPLE / "run.toml"), *flags)
    assert (done.returncode, done.stderr) == (0, "")
    assert '"iterations": 7' in done.stdout and "groups in 7 iterations" in done.stdout
    assert not directory.exists()


@pytest.mark.slow
def test_check_reads_an_advantage_function_and_does_not_execute_it(tmp_path: Path) -> None:
    executed, mine = tmp_path / "executed", tmp_path / "mine.py"
    mine.write_text(f"open({str(executed)!r}, 'w').close()\ndef f(rewards, groups): ...\n")
    advantages = ("--set", "algorithm.name=grpo", "--set", f"algorithm.advantage_function={mine}:f")
    done = run("learner", str(EXAMPLE / "run.toml"), "--check", *advantages)
    assert done.returncode == 0, done.stderr
    assert not executed.exists(), "--check executed a user's file"


@pytest.mark.slow
def test_check_tries_a_reward_function_and_a_start_executes_it_before_anything_else(
    tmp_path: Path,
) -> None:
    executed, directory, mine = (tmp_path / name for name in ("executed", "run", "mine.py"))
    mine.write_text(
        f"open({str(executed)!r}, 'w').close()\n1 / 0\ndef f(question, text, gold): ...\n"
    )
    flags = ("--set", f"directory={directory}", "--set", f"reward.function={mine}:f")
    done = run("learner", str(EXAMPLE / "run.toml"), "--check", *flags)
    assert (done.returncode, done.stderr) == (0, "")
    assert "warning: reward.function could not be tried: " in done.stdout
    assert "ZeroDivisionError: division by zero (mine.py, line 2)" in done.stdout
    executed.unlink()
    for command in STARTERS:
        done = run(command, str(EXAMPLE / "run.toml"), *flags)
        assert_one_message(done, "ZeroDivisionError: division by zero (mine.py, line 2)")
        assert executed.exists() and not directory.exists()
        executed.unlink()


def assert_one_message(done: "subprocess.CompletedProcess[str]", message: str) -> None:
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: ") and message in done.stderr
    assert len(re.findall(r"\berror\b", done.stderr, re.IGNORECASE)) == 1
    assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) <= 2
    assert not re.search(r"\berror\b|Traceback", done.stdout, re.IGNORECASE)


def test_a_directory_that_may_not_be_written_is_one_message() -> None:
    done = run("deploy launch", str(EXAMPLE / "run.toml"), "--set", "directory=/sys/prefixrl")
    assert_one_message(done, "error: /sys/prefixrl may not be written or read: ")


@pytest.mark.parametrize("name", GONE)
def test_a_command_of_an_earlier_release_is_refused_with_what_takes_its_place(name: str) -> None:
    done = CliRunner().invoke(main, [name, "runs/a"])
    assert done.exit_code == 2 and f"there is no command {name!r} any more" in done.output
