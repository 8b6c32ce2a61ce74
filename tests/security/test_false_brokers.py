"""A real scorer where somebody else answers, or where the run itself asks for more than its host allows."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from prefixrl.common.errors import ConfigError
from prefixrl.common.wire.keys import make_keys, server_keys
from prefixrl.common.wire.messages.fields import PROTOCOL
from prefixrl.common.wire.messages.learner import FromBroker, ToBroker
from prefixrl.common.wire.messages.worker import Welcome
from prefixrl.common.wire.transport import Malformed, Received, Server
from support.fakes import end, run_on_disk, serving, wait_until

SECRET = "a secret of this host"
EVIL = """
from pathlib import Path
Path({marker!r}).touch()
def score(question, answer, gold):
    return 1.0
"""


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """A file that is there once `evil.py` was executed."""
    path = tmp_path / "executed"
    (tmp_path / "evil.py").write_text(EVIL.format(marker=str(path)))
    return path


@contextmanager
def scorer(directory: Path, log_file: Path, *flags: str) -> Iterator["subprocess.Popen[bytes]"]:
    command = [sys.executable, "-m", "prefixrl.scorer", "--run", str(directory), *flags]
    with log_file.open("wb") as log:
        child = subprocess.Popen(command, stderr=log, env=os.environ | {"WANDB_API_KEY": SECRET})
    try:
        yield child
    finally:
        end(child)


@contextmanager
def false_broker(folder: Path, config_json: str) -> Iterator[tuple[str, list[ToBroker]]]:
    """One who holds a port and keys, though not the run's; its endpoint, and what reached it."""
    folder.mkdir()
    make_keys(folder)
    server: Server[ToBroker, FromBroker] = Server("tcp://127.0.0.1:0", ToBroker, server_keys(folder))
    heard: list[ToBroker] = []
    stop = threading.Event()

    def answer() -> None:
        welcome = Welcome(
            protocol=PROTOCOL, run_id="r", worker="scorer-0", config_json=config_json, weights_endpoint="tcp://x:1"
        )
        while not stop.is_set():
            try:
                received = server.receive(0.05)
            except Malformed:
                continue
            if isinstance(received, Received):
                heard.append(received.message)
                server.send(received.peer, welcome)

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield server.endpoint, heard
    finally:
        stop.set()
        thread.join()
        server.close()


def test_a_scorer_does_not_join_who_cannot_prove_the_runs_key_and_says_so(tmp_path: Path, marker: Path) -> None:
    evil = f"{tmp_path}/evil.py:score"
    config = run_on_disk(tmp_path, reward={"function": evil}, scorer={"engine": "simulated"})
    directory, log = Path(config.directory), tmp_path / "log"
    with false_broker(tmp_path / "false", config.model_dump_json()) as (endpoint, heard):
        # A stale file: the run's broker was here, and another process has its port now.
        (directory / "endpoint").write_text(endpoint)
        with scorer(directory, log, "--allow-function", evil) as child:
            wait_until(lambda: "what listens there does not hold the run's key" in log.read_text(), "the cause")
            assert child.poll() is None, "the run's broker may come back"
        assert heard == []
    assert not marker.exists()


ENDPOINT = {"url": "http://127.0.0.1:9/v1", "model": "m", "key_variable": "WANDB_API_KEY"}
ASKED: dict[str, tuple[dict[str, Any], str]] = {
    "function": ({"scorer": {"engine": "simulated"}}, "--allow-function {evil}"),
    "secret": ({"scorer": {"engine": "openai", "openai": ENDPOINT}}, "--secret WANDB_API_KEY"),
}


@pytest.mark.parametrize("case", ASKED)
def test_a_scorer_refuses_what_its_command_line_does_not_allow(case: str, tmp_path: Path, marker: Path) -> None:
    (sections, flag), evil = ASKED[case], f"{tmp_path}/evil.py:score"
    config = run_on_disk(tmp_path, reward={"function": evil if case == "function" else None}, **sections)
    log = tmp_path / "log"
    with serving(config) as broker, scorer(Path(config.directory), log) as child:
        assert child.wait(60.0) == ConfigError.exit_code
        assert f"start the scorer with {flag.format(evil=evil)}" in log.read_text()
        assert SECRET not in log.read_text()
        broker.ledger.check()
    assert not marker.exists()
