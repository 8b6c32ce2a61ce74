"""Real workers where somebody else answers, or where the run's own servers are hostile or ask for too much."""

import math
import os
import re
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import xxhash

from prefixrl.common.errors import ConfigError
from prefixrl.common.wire.keys import make_keys, server_keys
from prefixrl.common.wire.messages import worker as messages
from prefixrl.common.wire.messages.groups import GroupTask, Prompt
from prefixrl.common.wire.messages.learner import FromBroker, ToBroker
from prefixrl.common.wire.messages.protocol import PROTOCOL
from prefixrl.common.wire.messages.weights import (
    Chunk,
    FromWeights,
    GetManifest,
    Gone,
    Manifest,
    TensorEntry,
    ToWeights,
)
from prefixrl.common.wire.transport import Malformed, Received, Server, Undeliverable
from prefixrl.rollout.weights import Fetcher
from support import keys
from support.fakes import end, run_on_disk, serving, wait_until
from support.messages import GREEDY

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
def scorer(
    directory: Path, log_file: Path, *flags: str, role: str = "scorer"
) -> Iterator["subprocess.Popen[bytes]"]:
    command = [sys.executable, "-m", f"prefixrl.{role}", "--run", str(directory), *flags]
    with log_file.open("wb") as log:
        child = subprocess.Popen(command, stderr=log, env=os.environ | {"WANDB_API_KEY": SECRET})
    try:
        yield child
    finally:
        end(child)


@contextmanager
def false_broker(
    folder: Path, config_json: str, says: Sequence[FromBroker | bytes] = (), role: str = "scorer"
) -> Iterator[tuple[str, list[ToBroker]]]:
    """One who holds a port and the keys of a folder, which are made; its endpoint, and what reached it.

    It says `says` to who is ready.
    """
    folder.mkdir(exist_ok=True)
    make_keys(folder)
    server: Server[ToBroker, FromBroker] = Server(
        "tcp://127.0.0.1:0", ToBroker, server_keys(folder)
    )
    heard: list[ToBroker] = []
    stop = threading.Event()

    def answer() -> None:
        welcome = messages.Welcome(
            protocol=PROTOCOL,
            run_id="r",
            worker=f"{role}-0",
            config_json=config_json,
            weights_endpoint="tcp://x:1",
        )
        while not stop.is_set():
            try:
                received = server.receive(0.05)
            except Malformed:
                continue
            if isinstance(received, Received):
                heard.append(received.message)
                if not says or isinstance(received.message, messages.Hello):
                    server.send(received.peer, welcome)
                if isinstance(received.message, messages.Ready):
                    for say in says:
                        with suppress(Undeliverable):  # its queue is full
                            if isinstance(say, bytes):
                                server._socket.send_multipart([received.peer, say])
                            else:
                                server.send(received.peer, say)

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield server.endpoint, heard
    finally:
        stop.set()
        thread.join()
        server.close()


@pytest.mark.slow
def test_a_scorer_does_not_join_who_cannot_prove_the_runs_key_and_says_so(
    tmp_path: Path, marker: Path
) -> None:
    evil = f"{tmp_path}/evil.py:score"
    config = run_on_disk(tmp_path, reward={"function": evil}, scorer={"engine": "simulated"})
    directory, log = Path(config.directory), tmp_path / "log"
    with false_broker(tmp_path / "false", config.model_dump_json()) as (endpoint, heard):
        # A stale file: the run's broker was here, and another process has its port now.
        (directory / "endpoint").write_text(endpoint)
        with scorer(directory, log, "--allow-function", evil) as child:
            wait_until(
                lambda: "what listens there does not hold the run's key" in log.read_text(),
                "the cause",
            )
            assert child.poll() is None, "the run's broker may come back"
        assert heard == []
    assert not marker.exists()


ENDPOINT = {"url": "http://127.0.0.1:9/v1", "model": "m", "key_variable": "WANDB_API_KEY"}
ASKED: dict[str, tuple[dict[str, Any], str]] = {
    "function": ({"scorer": {"engine": "simulated"}}, "--allow-function {evil}"),
    "secret": ({"scorer": {"engine": "openai", "openai": ENDPOINT}}, "--secret WANDB_API_KEY"),
}


@pytest.mark.parametrize("case", ASKED)
def test_a_scorer_refuses_what_its_command_line_does_not_allow(
    case: str, tmp_path: Path, marker: Path
) -> None:
    (sections, flag), evil = ASKED[case], f"{tmp_path}/evil.py:score"
    config = run_on_disk(
        tmp_path, reward={"function": evil if case == "function" else None}, **sections
    )
    log = tmp_path / "log"
    with serving(config) as broker, scorer(Path(config.directory), log) as child:
        assert child.wait(60.0) == ConfigError.exit_code
        assert f"start the scorer with {flag.format(evil=evil)}" in log.read_text()
        assert SECRET not in log.read_text()
        broker.ledger.check()
    assert not marker.exists()


