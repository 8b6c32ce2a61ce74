"""Rollouts of one host pull a version once, with real processes; nobody waits for one that died or stands still."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from prefixrl.common.weights.folders import folder
from prefixrl.common.weights.memory import MemoryFiles, map_shared
from prefixrl.common.wire.keys import client_key_file
from prefixrl.rollout import host
from prefixrl.rollout.host import HostShare
from prefixrl.rollout.weights import Fetcher
from support import keys
from support.fakes import publish, publish_next, wait_until, weight_server

ROLLOUTS = 4
ROLLOUT = """
import json, os, sys, time
from pathlib import Path
from prefixrl.common.wire.keys import read_client_key
from prefixrl.rollout.host import HostShare
from prefixrl.rollout.weights import Fetcher, WeightsSource
fetcher = Fetcher(WeightsSource(sys.argv[1], read_client_key(Path(sys.argv[2]))), HostShare(Path(sys.argv[3])))
for line in sys.stdin:
    fetcher.want_version(int(line), "")
    while (snapshot := fetcher.take_snapshot()) is None:
        if fetcher.counts.wire_bytes:
            print("pulling", flush=True)
        time.sleep(0.002)
    counts, found = fetcher.counts, os.stat(snapshot.memory.path)
    print(json.dumps({"full": counts.full, "delta": counts.delta, "shared": counts.from_host, "inode": found.st_ino,
                      "digest": snapshot.manifest.digest, "sum": float(snapshot.tensors["layer.weight"].sum())}),
          flush=True)
"""
Started = "subprocess.Popen[str]"


@contextmanager
def rollouts(count: int, endpoint: str, shared: Path) -> Iterator[list["subprocess.Popen[str]"]]:
    """So many processes that fetch what they are told to."""
    key = str(client_key_file(keys.folder(), "worker"))
    command = [sys.executable, "-c", ROLLOUT, endpoint, key, str(shared)]
    started = [subprocess.Popen(command, stdin=-1, stdout=-1, text=True) for _ in range(count)]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def ask(process: "subprocess.Popen[str]", version: int) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{version}\n")
    process.stdin.flush()


def told(process: "subprocess.Popen[str]") -> dict[str, Any]:
    assert process.stdout is not None
    while (line := process.stdout.readline()) == "pulling\n":
        pass
    answer: dict[str, Any] = json.loads(line)
    return answer


@pytest.mark.slow
def test_four_rollouts_on_a_host_pull_a_version_once_and_map_the_same_memory(
    tmp_path: Path,
) -> None:
    tensors = publish(tmp_path, 1)
    with (
        weight_server(tmp_path) as (endpoint, _),
        rollouts(ROLLOUTS, endpoint, tmp_path / "shared") as started,
    ):
        for process in started:
            ask(process, 1)
        answers = [told(each) for each in started]
        assert sum(each["full"] for each in answers) == 1
        assert sum(each["shared"] for each in answers) == ROLLOUTS - 1
        assert len({each["inode"] for each in answers}) == 1, "there is one copy of it"
        assert {each["sum"] for each in answers} == {float(tensors["layer.weight"].sum())}
        tensors = publish_next(tmp_path, 2, tensors)
        for process in started:
            ask(process, 2)
        answers = [told(each) for each in started]
        assert sum(each["delta"] for each in answers) == 1, "also from what another one pulled"
        assert len({each["inode"] for each in answers}) == 1
        assert {each["sum"] for each in answers} == {float(tensors["layer.weight"].sum())}


@pytest.mark.nightly
def test_another_rollout_takes_over_from_one_that_is_killed_in_mid_pull(tmp_path: Path) -> None:
    publish(tmp_path, 1, chunk_bytes=1)  # many pieces: it takes seconds
    with (
        weight_server(tmp_path) as (endpoint, _),
        rollouts(3, endpoint, tmp_path / "shared") as started,
    ):
        first, *others = started
        ask(first, 1)
        assert first.stdout is not None and first.stdout.readline() == "pulling\n"
        for other in others:
            ask(other, 1)
        os.kill(first.pid, signal.SIGKILL)
        answers = [told(each) for each in others]
        assert sum(each["full"] for each in answers) == sum(each["shared"] for each in answers) == 1


def test_nobody_waits_for_a_puller_that_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "STILL_S", 0.2)
    publish(tmp_path, 1)
    shared = HostShare(tmp_path / "shared")
    with weight_server(tmp_path) as (endpoint, _):
        fetcher = Fetcher(keys.source(endpoint), HostShare(tmp_path / "shared"))
        digest = _digest(tmp_path)
        with shared.turn(digest, lambda: False):
            fetcher.want_version(1, "")
            wait_until(fetcher.take_snapshot, "version 1")
        assert (fetcher.counts.full, fetcher.counts.from_host) == (1, 0)


def test_memory_that_another_process_maps_is_not_written_to_again(tmp_path: Path) -> None:
    files, shared = MemoryFiles(), HostShare(tmp_path / "shared")
    memory = files.take_memory(100)
    memory.data[:] = 7
    shared.announce("d", memory)
    mapped = shared.find_memory("d", 100)
    assert mapped is not None and shared.find_memory("d", 99) is None
    path = memory.path
    del memory
    assert shared.find_memory("d", 100) is None, "its owner may ask for it again"
    other = files.take_memory(100)
    other.data[:] = 9
    assert (mapped.data == 7).all()
    del other
    again = files.take_memory(100)
    assert (again.data == 9).all(), "memory that nobody maps is used again"
    assert map_shared(path.replace("/fd/", "/none/"), 100) is None


def test_a_version_that_proved_bad_is_pulled_by_everybody_who_doubts_it(tmp_path: Path) -> None:
    publish(tmp_path, 1)
    with weight_server(tmp_path) as (endpoint, _):
        one, other = (
            Fetcher(keys.source(endpoint), HostShare(tmp_path / "shared")) for _ in range(2)
        )
        for fetcher in (one, other):
            fetcher.want_version(1, "")
            assert wait_until(fetcher.take_snapshot, "version 1").version == 1
        assert (one.counts.full, other.counts.full, other.counts.from_host) == (1, 0, 1)
        other.again()
        assert wait_until(other.take_snapshot, "version 1").version == 1
        assert other.counts.full == 1


def test_a_folder_that_others_can_enter_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    shared, files = HostShare(tmp_path / "open"), MemoryFiles()
    shared.announce("d", files.take_memory(10))
    assert shared.find_memory("d", 10) is None and not list((tmp_path / "open").iterdir())


def _digest(directory: Path) -> str:
    from prefixrl.common.weights.folders import read_mapped
    from prefixrl.common.wire.messages.weights import Manifest

    assert folder(directory, 1).exists()
    return read_mapped(folder(directory, 1), Manifest)[0].digest
