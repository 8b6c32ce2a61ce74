"""The weight server: serves published snapshots and deltas, chunk by chunk, on request.

A slow, stopped or killed worker has at most its own window of chunks queued here and delays no other.
"""

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from prefixrl.common.errors import is_crowded
from prefixrl.common.host.process import write_atomically
from prefixrl.common.host.serving import run
from prefixrl.common.weights.folders import (
    DELTAS_KEPT,
    Mapped,
    delta_folder,
    folder,
    read_mapped,
    versions,
)
from prefixrl.common.wire.address import REBIND_S, bound_within
from prefixrl.common.wire.keys import server_keys
from prefixrl.common.wire.messages.weights import (
    Chunk,
    Delta,
    FromWeights,
    GetChunk,
    GetManifest,
    Gone,
    Manifest,
    ToWeights,
)
from prefixrl.common.wire.transport import Malformed, Server, Undeliverable, Unlisted

log = logging.getLogger(__name__)

OPEN_DELTAS = DELTAS_KEPT + 1
OPEN_SNAPSHOTS = 3
"""The newest two and one pinned by an evaluation."""
QUEUE_MESSAGES = 64
"""Answers that may wait for one worker, twice a worker's own window; as views of mapped files they take no memory,
but for the one that is being encrypted."""
T = TypeVar("T", Manifest, Delta)


class Snapshots:
    """Manifests and mapped bytes of snapshots and deltas in a folder, opened at first use."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: dict[int, tuple[Manifest, Mapped]] = {}
        self._deltas: dict[int, tuple[Delta, Mapped]] = {}

    def latest(self) -> int:
        """Return the newest version there, -1 without any."""
        return max(versions(self._directory), default=-1)

    def get(self, version: int) -> tuple[Manifest, Mapped] | None:
        """Return manifest and bytes, None when the version is not held or cannot be read."""
        return _opened_files(
            self._open, version, OPEN_SNAPSHOTS, folder(self._directory, version), Manifest
        )

    def delta(self, version: int) -> tuple[Delta, Mapped] | None:
        """Return the delta that leads to a version, or None when it is not held."""
        return _opened_files(
            self._deltas,
            version,
            OPEN_DELTAS,
            delta_folder(self._directory, version),
            Delta,
        )

    def chain(self, manifest: Manifest) -> tuple[Delta, ...]:
        """Return the deltas that lead to a snapshot without a gap, oldest first."""
        deltas: list[Delta] = []
        digest, version = manifest.digest, manifest.version
        while (entry := self.delta(version)) is not None and entry[0].digest == digest:
            deltas.insert(0, entry[0])
            digest, version = entry[0].base_digest, version - 1
        return tuple(deltas)

    def piece(self, request: GetChunk) -> memoryview | None:
        """Return a chunk of a snapshot or a block of a delta, None when it is not held."""
        version, index = request.version, request.index
        entry = self.delta(version) if request.is_delta else self.get(version)
        if entry is None:
            return None
        head, data = entry
        if isinstance(head, Delta):
            if not 0 <= index < len(head.sizes):
                return None
            start, size = sum(head.sizes[:index]), head.sizes[index]
        else:
            start, size = index * head.chunk_bytes, head.chunk_bytes
            if not 0 <= start < head.size_bytes:
                return None
        return memoryview(data)[start : start + size]


def _opened_files(
    opened: dict[int, tuple[T, Mapped]], version: int, keep: int, path: Path, kind: type[T]
) -> tuple[T, Mapped] | None:
    """Return the open files of a version; open them if necessary. The newest others stay open."""
    if version not in opened:
        try:
            opened[version] = read_mapped(path, kind)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            if is_crowded(error):
                raise
            log.error("%s cannot be served: %s", path, error)
            return None
    # Never close the requested version: a pinned old one would be opened again for every chunk.
    for old in sorted(opened.keys() - {version})[: 1 - keep]:
        del opened[old]
    return opened[version]


def answer(snapshots: Snapshots, request: ToWeights) -> tuple[FromWeights, list[memoryview]]:
    """Return the reply to one request."""
    if isinstance(request, GetManifest):
        if (entry := snapshots.get(request.version)) is not None:
            return msgspec.structs.replace(entry[0], deltas=snapshots.chain(entry[0])), []
    elif (piece := snapshots.piece(request)) is not None:
        return Chunk(request.version, request.index, request.is_delta), [piece]
    return Gone(request.version, snapshots.latest()), []


class WeightServerStart(msgspec.Struct, frozen=True):
    """Options of a weight server's start; its directory holds the snapshots."""

    run: str
    """Run directory with the keys."""
    listen: str
    endpoint_file: str
    """File for the endpoint that it got."""
    local_endpoint: str = ""
    """Endpoint for this host, in a folder of this user alone."""
    is_restart: bool = False
    """True where an earlier one died, whose port may be taken for a moment."""


def main(directory: Path, start: WeightServerStart, is_stopped: Callable[[], bool]) -> None:
    """Serve snapshots until stopped."""
    keys = server_keys(Path(start.run), "worker")

    def bind() -> Server[ToWeights, FromWeights]:
        return Server(start.listen, ToWeights, keys, QUEUE_MESSAGES, start.local_endpoint)

    server = bound_within(REBIND_S if start.is_restart else 0.0, bind)
    server.shut()
    write_atomically(Path(start.endpoint_file), server.endpoint)
    snapshots = Snapshots(directory)
    while not is_stopped():
        # Undeliverable: the worker is gone, or does not read and asks again. Unlisted: the broker sends the reason.
        with contextlib.suppress(Malformed, Undeliverable, Unlisted):
            if (received := server.receive(0.2, lambda peer: False)) is not None:
                try:
                    server.send(received[0], *answer(snapshots, received[1]))
                except OSError as error:  # of a folder or a file; the worker asks again
                    log.error("no answer to %s: %s", type(received[1]).__name__, error)
    server.close()


if __name__ == "__main__":
    run("prefixrl-weights", WeightServerStart, main)