ASK = messages.PrefixTask(
    task="t",
    kind="train",
    version=0,
    groups=(GroupTask(0, Prompt("p", "1 + 1 =", "2"), 1),),
    rows_per_group=2,
    sampling=GREEDY,
)
ANOTHER = msgspec.structs.replace(ASK, task="u")
NOISE: list[FromBroker | bytes] = [
    messages.Unknown(),
    os.urandom(40),
    messages.Ack("x"),
    messages.Revoke("y"),
    messages.Swap(9),
    messages.Beat(None),
]
NOISE += [
    messages.Probed(version=9, outcome="proved"),
    msgspec.structs.replace(ASK, task="v", version=7),
]


@pytest.mark.slow
def test_a_hostile_broker_gets_each_task_done_once_and_fills_neither_log_nor_memory(
    tmp_path: Path,
) -> None:
    config = run_on_disk(tmp_path, rollout={"engine": "simulated"}, simulated={"prefix_s": 0.5})
    many = [
        msgspec.structs.replace(ASK, task=f"{rows}", rows_per_group=rows) for rows in (-1, 0, 2**31)
    ]
    says, log = [ASK, ASK, *many, *NOISE * 1000, ASK, ANOTHER], tmp_path / "log"
    directory = Path(config.directory)
    with false_broker(directory, config.model_dump_json(), says, "rollout") as (endpoint, heard):
        (directory / "endpoint").write_text(endpoint)
        with scorer(directory, log, role="rollout") as child:
            wait_until(
                lambda: (
                    {each.task for each in heard if isinstance(each, messages.Prefixes)}
                    >= {"t", "u"}
                ),
                "both tasks",
            )
            assert psutil.Process(child.pid).memory_info().rss < 300 * 2**20
            child.terminate()
            assert child.wait(30.0) == 0
    done = {each.task for each in heard if isinstance(each, messages.Prefixes)}
    assert done == {"t", "u"} and log.stat().st_size < 60_000 and "Traceback" not in log.read_text()


def manifest(*shape: int, chunk_bytes: int = 16) -> Manifest:
    """The manifest of one weight of zeros, whole in itself whatever its size is."""
    size, checksum = 4 * math.prod(shape), xxhash.xxh3_64(bytes(16)).hexdigest()
    digest = xxhash.xxh3_128(f"w:float32:{shape}:{checksum};".encode()).hexdigest()
    weight = TensorEntry(
        name="w", dtype="float32", shape=shape, offset_bytes=0, size_bytes=size, checksum=checksum
    )
    return Manifest(
        version=1, digest=digest, size_bytes=size, chunk_bytes=chunk_bytes, tensors=(weight,)
    )


LIES: dict[str, tuple[Manifest | None, bytes, str]] = {
    "too many pieces": (
        manifest(2**48, chunk_bytes=1),
        b"",
        "1125899906842624 chunks, 1048576 at most",
    ),
    "no memory has its size": (manifest(2**48, chunk_bytes=2**40), b"", "MiB are free"),
    "a longer piece": (manifest(4), bytes(17), r"chunk 0 holds \[17\] bytes, expected 16"),
    "other bytes": (manifest(4), bytes(15) + b"x", "weight w of version 1 arrived damaged"),
    "pieces of no size": (manifest(4, chunk_bytes=0), b"", "has empty chunks"),
    "a newer version each time": (None, b"", "100 answers in a row brought no manifest"),
    "pieces that nobody asked for": (manifest(4), b"", "100 answers in a row brought no chunk"),
}


@pytest.mark.parametrize("case", LIES)
def test_what_a_hostile_weight_server_sends_is_named_and_not_taken(
    case: str, caplog: pytest.LogCaptureFixture
) -> None:
    lie, piece, named = LIES[case]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (2**28, limits[1])
    )  # whatever is wrong, the host keeps its memory
    server: Server[ToWeights, FromWeights] = Server(
        "tcp://127.0.0.1:0", ToWeights, server_keys(keys.folder())
    )
    try:
        fetcher = Fetcher(keys.source(server.endpoint), keys.ALONE)
        fetcher.want_version(1, lie.digest if lie else "d")
        deadline_s = time.monotonic() + 30.0
        while not re.search(named, caplog.text):
            assert fetcher.take_snapshot() is None and time.monotonic() < deadline_s
            if received := server.receive(1.0):
                match received.message:
                    case GetManifest(version):
                        server.send(received.peer, lie or Gone(version, version + 1))
                    case asked:
                        for _ in range(1 if piece else 200):
                            server.send(
                                received.peer, Chunk(1 if piece else 9, asked.index), (piece,)
                            )
    finally:
        server.close()
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
