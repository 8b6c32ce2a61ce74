"""The weight server: what it answers from a folder, and that nothing a client sends ends it."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from prefixrl.common.weights.folders import prune
from prefixrl.common.weights.snapshot import Verifier, describe, view_tensors, write_snapshot
from prefixrl.common.wire.keys import add_client, read_client_key, remove_client
from prefixrl.common.wire.messages.weights import (
    Chunk,
    FromWeights,
    GetChunk,
    GetManifest,
    Gone,
    Manifest,
    ToWeights,
)
from prefixrl.common.wire.transport import Client
from prefixrl.learner.weights.server import OPEN_SNAPSHOTS, Snapshots, answer
from support import keys
from support.fakes import publish, weight_server
from support.keys import key


@pytest.fixture
def snapshots(tmp_path: Path) -> Snapshots:
    publish(tmp_path, 3)
    return Snapshots(tmp_path)


def manifest_of(snapshots: Snapshots, version: int) -> Manifest:
    message, payload = answer(snapshots, GetManifest(version))
    assert isinstance(message, Manifest) and payload == []
    return message


def whole(snapshots: Snapshots, version: int) -> bytes:
    manifest = manifest_of(snapshots, version)
    chunks = -(-manifest.size_bytes // manifest.chunk_bytes)
    return b"".join(bytes(answer(snapshots, GetChunk(version, i))[1][0]) for i in range(chunks))


def test_the_chunks_are_the_file(snapshots: Snapshots, tmp_path: Path) -> None:
    data = whole(snapshots, 3)
    assert data == (tmp_path / "v00000003" / "weights.bin").read_bytes()
    manifest, view = manifest_of(snapshots, 3), memoryview(bytearray(data))
    Verifier(manifest, view).advance(manifest.size_bytes)
    assert view_tensors(manifest, view).keys() == publish(tmp_path, 3).keys()


@pytest.mark.parametrize("index", [-1, 10_000, 2**62])
def test_a_chunk_outside_the_file_is_gone(snapshots: Snapshots, index: int) -> None:
    assert answer(snapshots, GetChunk(3, index)) == (Gone(3, 3), [])


@pytest.mark.parametrize("version", [-1, 0, 4, 10**12])
def test_a_version_that_is_not_there_is_gone_and_the_newest_is_named(
    snapshots: Snapshots, version: int
) -> None:
    for request in (GetManifest(version), GetChunk(version, 0)):
        assert answer(snapshots, request) == (Gone(version, 3), [])


def test_before_anything_is_published_nothing_is_the_newest(tmp_path: Path) -> None:
    assert answer(Snapshots(tmp_path), GetManifest(0)) == (Gone(0, -1), [])


def test_an_older_version_is_served_after_newer_ones_fill_the_open_files(tmp_path: Path) -> None:
    """An evaluation pins a version while rollouts pull newer ones."""
    for version in range(1, OPEN_SNAPSHOTS + 2):
        publish(tmp_path, version)
    snapshots = Snapshots(tmp_path)
    for version in range(OPEN_SNAPSHOTS + 1, 0, -1):
        assert manifest_of(snapshots, version).version == version


def test_a_snapshot_being_pulled_is_served_to_its_end_after_its_folder_is_gone(
    snapshots: Snapshots, tmp_path: Path
) -> None:
    before = whole(snapshots, 3)
    publish(tmp_path, 4)
    prune(tmp_path, {4})
    assert whole(snapshots, 3) == before
    assert snapshots.latest() == 4


def test_only_a_few_snapshots_are_kept_open(tmp_path: Path) -> None:
    for version in range(10):
        publish(tmp_path, version)
    snapshots = Snapshots(tmp_path)
    for version in range(10):
        manifest_of(snapshots, version)
    assert sorted(snapshots._open) == list(range(10 - OPEN_SNAPSHOTS, 10))


def test_a_snapshot_without_tensors_has_no_chunk(tmp_path: Path) -> None:
    write_snapshot(tmp_path, describe(1, {}), {})
    snapshots = Snapshots(tmp_path)
    assert manifest_of(snapshots, 1).size_bytes == 0
    assert answer(snapshots, GetChunk(1, 0)) == (Gone(1, 1), [])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    folder = tmp_path_factory.mktemp("served")
    publish(folder, 1)
    with weight_server(folder) as (endpoint, _):
        yield folder, endpoint


@pytest.fixture
def client(served: tuple[Path, str]) -> Iterator[Client[FromWeights, ToWeights]]:
    connected: Client[FromWeights, ToWeights] = Client(served[1], FromWeights, b"one", key())
    yield connected
    connected.close()


def test_a_chunk_comes_with_its_bytes(
    served: tuple[Path, str], client: Client[FromWeights, ToWeights]
) -> None:
    client.send(GetChunk(1, 1))
    received = client.receive(20.0)
    data = (served[0] / "v00000001" / "weights.bin").read_bytes()
    assert received == (Chunk(1, 1), [data[256:512]])


def test_malformed_requests_are_passed_over(client: Client[FromWeights, ToWeights]) -> None:
    client.send(GetManifest(1))
    for junk in (b"", b"\xc1", msgspec.msgpack.encode({"type": "GetChunk", "version": "1"})):
        client._socket.send(junk)
    client.send(GetChunk(1, 0))
    answers = [client.receive(20.0) for _ in range(2)]
    assert [type(reply[0]) for reply in answers if reply] == [Manifest, Chunk]


def test_a_peer_whose_key_was_removed_gets_nothing_more_and_ends_no_server(tmp_path: Path) -> None:
    publish(tmp_path, 3)
    removed = read_client_key(add_client(keys.folder(), "leaving"))
    with weight_server(tmp_path) as (endpoint, child):
        leaving: Client[FromWeights, ToWeights] = Client(endpoint, FromWeights, b"leaving", removed)
        staying: Client[FromWeights, ToWeights] = Client(endpoint, FromWeights, b"staying", key())
        for process in (leaving, staying):
            process.send(GetManifest(3))
            assert process.receive(20.0) is not None
        remove_client(keys.folder(), "leaving")
        leaving.send(GetManifest(3))
        staying.send(GetManifest(3))
        assert staying.receive(20.0) is not None
        assert leaving.receive(0.5) is None and child.poll() is None
        leaving.close()
        staying.close()
