"""Weights from the weight server to rollouts.

How fast, against the same bytes over one raw TCP connection of the same run.

    full        the real weight server (a process) and real fetchers (a process each) on its host, through its local
                door, with staging and checksums
    encrypted   the same by the way that rollouts on other hosts take: TCP with CURVE
    raw TCP     one process sends the same file, another receives it into memory that was touched before: nothing else
    PUB/SUB     one frame of everything, received and copied into memory: no checksum, no window, no resuming
    CURVE       chunks of 4 MiB over plain ZeroMQ sockets, encrypted and not: what encryption costs
    delta       size, time to write and to apply at shares of changed bf16 values, and on given snapshots of a real run

Each repeat does all of them one after the other, so a busy machine slows them alike; ratios are of medians.

    python -m benchmarks.weight_transfer [--quick] --json FILE
"""

import multiprocessing
import os
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
import zmq

from benchmarks.real_updates import RealUpdate, measure
from benchmarks.results import Figure, Report, commit, options
from prefixrl.common.host.serving import command
from prefixrl.common.weights.delta import write_delta
from prefixrl.common.weights.folders import folder, prune
from prefixrl.common.weights.snapshot import describe, write_snapshot
from prefixrl.common.wire.keys import client_key_file, make_keys, read_client_key
from prefixrl.learner.weights.server import WeightServerStart
from prefixrl.rollout.host import HostShare
from prefixrl.rollout.weights import Fetcher, WeightsSource

MIB = 2**20
CHUNK = 4 * MIB
TENSOR_VALUES = 16 * MIB
REAL = (("bfloat16", 5e-7), ("bfloat16", 2.5e-4), ("float32", 5e-7), ("float32", 2.5e-4))
"""dtype and learning rate: the published recipe's and the arithmetic example's."""
SLOW_REPEATS = 4
"""All that is not the push to one receiver or its baseline is repeated fewer times."""
SHARES = (0.001, 0.01, 0.05, 0.2)
PATIENCE_S = 300.0
READY = (0.0, False)
SPAWN = multiprocessing.get_context("spawn")


# --- the model ------------------------------------------------------------------------------------------------------


