"""Fetching weights from a real weight server: exactly the version, whole, or a clear end."""

import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import torch

from prefixrl.common.errors import PeerLost
from prefixrl.common.weights.folders import DELTAS_KEPT, delta_folder, prune, versions
from prefixrl.common.weights.snapshot import Snapshot, describe, write_snapshot
from prefixrl.common.wire.keys import client_key_file
from prefixrl.common.wire.messages.weights import Manifest
from prefixrl.rollout import weights
from prefixrl.rollout.weights import Fetcher
from support import keys
from support.fakes import end, publish, publish_next, wait_until, weight_server

PULLER = """
import sys, time
from pathlib import Path
from prefixrl.common.wire.keys import read_client_key
from prefixrl.common.wire.messages.weights import FromWeights, GetChunk
from prefixrl.common.wire.transport import Client
client = Client(sys.argv[1], FromWeights, b"killed", read_client_key(Path(sys.argv[3])))
for index in range(10_000):
    client.send(GetChunk(int(sys.argv[2]), index % 60))
    if index > 3:
        client.receive(5.0)
    print(index, flush=True)
"""

Tensors = dict[str, torch.Tensor]


@contextmanager
def fetching(endpoint: str) -> Iterator[Fetcher]:
    """A fetcher that wants nothing any more afterwards."""
    fetcher = Fetcher(keys.source(endpoint), keys.ALONE)
    yield fetcher
    fetcher.use(keys.source(endpoint))


def taken(fetcher: Fetcher) -> tuple[Manifest, Tensors]:
    snapshot: Snapshot = wait_until(fetcher.take_snapshot, "a snapshot")
    return snapshot.manifest, snapshot.tensors


def equal(got: Tensors, wanted: Tensors) -> bool:
    """Bit by bit."""
    return got.keys() == wanted.keys() and all(
        got[name].dtype == wanted[name].dtype and torch.equal(got[name], wanted[name])
        for name in wanted
    )


def test_the_wanted_version_arrives_bit_by_bit(folder: Path, endpoint: str, version: int) -> None:
    published = {each: publish(folder, each) for each in (version, version + 1, version + 2)}
    with fetching(endpoint) as fetcher:
        fetcher.want_version(version + 1, "")
        manifest, tensors = taken(fetcher)
        assert manifest.version == version + 1
        assert equal(tensors, published[version + 1])
        fetcher.want_version(version, "")
        time.sleep(0.2)
        assert fetcher.take_snapshot() is None, "an older one is never fetched"


def test_a_version_that_is_published_anew_is_fetched_anew(
    folder: Path, endpoint: str, version: int, tmp_path: Path
) -> None:
    publish(folder, version)
    tensors = {"layer.bias": torch.full((100,), 7.0)}
    manifest = describe(version, tensors)
    with fetching(endpoint) as fetcher, weight_server(tmp_path) as (elsewhere, _):
        write_snapshot(tmp_path, manifest, tensors)
        fetcher.want_version(version, "unknown")
        first, _ = taken(fetcher)
        fetcher.want_version(version, first.digest)
        time.sleep(0.2)
        assert fetcher.take_snapshot() is None, "it is there already, whatever it was announced as"
        fetcher.use(keys.source(elsewhere))
        fetcher.want_version(version, manifest.digest)
        second, got = taken(fetcher)
    assert second.digest == manifest.digest != first.digest and equal(got, tensors)


def test_a_server_with_other_weights_than_announced_is_asked_only_once(
    folder: Path, endpoint: str, version: int
) -> None:
    publish(folder, version)
    with fetching(endpoint) as fetcher:
        fetcher.want_version(version, "announced")
        taken(fetcher)
        fetcher.want_version(version, "announced")
        time.sleep(0.3)
        assert fetcher.take_snapshot() is None and fetcher.counts.full == 1


def test_versions_published_during_a_pull_do_not_mix(
    folder: Path, endpoint: str, version: int
) -> None:
    published = {version: publish(folder, version, chunk_bytes=16)}
    with fetching(endpoint) as fetcher:
        fetcher.want_version(version, "")
        for newer in (version + 1, version + 2):
            published[newer] = publish(folder, newer, chunk_bytes=16)
            prune(folder, {newer})
            fetcher.want_version(newer, "")
        arrived = []
        while not arrived or arrived[-1] != version + 2:
            manifest, tensors = taken(fetcher)
            assert equal(tensors, published[manifest.version])
            arrived.append(manifest.version)
        assert arrived == sorted(set(arrived))


