"""`python -m prefixrl.learner.weight_server`: serves published snapshots, chunk by chunk, to whoever asks.

It holds no state but open files: a snapshot is its folder (common/weights.py), the publisher writes and prunes folders, a
worker asks for what it lacks.
A slow, stopped or killed worker has at most its own window of chunks queued here and delays nobody.
"""

import mmap
from pathlib import Path

import click
import msgspec

from prefixrl.common.messages import (
    Chunk,
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
from prefixrl.common.snapshots import folder, versions
from prefixrl.common.transport import Malformed, Server, Undeliverable

OPEN_SNAPSHOTS = 3
"""Two and one pinned by an evaluation; older ones are closed when their folder is gone."""


class Snapshots:
    """Manifests and mapped bytes of the snapshots in a folder, opened when first asked for."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: dict[int, tuple[Manifest, mmap.mmap | bytes]] = {}

    def latest(self) -> int:
        """Newest version there, -1 for none."""
        return max(versions(self._directory), default=-1)

    def get(self, version: int) -> tuple[Manifest, mmap.mmap | bytes] | None:
        """Manifest and bytes, or None when the version is not held."""
        if version not in self._open:
            place = folder(self._directory, version)
            try:
                manifest = msgspec.msgpack.decode(
                    (place / "manifest.msgpack").read_bytes(), type=Manifest
                )
                with (place / "weights.bin").open("rb") as file:
                    data = (
                        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                        if manifest.size_bytes
                        else b""
                    )
            except FileNotFoundError:
                return None
            self._open[version] = (manifest, data)
            for old in sorted(self._open)[:-OPEN_SNAPSHOTS]:
                del self._open[old]
        return self._open[version]


def answer(snapshots: Snapshots, request: ToWeights) -> tuple[FromWeights, list[memoryview]]:
    """The reply to one request."""
    held = snapshots.get(request.version)
    if held is None:
        return Gone(request.version, snapshots.latest()), []
    manifest, data = held
    if isinstance(request, GetManifest):
        return manifest, []
    assert isinstance(request, GetChunk)
    start = request.index * manifest.chunk_bytes
    if not 0 <= start < manifest.size_bytes:
        return Gone(request.version, snapshots.latest()), []
    return Chunk(request.version, request.index), [
        memoryview(data)[start : start + manifest.chunk_bytes]
    ]


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
        server: Server[ToWeights, FromWeights] = Server(listen, ToWeights)
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