def model(size_bytes: int) -> dict[str, torch.Tensor]:
    """bf16 tensors of 32 MiB, values as of trained weights."""
    random = torch.Generator().manual_seed(0)
    count = -(-size_bytes // (2 * TENSOR_VALUES))
    return {
        f"layer.{index}": (torch.randn(TENSOR_VALUES, generator=random) * 0.02).bfloat16()
        for index in range(count)
    }


def changed(tensors: dict[str, torch.Tensor], share: float, seed: int) -> dict[str, torch.Tensor]:
    """The model with a share of its values moved to the next bf16 value."""
    random = np.random.default_rng(seed)
    found = {}
    for name, tensor in tensors.items():
        bits = tensor.view(torch.int16).numpy().copy()
        bits[random.random(bits.size, dtype=np.float32) < share] += 1
        found[name] = torch.from_numpy(bits).view(torch.bfloat16)
    return found


def publish(directory: Path, version: int, tensors: dict[str, torch.Tensor]) -> None:
    """A snapshot in its folder."""
    write_snapshot(directory, describe(version, tensors), tensors)


# --- processes that receive -----------------------------------------------------------------------------------------


def fetch(source: WeightsSource, pipe: "Connection[Any, Any]") -> None:
    """A worker's fetcher: told a version, tells the seconds until it was staged, and whether by deltas."""
    torch.set_num_threads(1)
    fetcher = Fetcher(source, HostShare(Path(os.devnull) / "alone"))  # as if on a host of its own
    pipe.send(READY)
    while (version := pipe.recv()) is not None:
        pulled_s, deltas = fetcher.counts.pull_s, fetcher.counts.delta
        fetcher.want_version(version, "")
        while (staged := fetcher.take_snapshot()) is None:
            time.sleep(0.0005)
        assert staged.version == version
        pipe.send((fetcher.counts.pull_s - pulled_s, fetcher.counts.delta > deltas))
        del staged


def receive_tcp(port: int, size_bytes: int, pipe: "Connection[Any, Any]") -> None:
    """Everything a raw connection can do: bytes into memory that is there already."""
    memory = bytearray(size_bytes)
    pipe.send(READY)
    while pipe.recv() is not None:
        view, at = memoryview(memory), 0
        started_s = time.monotonic()
        with socket.create_connection(("127.0.0.1", port)) as connection:
            while at < size_bytes:
                got = connection.recv_into(view[at:], min(CHUNK, size_bytes - at))
                assert got, "the sender ended early"
                at += got
        pipe.send((time.monotonic() - started_s, False))


def receive_frame(endpoint: str, size_bytes: int, pipe: "Connection[Any, Any]") -> None:
    """One frame of everything from a PUB socket, copied into memory."""
    memory = np.zeros(size_bytes, dtype=np.uint8)
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.setsockopt(zmq.SUBSCRIBE, b"")
        subscriber.connect(endpoint)
        pipe.send(READY)
        while pipe.recv() is not None:
            subscriber.recv()  # the starting signal: the sender is about to send
            started_s = time.monotonic()
            frame = subscriber.recv(copy=False)
            np.copyto(memory, np.frombuffer(frame.buffer, dtype=np.uint8))
            pipe.send((time.monotonic() - started_s, False))
            del frame


def receive_chunks(
    endpoint: str,
    keys: tuple[bytes, bytes, bytes] | None,
    size_bytes: int,
    pipe: "Connection[Any, Any]",
) -> None:
    """Chunks asked for with the fetcher's window, copied into memory: no checksum."""
    memory = np.zeros(size_bytes, dtype=np.uint8)
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        if keys:
            dealer.curve_serverkey, dealer.curve_publickey, dealer.curve_secretkey = keys
        dealer.connect(endpoint)
        pipe.send(READY)
        while pipe.recv() is not None:
            started_s, asked = time.monotonic(), 0
            for at in range(0, size_bytes, CHUNK):
                while asked < min(size_bytes, at + 4 * CHUNK):
                    dealer.send(asked.to_bytes(8, "little"))
                    asked += CHUNK
                frame = dealer.recv(copy=False)
                np.copyto(memory[at : at + CHUNK], np.frombuffer(frame.buffer, dtype=np.uint8))
            pipe.send((time.monotonic() - started_s, False))


class Receiver:
    """One receiving process."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        self._pipe, other = SPAWN.Pipe()
        self._process = SPAWN.Process(target=target, args=(*arguments, other), daemon=True)
        self._process.start()
        self._is_ready = False

    def begin(self, version: int = 0) -> None:
        """Let it receive, once it is there."""
        if not self._is_ready:
            assert self.result() == READY
            self._is_ready = True
        self._pipe.send(version)

    def result(self) -> tuple[float, bool]:
        """Seconds it took, and whether deltas were used."""
        if not self._pipe.poll(PATIENCE_S):
            raise TimeoutError("a receiver did not finish")
        found: tuple[float, bool] = self._pipe.recv()
        return found

    def close(self) -> None:
        """End it."""
        self._pipe.send(None)
        self._process.join(5.0)
        self._process.kill()


# --- processes that send --------------------------------------------------------------------------------------------


@contextmanager
def weight_server(directory: Path) -> Iterator[tuple[WeightsSource, WeightsSource]]:
    """The real one; yields its local endpoint and its encrypted way."""
    file, door = directory / "endpoint", f"ipc://{directory}/door"
    make_keys(directory)
    start = WeightServerStart(str(directory), "tcp://127.0.0.1:0", str(file), door)
    child = subprocess.Popen(command("prefixrl.learner.weights.server", directory, start))
    try:
        while not file.exists():
            assert child.poll() is None, "the weight server ended"
            time.sleep(0.01)
        key = read_client_key(client_key_file(directory, "worker"))
        yield WeightsSource(door, None), WeightsSource(file.read_text(encoding="utf-8"), key)
    finally:
        child.terminate()
        child.wait()


def mapped(path: Path) -> memoryview:
    """A file's bytes in memory."""
    return np.memmap(path, dtype=np.uint8, mode="r").data


def send_tcp(path: Path, pipe: "Connection[Any, Any]") -> None:
    """The bytes of a file to whoever connects."""
    data = mapped(path)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send(listener.getsockname()[1])
        while True:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(data)


def send_frames(path: Path, pipe: "Connection[Any, Any]") -> None:
    """One frame of everything, whenever told to."""
    data = mapped(path)
    with zmq.Context() as context, context.socket(zmq.PUB) as publisher:
        publisher.bind("tcp://127.0.0.1:0")
        pipe.send(publisher.getsockopt_string(zmq.LAST_ENDPOINT))
        while pipe.recv() is not None:
            publisher.send(b"now")
            publisher.send(data, copy=False)


def send_chunks(path: Path, keys: tuple[bytes, bytes] | None, pipe: "Connection[Any, Any]") -> None:
    """The chunk that is asked for."""
    data = mapped(path)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        if keys:
            router.curve_server = True
            router.curve_publickey, router.curve_secretkey = keys
        router.bind("tcp://127.0.0.1:0")
        pipe.send(router.getsockopt_string(zmq.LAST_ENDPOINT))
        while True:
            peer, at = router.recv_multipart()
            start = int.from_bytes(at, "little")
            router.send_multipart([peer, data[start : start + CHUNK]], copy=False)


class Sender:
    """One sending process; `address` is where it listens."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        self._pipe, other = SPAWN.Pipe()
        self._process = SPAWN.Process(target=target, args=(*arguments, other), daemon=True)
        self._process.start()
        self.address: Any = self._pipe.recv()

    def go(self) -> None:
        """Send now."""
        self._pipe.send(1)

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.join()


# --- what is measured -----------------------------------------------------------------------------------------------


def pushes(directory: Path, receivers: Sequence[int], repeats: int) -> dict[str, list[float]]:
    """GB/s per receiver of every way, by name; every repeat publishes a new version of the same bytes."""
    size = (folder(directory, 1) / "weights.bin").stat().st_size
    path = directory / "plain.bin"
    os.link(folder(directory, 1) / "weights.bin", path)
    server_keys, client_keys = zmq.curve_keypair(), zmq.curve_keypair()
    tcp, pub = Sender(send_tcp, path), Sender(send_frames, path)
    plain = Sender(send_chunks, path, None)
    curve = Sender(send_chunks, path, server_keys)
    ways: dict[str, Receiver] = {
        "PUB/SUB, one frame": Receiver(receive_frame, pub.address, size),
        "chunks, plain": Receiver(receive_chunks, plain.address, None, size),
        "chunks, CURVE": Receiver(
            receive_chunks, curve.address, (server_keys[0], *client_keys), size
        ),
        "raw TCP": Receiver(receive_tcp, tcp.address, size),
    }
    found: dict[str, list[float]] = {}
    with weight_server(directory) as (door, encrypted):
        fetchers = [Receiver(fetch, door) for _ in range(max(receivers))]
        fetchers_by_way = {f"full, {count}": fetchers[:count] for count in receivers}
        fetchers_by_way["encrypted, 1"] = [Receiver(fetch, encrypted)]
        version = 1
        # Two more bring the memory that is used again and again.
        for repeat in range(repeats + 2):
            for name, receiver in ways.items():
                if repeat >= SLOW_REPEATS and name != "raw TCP":
                    continue
                receiver.begin()
                if receiver is ways["PUB/SUB, one frame"]:
                    time.sleep(0.3)
                    pub.go()
                _note(found, name, [receiver.result()[0]], size, repeat)
            for name, those in fetchers_by_way.items():
                if repeat >= SLOW_REPEATS and name != f"full, {receivers[0]}":
                    continue
                version += 1
                link(directory, version)
                for fetcher in those:
                    fetcher.begin(version)
                times = [fetcher.result()[0] for fetcher in those]
                _note(found, name, times, size, repeat)
                prune(directory, {1, version})
        for receiver in (*ways.values(), *fetchers, *fetchers_by_way["encrypted, 1"]):
            receiver.close()
        for sender in (tcp, pub, plain, curve):
            sender.close()
    return found


def link(directory: Path, version: int) -> None:
    """A new version of the bytes of version 1, without writing them again."""
    import msgspec

    from prefixrl.common.wire.messages.weights import Manifest

    source, target = folder(directory, 1), folder(directory, version)
    target.mkdir()
    os.link(source / "weights.bin", target / "weights.bin")
    manifest = msgspec.msgpack.decode((source / "manifest.msgpack").read_bytes(), type=Manifest)
    again = msgspec.structs.replace(manifest, version=version)
    (target / "manifest.msgpack").write_bytes(msgspec.msgpack.encode(again))


def _note(
    found: dict[str, list[float]], name: str, times: list[float], size: int, repeat: int
) -> None:
    """The slowest receiver counts."""
    print(f"{name}: {max(times):.3f} s", flush=True)
    if repeat >= 2:
        found.setdefault(name, []).append(size / max(times) / 1e9)
    else:
        found.setdefault(f"{name}, push {repeat + 1}", []).append(size / max(times) / 1e9)


def deltas(directory: Path, tensors: dict[str, torch.Tensor]) -> list[dict[str, float]]:
    """Size, time to write and time to fetch and apply, at shares of changed values."""
    found = []
    with weight_server(directory) as (door, _):
        fetcher = Receiver(fetch, door)
        for version in (1, 2):  # fresh memory both times, which later pulls use again
            publish(directory, version, tensors)
            fetcher.begin(version)
            fetcher.result()
        for version, share in enumerate(SHARES, start=3):
            tensors = changed(tensors, share, version)
            publish(directory, version, tensors)
            started_s = time.monotonic()
            delta = write_delta(directory, version - 1, version)
            written_s = time.monotonic() - started_s
            fetcher.begin(version)
            pulled_s, is_delta = fetcher.result()
            size = sum(tensor.nbytes for tensor in tensors.values())
            found.append(
                {
                    "changed": share,
                    "share_of_full": sum(delta.sizes) / size if delta else 1.0,
                    "write_gb_s": size / written_s / 1e9,
                    "pull_gb_s": size / pulled_s / 1e9,
                    "is_delta": float(is_delta),
                }
            )
            print(found[-1], flush=True)
            prune(directory, {version, version - 1})
        fetcher.close()
    return found


def median_figure(
    name: str, unit: str, values: Sequence[float], baseline: Sequence[float] = (), of: str = ""
) -> Figure:
    """Median and range of `values`, against the median of `baseline`."""
    middle = statistics.median(values)
    against = statistics.median(baseline) if baseline else None
    return Figure(
        name,
        unit,
        middle,
        len(values),
        (min(values), max(values)),
        against,
        of,
        middle / against if against else None,
        "median",
        "smallest and largest",
    )


def figures_of(speeds: dict[str, list[float]], measured: list[dict[str, float]]) -> list[Figure]:
    """Every way against raw TCP; CURVE against the same chunks without."""
    raw = speeds["raw TCP"]
    measurements = [
        median_figure(
            name, "GB/s, slowest receiver", values, () if name == "raw TCP" else raw, "raw TCP"
        )
        for name, values in speeds.items()
    ]
    plain = speeds["chunks, plain"]
    measurements.append(
        median_figure(
            "CURVE against plain", "GB/s", speeds["chunks, CURVE"], plain, "chunks, plain"
        )
    )
    for row in measured:
        where = f"delta, {row['changed']:.1%} changed"
        measurements.append(
            median_figure(f"{where}: size", "share of full", [row["share_of_full"]])
        )
        measurements.append(
            median_figure(f"{where}: write", "GB/s of the snapshot", [row["write_gb_s"]])
        )
        measurements.append(
            median_figure(
                f"{where}: pull, apply, verify", "GB/s of the snapshot", [row["pull_gb_s"]]
            )
        )
    return measurements


def real_figures(updates: Sequence[RealUpdate]) -> list[Figure]:
    """Per dtype and learning rate: what a training step changed, and what its delta weighs."""
    found = []
    for dtype, rate in dict.fromkeys((each.dtype, each.actor_lr) for each in updates):
        own = [each for each in updates if (each.dtype, each.actor_lr) == (dtype, rate)]
        name = f"real run, {dtype}, learning rate {rate:g}"
        found.append(median_figure(f"{name}: changed", "share of values", [e.changed for e in own]))
        found.append(
            median_figure(f"{name}: delta", "share of full", [e.share_of_full for e in own])
        )
    return found


@click.command()
@options
def main(path: Path, quick: bool) -> None:
    """Measure and write the figures."""
    torch.set_num_threads(1)
    at, started_s = commit(), time.monotonic()
    size, repeats = (256 * MIB, 2) if quick else (1024 * MIB, 7)
    receivers = (1, 2) if quick else (1, 2, 4)
    directory = Path(tempfile.mkdtemp(prefix="weights-"))
    try:
        tensors = model(size)
        publish(directory, 1, tensors)
        speeds = pushes(directory, receivers, repeats)
        shutil.rmtree(directory)
        directory.mkdir()
        measured = deltas(directory, tensors)
        real = [
            update
            for dtype, rate in (REAL[:1] if quick else REAL)
            for update in measure(dtype, rate, iterations=2 if quick else 5)
        ]
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    settings = {"size_mib": size // MIB, "repeats": repeats, "receivers": list(receivers)}
    figures = [*figures_of(speeds, measured), *real_figures(real)]
    report = Report(
        "weight_transfer",
        quick,
        settings,
        figures,
        {"gb_s": speeds, "delta": measured, "real": real},
        at,
    )
    report.finish(path, started_s)


if __name__ == "__main__":
    main()
