"""Whatever befalls a pull, its outcome is the asked-for version with its digest proved, or another try, counted."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixrl.common.weights.snapshot import describe, write_snapshot
from prefixrl.common.wire.messages.weights import Manifest
from prefixrl.rollout import weights
from prefixrl.rollout.weights import Fetcher
from support.broker.puller import pull
from support.fakes import publish, publish_next, wait_until, weight_server
from support.keys import source

CHUNKS = 80
WARM = multiprocessing.get_context("forkserver")
WARM.set_forkserver_preload(["prefixrl.rollout.weights"])  # torch, above all


class Puller:
    """The process, which is gone after the block; see `pull` for the options."""

    def __init__(
        self,
        endpoint: str,
        versions: list[int],
        killed_after: int | None = None,
        file_bytes: int | None = None,
        pause_s: float = 0.0,
    ) -> None:
        self._pipe, self._end = WARM.Pipe()
        options = (endpoint, versions, killed_after, file_bytes, pause_s, self._end)
        self.process = WARM.Process(target=pull, args=options, daemon=True)

    def __enter__(self) -> "Puller":
        self.process.start()
        self._end.close()
        return self

    def hears(self, timeout_s: float = 60.0) -> Any:
        """Return its next report; raise EOFError if it died first."""
        if not self._pipe.poll(timeout_s):
            raise AssertionError(f"nothing from the puller within {timeout_s:g} s")
        return self._pipe.recv()

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.join()
        self.process.close()
        self._pipe.close()


def digest(tensors: dict[str, torch.Tensor]) -> str:
    return describe(0, tensors).digest


def flip(path: Path, place: int) -> None:
    """One bit, in place: the server has the file mapped."""
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 0x10]))


@pytest.mark.parametrize(
    "examples",
    [pytest.param(3, marks=pytest.mark.slow), pytest.param(20, marks=pytest.mark.nightly)],
)
def test_a_worker_killed_at_any_piece_delays_nobody_and_its_successor_gets_exactly_the_version(
    folder: Path, endpoint: str, next_version: Callable[[], int], examples: int
) -> None:
    @settings(max_examples=examples, deadline=None)
    @given(place=st.integers(0, CHUNKS - 1), is_delta=st.booleans())
    def check(place: int, is_delta: bool) -> None:
        killed_at(folder, endpoint, next_version(), place, is_delta)

    check()


def killed_at(folder: Path, endpoint: str, version: int, place: int, is_delta: bool) -> None:
    published = publish(folder, version)
    expected = [version]
    if is_delta:
        published = publish_next(folder, version + 1, published)
        expected, place = [version, version + 1], CHUNKS + place % 2  # of a delta of two or three
    with Puller(endpoint, expected, killed_after=place) as killed:
        with Puller(endpoint, expected) as other:
            *_, (got, announced, result, retries) = [other.hears() for _ in expected]
        assert (got, announced, result, retries) == (
            expected[-1],
            digest(published),
            digest(published),
            0,
        )
        killed.process.join(60.0)
        assert killed.process.exitcode == -signal.SIGKILL
    with Puller(endpoint, expected[-1:]) as successor:
        assert successor.hears() == (expected[-1], digest(published), digest(published), 0)


def stopped_for(folder: Path, endpoint: str, version: int, stopped_s: float) -> int:
    """Stop a worker in the middle of a pull; others pull two versions meanwhile; retries of the one stopped."""
    first = publish(folder, version)
    with Puller(endpoint, [version], pause_s=0.02) as stopped:
        assert stopped.hears() == "begun"
        os.kill(stopped.process.pid or 0, signal.SIGSTOP)
        stopped_at_s = time.monotonic()
        second = publish_next(folder, version + 1, first)
        with Puller(endpoint, [version, version + 1]) as other:
            assert other.hears() == (version, digest(first), digest(first), 0)
            assert other.hears() == (version + 1, digest(second), digest(second), 0)
        time.sleep(max(0.0, stopped_s - (time.monotonic() - stopped_at_s)))
        os.kill(stopped.process.pid or 0, signal.SIGCONT)
        got, announced, result, retries = stopped.hears()
        assert (got, announced, result) == (version, digest(first), digest(first))
        return int(retries)


@pytest.mark.slow
def test_a_stopped_worker_delays_nobody_and_finishes_its_pull(
    folder: Path, endpoint: str, version: int
) -> None:
    stopped_for(folder, endpoint, version, 0.0)


@pytest.mark.chaos
def test_a_worker_stopped_for_twenty_seconds_finishes_its_pull(
    folder: Path, endpoint: str, version: int
) -> None:
    """Longer than a heartbeat lasts: its connection is gone when it wakes."""
    stopped_for(folder, endpoint, version, 20.0)


def test_a_version_is_fetched_once_its_damaged_chunk_is_whole_again(
    folder: Path, endpoint: str, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "ASK_AGAIN_S", 0.5)
    published = publish(folder, version)
    path = folder / f"v{version:08d}" / "weights.bin"
    flip(path, 5000)
    fetcher = Fetcher(source(endpoint))
    fetcher.want_version(version, "")
    wait_until(lambda: fetcher.counts.damaged, "a damaged pull")
    flip(path, 5000)
    staged = wait_until(fetcher.take_snapshot, "the version")
    assert digest(staged.tensors) == staged.manifest.digest == digest(published)
    assert fetcher.counts.damaged == fetcher.counts.retries < 3


@pytest.mark.parametrize("kept", [0, 40, -1])
def test_a_truncated_manifest_is_never_served_and_asked_for_again(
    folder: Path, endpoint: str, version: int, kept: int
) -> None:
    published = publish(folder, version)
    path = folder / f"v{version:08d}" / "manifest.msgpack"
    whole = path.read_bytes()
    path.write_bytes(whole[:kept])
    fetcher = Fetcher(source(endpoint))
    fetcher.want_version(version, "")
    wait_until(lambda: fetcher.counts.retries >= 2, "asking again")
    assert fetcher.take_snapshot() is None
    path.write_bytes(whole)
    staged = wait_until(fetcher.take_snapshot, "the version")
    assert digest(staged.tensors) == digest(published)


def test_a_manifest_with_another_dtype_is_refused_and_ends_the_fetching_by_name(
    folder: Path, endpoint: str, version: int
) -> None:
    publish(folder, version)
    path = folder / f"v{version:08d}" / "manifest.msgpack"
    manifest = msgspec.msgpack.decode(path.read_bytes(), type=Manifest)
    wrong = tuple(
        msgspec.structs.replace(entry, dtype="float32" if entry.dtype == "bfloat16" else "bfloat16")
        for entry in manifest.tensors
    )
    path.write_bytes(msgspec.msgpack.encode(msgspec.structs.replace(manifest, tensors=wrong)))
    fetcher = Fetcher(source(endpoint))
    fetcher.want_version(version, "")
    with pytest.raises(Exception, match=r"3 times in a row: weight .* does not fit its shape"):
        wait_until(fetcher.take_snapshot, "the end")
    assert fetcher.counts.damaged == 3


@pytest.mark.slow
def test_a_worker_without_room_for_a_version_asks_again_until_there_is(
    folder: Path, endpoint: str, version: int
) -> None:
    published = publish(folder, version)
    with Puller(endpoint, [version], file_bytes=10_000) as puller:
        got, announced, actual, retries = puller.hears()
    assert (got, announced, actual) == (version, digest(published), digest(published))
    assert retries >= 2


def anonymous_bytes(pid: int) -> int:
    """Memory that is the process's own, not that of files."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (result,) = [line for line in lines if line.startswith("RssAnon")]
    return int(result.split()[1]) * 1024


@pytest.mark.slow
def test_the_server_holds_one_encrypted_chunk_for_a_worker_that_does_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each asks for as much as it is allowed to have under way and stops; versions come and go meanwhile."""
    # Every chunk gets a mapping of its own. In the heap, chunks that are freed already may still count as held.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(2**20))
    tensors = {"w": torch.randn(2**23)}
    for version in (1, 2):
        write_snapshot(tmp_path, describe(version, tensors), tensors)
    with weight_server(tmp_path) as (address, child):
        with Puller(address, [1]) as first:
            first.hears()
        before = anonymous_bytes(child.pid)
        pullers = [Puller(address, [1], pause_s=30.0) for _ in range(3)]
        for puller in pullers:
            puller.__enter__()
            assert puller.hears() == "begun"
            os.kill(puller.process.pid or 0, signal.SIGSTOP)
        with Puller(address, [2]) as other:
            assert other.hears()[0] == 2
        grown = anonymous_bytes(child.pid) - before
        for puller in pullers:
            puller.__exit__()
    assert grown < len(pullers) * 2**22 + 2**23, f"{grown / 2**20:.1f} MiB more"