def test_a_version_that_is_gone_is_replaced_by_the_newest(
    folder: Path, endpoint: str, version: int
) -> None:
    published = publish(folder, version + 5)
    with fetching(endpoint) as fetcher:
        fetcher.want_version(version, "")
        manifest, tensors = taken(fetcher)
    assert manifest.version == version + 5
    assert equal(tensors, published)


def test_a_version_that_is_not_there_yet_is_asked_for_until_it_is(
    folder: Path, endpoint: str, version: int
) -> None:
    with fetching(endpoint) as fetcher:
        fetcher.want_version(version, "")
        wait_until(lambda: fetcher.counts.retries >= 2, "asking again")
        assert fetcher.take_snapshot() is None
        published = publish(folder, version)
        assert equal(taken(fetcher)[1], published)


def test_a_damaged_snapshot_is_never_handed_out_and_ends_the_fetching_by_name(
    folder: Path, endpoint: str, version: int
) -> None:
    publish(folder, version)
    path = folder / f"v{version:08d}" / "weights.bin"
    data = bytearray(path.read_bytes())
    data[random.Random(0).randrange(len(data))] ^= 0x10
    path.write_bytes(data)
    with (
        fetching(endpoint) as fetcher,
        pytest.raises(PeerLost, match=f"version {version} arrived damaged 3 times in a row"),
    ):
        fetcher.want_version(version, "")
        taken(fetcher)


def test_weights_that_proved_bad_are_fetched_again(
    folder: Path, endpoint: str, version: int
) -> None:
    published = publish(folder, version)
    with fetching(endpoint) as fetcher:
        fetcher.want_version(version, "")
        first = taken(fetcher)
        fetcher.again()
        second = taken(fetcher)
    assert equal(second[1], published)
    assert second[1]["layer.weight"].data_ptr() != first[1]["layer.weight"].data_ptr()


def test_only_the_newest_complete_snapshot_is_taken(
    folder: Path, endpoint: str, version: int
) -> None:
    with fetching(endpoint) as fetcher:
        for number in (version, version + 1):
            publish(folder, number)
            fetcher.want_version(number, "")
            wait_until(lambda e=number: fetcher._have[0] == e, "the pull")
        assert taken(fetcher)[0].version == version + 1
        assert fetcher.take_snapshot() is None


def test_a_puller_killed_at_any_chunk_delays_nobody(
    folder: Path, endpoint: str, version: int
) -> None:
    published = publish(folder, version)
    random_ = random.Random(7)
    puller = subprocess.Popen(
        [
            sys.executable,
            "-c",
            PULLER,
            endpoint,
            str(version),
            str(client_key_file(keys.folder(), "worker")),
        ],
        stdout=subprocess.PIPE,
    )
    assert puller.stdout is not None
    for _ in range(random_.randint(1, 60)):
        puller.stdout.readline()
    end(puller)
    puller.stdout.close()
    with fetching(endpoint) as fetcher:
        fetcher.want_version(version, "")
        assert equal(taken(fetcher)[1], published)
        assert fetcher.counts.retries == 0


def test_a_pull_outlives_a_weight_server_that_is_killed_and_restarted_on_its_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "ANSWER_S", 0.5)
    published = {each: publish(tmp_path, each, chunk_bytes=16) for each in (1, 2)}
    with weight_server(tmp_path) as (endpoint, child), fetching(endpoint) as fetcher:
        fetcher.want_version(1, "")
        child.kill()
        child.wait()
        fetcher.want_version(2, "")
        wait_until(lambda: fetcher.counts.retries, "a pull that failed")
        with weight_server(tmp_path, endpoint) as (again, _):
            assert again == endpoint
            while (snapshot := taken(fetcher))[0].version != 2:
                assert equal(snapshot[1], published[1])
            assert equal(snapshot[1], published[2])


def test_another_weight_server_is_used_from_then_on(
    folder: Path, endpoint: str, version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "ANSWER_S", 0.3)
    published = publish(folder, version)
    with fetching("tcp://127.0.0.1:1") as fetcher:
        fetcher.want_version(version, "")
        wait_until(lambda: fetcher.counts.retries, "a pull that failed")
        fetcher.use(keys.source(endpoint))
        fetcher.want_version(version, "")
        assert equal(taken(fetcher)[1], published)
    assert versions(folder) == [version]


