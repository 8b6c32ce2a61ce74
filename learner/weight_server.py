"""`python -m prefixrl.learner.weight_server`: serves published snapshots, chunk by chunk, to whoever asks.

It holds no state but open files: a snapshot is its folder (common/weights.py), the publisher writes and prunes folders, a
worker asks for what it lacks.
A slow, stopped or killed worker has at most its own window of chunks queued here and delays nobody.
"""

import logging
import mmap
import os
from pathlib import Path
from typing import TypeVar

import click
import msgspec

from prefixrl.common.messages import (
    Chunk,
    Delta,
    FromWeights,
    GetChunk,
    GetManifest,
    Gone,
    Manifest,
    ToWeights,
)
from prefixrl.common.process import (
    die_with_parent,
    exit_codes,
    start_logging,
    stop_event,
    write_atomically,
)
from prefixrl.common.snapshots import DELTAS_KEPT, delta_folder, folder, versions
from prefixrl.common.transport import Malformed, Server, Undeliverable

log = logging.getLogger(__name__)

Mapped = mmap.mmap | bytes
OPEN_DELTAS = DELTAS_KEPT + 1
OPEN_SNAPSHOTS = 3
"""Two and one pinned by an evaluation; older ones are closed when their folder is gone."""


QUEUE_MESSAGES = 64
"""Answers that may wait for one worker, twice a worker's own window: one that asks for more without reading gets no answer.

They are views of mapped files, so what waits takes no memory of its own."""
T = TypeVar("T", Manifest, Delta)


class Snapshots:
    """Manifests and mapped bytes of the snapshots and deltas in a folder, opened when first asked for."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: dict[int, tuple[Manifest, Mapped]] = {}
        self._deltas: dict[int, tuple[Delta, Mapped]] = {}

    def latest(self) -> int:
        """Newest version there, -1 for none."""
        return max(versions(self._directory), default=-1)

    def get(self, version: int) -> tuple[Manifest, Mapped] | None:
        """Manifest and bytes, or None when the version is not held or cannot be read."""
        if version not in self._open:
            read = _read(
                folder(self._directory, version), "manifest.msgpack", "weights.bin", Manifest
            )
            if read is None:
                return None
            self._open[version] = read
            for old in sorted(self._open)[:-OPEN_SNAPSHOTS]:
                del self._open[old]
        return self._open[version]

    def delta(self, version: int) -> tuple[Delta, Mapped] | None:
        """The delta that leads to a version, or None when it is not held."""
        if version not in self._deltas:
            read = _read(
                delta_folder(self._directory, version), "delta.msgpack", "delta.bin", Delta
            )
            if read is None:
                return None
            self._deltas[version] = read
            for old in sorted(self._deltas)[:-OPEN_DELTAS]:
                del self._deltas[old]
        return self._deltas[version]

    def chain(self, manifest: Manifest) -> tuple[Delta, ...]:
        """The deltas that lead to a snapshot, oldest first, as far back as they are held without a gap."""
        found: list[Delta] = []
        digest, version = manifest.digest, manifest.version
        while (held := self.delta(version)) is not None and held[0].digest == digest:
            found.insert(0, held[0])
            digest, version = held[0].base_digest, version - 1
        return tuple(found)


def _read(place: Path, head: str, body: str, kind: type[T]) -> tuple[T, Mapped] | None:
    try:
        description = msgspec.msgpack.decode((place / head).read_bytes(), type=kind)
        with (place / body).open("rb") as file:
            is_empty = os.fstat(file.fileno()).st_size == 0
            return description, (
                b"" if is_empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        log.error("%s cannot be served: %s", place, error)
        return None


def answer(snapshots: Snapshots, request: ToWeights) -> tuple[FromWeights, list[memoryview]]:
    """The reply to one request."""
    if isinstance(request, GetManifest):
        held = snapshots.get(request.version)
        if held is not None:
            return msgspec.structs.replace(held[0], deltas=snapshots.chain(held[0])), []
    else:
        piece = _block(snapshots, request) if request.is_delta else _chunk(snapshots, request)
        if piece is not None:
            return Chunk(request.version, request.index, request.is_delta), [piece]
    return Gone(request.version, snapshots.latest()), []


def _chunk(snapshots: Snapshots, request: GetChunk) -> memoryview | None:
    held = snapshots.get(request.version)
    if held is None:
        return None
    manifest, data = held
    start = request.index * manifest.chunk_bytes
    if not 0 <= start < manifest.size_bytes:
        return None
    return memoryview(data)[start : start + manifest.chunk_bytes]


def _block(snapshots: Snapshots, request: GetChunk) -> memoryview | None:
    held = snapshots.delta(request.version)
    if held is None or not 0 <= request.index < len(held[0].sizes):
        return None
    delta, data = held
    start = sum(delta.sizes[: request.index])
    return memoryview(data)[start : start + delta.sizes[request.index]]


@click.command()
@click.option(
    "--directory", type=click.Path(path_type=Path), required=True, help="Folder of snapshots."
)
@click.option("--listen", required=True, help="Endpoint to bind.")
@click.option(
    "--endpoint-file",
    type=click.Path(path_type=Path),
    required=True,
    help="Where to write the endpoint.",
)
@click.option("--parent", type=int, required=True, help="Process that this one must not outlive.")
def main(directory: Path, listen: str, endpoint_file: Path, parent: int) -> None:
    """Serve snapshots until told to stop."""
    die_with_parent(parent)
    start_logging("prefixrl-weights")
    stop = stop_event()
    with exit_codes():
        server: Server[ToWeights, FromWeights] = Server(
            listen, ToWeights, queue_messages=QUEUE_MESSAGES
        )
        write_atomically(endpoint_file, server.endpoint)
        snapshots = Snapshots(directory)
        while not stop.is_set():
            try:
                received = server.receive(0.2)
            except Malformed:
                continue
            if received is None:
                continue
            peer, request, _ = received
            message, payload = answer(snapshots, request)
            try:
                server.send(peer, message, payload)
            except Undeliverable:
                continue  # the worker is gone or does not read; it asks again
        server.close()


if __name__ == "__main__":
    main()