def test_a_worker_that_holds_the_version_before_pulls_the_delta_and_holds_the_same_bits(
    folder: Path, endpoint: str, version: int
) -> None:
    published = publish(folder, version)
    with fetching(endpoint) as fetcher:
        fetcher.want_version(version, "")
        taken(fetcher)
        full_bytes = fetcher.counts.wire_bytes
        for newer in range(version + 1, version + 6):
            published = publish_next(folder, newer, published)
            fetcher.want_version(newer, "")
            manifest, tensors = taken(fetcher)
            assert manifest.version == newer and equal(tensors, published)
            assert describe(newer, tensors).digest == manifest.digest
        assert (fetcher.counts.full, fetcher.counts.delta, fetcher.counts.retries) == (1, 5, 0)
        assert fetcher.counts.wire_bytes - full_bytes < full_bytes / 5


def test_a_worker_a_few_versions_behind_pulls_the_deltas_in_between(
    folder: Path, endpoint: str, version: int
) -> None:
    published = publish(folder, version)
    with fetching(endpoint) as fetcher:
        fetcher.want_version(version, "")
        taken(fetcher)
        for newer in range(version + 1, version + 4):
            published = publish_next(folder, newer, published)
            prune(folder, {newer - 1, newer})
        fetcher.want_version(version + 3, "")
        assert equal(taken(fetcher)[1], published)
        assert (fetcher.counts.full, fetcher.counts.delta) == (1, 1)


def test_a_worker_that_is_new_or_too_far_behind_pulls_the_snapshot(
    folder: Path, endpoint: str, version: int
) -> None:
    published = publish(folder, version)
    with fetching(endpoint) as behind, fetching(endpoint) as late:
        behind.want_version(version, "")
        taken(behind)
        newest = version + DELTAS_KEPT + 1
        for newer in range(version + 1, newest + 1):
            published = publish_next(folder, newer, published)
            prune(folder, {newer - 1, newer})
        for fetcher, pulls in ((behind, 2), (late, 1)):
            fetcher.want_version(newest, "")
            assert equal(taken(fetcher)[1], published)
            assert (fetcher.counts.full, fetcher.counts.delta) == (pulls, 0)


def test_tensors_handed_out_before_keep_their_values_while_later_versions_arrive(
    folder: Path, endpoint: str, version: int
) -> None:
    expected = [publish(folder, version)]
    got = []
    with fetching(endpoint) as fetcher:
        for newer in range(version, version + 5):
            if newer > version:
                expected.append(publish_next(folder, newer, expected[-1]))
            fetcher.want_version(newer, "")
            got.append(taken(fetcher)[1])
    assert all(equal(one, other) for one, other in zip(got, expected, strict=True))


@pytest.mark.parametrize("place", range(0, 1000, 83))
def test_a_damaged_delta_is_replaced_by_the_whole_snapshot_and_counted(
    folder: Path, endpoint: str, version: int, place: int
) -> None:
    before = publish(folder, version)
    with fetching(endpoint) as fetcher:
        fetcher.want_version(version, "")
        taken(fetcher)
        published = publish_next(folder, version + 1, before)
        path = delta_folder(folder, version + 1) / "delta.bin"
        data = bytearray(path.read_bytes())
        data[place % len(data)] ^= 0x10
        path.write_bytes(data)
        fetcher.want_version(version + 1, "")
        assert equal(taken(fetcher)[1], published)
        counts = fetcher.counts
        # A flipped bit that zstd does not use changes nothing, and then the delta is as good as it was.
        assert (counts.full, counts.delta, counts.damaged) in ((2, 0, 1), (1, 1, 0))


@pytest.mark.slow
def test_pieces_that_arrived_before_the_server_was_killed_are_not_pulled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "ANSWER_S", 0.5)
    tensors = {"w": torch.arange(2**18, dtype=torch.float32)}
    manifest = msgspec.structs.replace(describe(1, tensors), chunk_bytes=256)
    write_snapshot(tmp_path, manifest, tensors)
    with weight_server(tmp_path) as (endpoint, child), fetching(endpoint) as fetcher:
        fetcher.want_version(1, "")
        wait_until(lambda: fetcher.counts.wire_bytes > 2**16, "some pieces")
        child.kill()
        child.wait()
        wait_until(lambda: fetcher.counts.retries, "a pull that failed")
        arrived = fetcher.counts.wire_bytes
        assert fetcher.take_snapshot() is None and arrived < manifest.size_bytes
        with weight_server(tmp_path, endpoint):
            assert equal(taken(fetcher)[1], tensors)
        assert fetcher.counts.wire_bytes == manifest.size_bytes
