"""The fetching of published weights while the engine works: piece by piece, all or nothing.

    manifest ─▶ pieces of the snapshot, or of the deltas from the one held ─▶ staged in memory, checked as they come ─▶
    take_snapshot()

A version is handed out with every checksum proved, or asked for again and counted: damaged bytes are thrown away and
all of them pulled again, pieces that arrived before a connection was lost are kept.
"""

import contextlib
import logging
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from prefixrl.common.errors import PeerLost, PrefixRLError
from prefixrl.common.host.process import keep_receive_buffers
from prefixrl.common.weights.memory import Memory, MemoryFiles
from prefixrl.common.weights.snapshot import BadSnapshot, Snapshot, check_manifest
from prefixrl.common.wire.address import Address, beside
from prefixrl.common.wire.keys import ClientKey
from prefixrl.common.wire.messages.weights import (
    Chunk,
    FromWeights,
    GetManifest,
    Gone,
    Manifest,
    ToWeights,
)
from prefixrl.common.wire.messages.worker import Welcome
from prefixrl.common.wire.transport import Client, Malformed
from prefixrl.rollout.host import HostShare
from prefixrl.rollout.staging import Staging

log = logging.getLogger(__name__)

WeightsClient = Client[FromWeights, ToWeights]

WINDOW_BYTES = 16 * 2**20
"""Bytes asked for ahead of what is being received."""
WINDOW_PIECES = 32
ANSWER_S = 5.0
ASK_AGAIN_S = 0.2
DRAIN_S = 60.0
"""Time between looks at a connection that nothing goes over."""
DAMAGED_PULLS_ALLOWED = 3
USELESS_ANSWERS_ALLOWED = 100
"""Useless answers in a row; more than the pieces under way when a pull is given up."""
NOTHING = -1, ""
"""Version and digest before anything is fetched."""


@dataclass
class PullCounts:
    """Counts of pulls by outcome."""

    full: int = 0
    delta: int = 0
    from_host: int = 0
    """Versions that another rollout of this host had pulled."""
    wire_bytes: int = 0
    """Bytes of pieces, those of given-up pulls included."""
    retries: int = 0
    """Number of pulls that did not end with a version."""
    damaged: int = 0
    """Number of pulls in which bytes or the manifest were wrong."""
    pull_s: float = 0.0
    """Time of the pulls that ended with a version."""


class WeightsSource(NamedTuple):
    """The weight server as this process reaches it."""

    endpoint: str
    key: ClientKey | None
    """None at the local endpoint, which needs none."""

    @classmethod
    def from_welcome(cls, welcome: Welcome, broker: Address) -> "WeightsSource":
        """Choose the local endpoint where it is this user's, on this host; else the encrypted way."""
        # Without encryption the bytes come nearly three times as fast (benchmarks/weight_transfer.py).
        local = Path(welcome.local_weights_endpoint.removeprefix("ipc://"))
        with contextlib.suppress(OSError):  # another user's folder, or none of this host
            if (
                welcome.local_weights_endpoint
                and local.is_socket()
                and local.stat().st_uid == os.geteuid()
            ):
                log.info("weights come through the local endpoint %s", local)
                return cls(welcome.local_weights_endpoint, None)
        endpoint = beside(welcome.weights_endpoint, broker.endpoint)
        log.info("weights come encrypted from %s", endpoint)
        return cls(endpoint, broker.key)


class Fetcher:
    """Background fetcher: `want_version` names a version, `take_snapshot` returns the newest complete one."""

    def __init__(self, source: WeightsSource, host: HostShare | None = None) -> None:
        """Share versions with the other rollouts of `host`, by default all of this user here."""
        self._source = source
        self._wanted = self._have = NOTHING
        self._served = NOTHING
        """Weights that were wanted when the newest version came: the server may have had a newer one."""
        self._changed = threading.Event()
        self._staged = queue.SimpleQueue[Snapshot]()
        self._failure: BaseException | None = None
        self._damaged_in_a_row = self._useless_in_a_row = 0
        self._must_pull = False
        """True if versions that other rollouts pulled are not to be trusted either."""
        self._files = MemoryFiles()
        self._host = HostShare() if host is None else host
        self._held: Snapshot | None = None
        self._staging: Staging | None = None
        """A pull that was interrupted."""
        self.counts = PullCounts()
        keep_receive_buffers()
        threading.Thread(target=self._run, name="weights", daemon=True).start()

    def want_version(self, version: int, digest: str) -> None:
        """Fetch these weights unless they are fetched; a resumed learner publishes a version again."""
        is_another = version == self._wanted[0] and digest != self._wanted[1]
        if version > self._wanted[0] or is_another:
            self._wanted = version, digest
            self._changed.set()

    def use(self, source: WeightsSource) -> None:
        """Fetch from this weight server from now on."""
        self._wanted = self._have  # what the former server announced may not be there (yet)
        self._source = source

    def again(self) -> None:
        """Fetch all of the wanted version again: the one fetched last proved bad."""
        self._held = None
        self._must_pull = True
        self._have = self._served = NOTHING
        self._changed.set()

    def take_snapshot(self) -> Snapshot | None:
        """Return the newest complete snapshot since the last call; raises the error that ended the thread."""
        if self._failure is not None:
            raise self._failure
        newest = None
        while not self._staged.empty():
            newest = self._staged.get_nowait()
        return newest

    def _run(self) -> None:
        client: WeightsClient | None = None
        try:
            while True:
                while not self._changed.wait(DRAIN_S):
                    if client is not None:
                        client.drain()
                self._changed.clear()
                # After a restart the weight server may be at another endpoint.
                if client is None or client.endpoint != self._source.endpoint:
                    if client is not None:
                        client.close()
                    client = Client(
                        self._source.endpoint,
                        FromWeights,
                        secrets.token_hex(8).encode(),
                        self._source.key,
                    )
                version_digest = self._wanted
                is_missing = (
                    version_digest not in (self._have, self._served)
                    and version_digest[0] >= self._have[0]
                )
                if is_missing and not self._fetch(client, version_digest):
                    self._changed.set()  # try again: the version or the server may be another one by then
        except BaseException as error:
            # Raised in `take_snapshot`: a rollout that never saw it would stay at its version for ever.
            if not isinstance(error, PrefixRLError):
                log.exception("fetching weights from %s failed", self._source.endpoint)
            self._failure = error
        finally:
            if client is not None:
                client.close()
            self._files.close()

    def _fetch(self, client: WeightsClient, version_digest: tuple[int, str]) -> bool:
        """Try once; raises PeerLost when a version arrived damaged too often."""
        started_s = time.monotonic()
        try:
            snapshot = self._held = self._shared_pull(client, version_digest[0])
        except (BadSnapshot, Malformed, PeerLost, OSError) as error:
            self.counts.retries += 1
            if isinstance(error, BadSnapshot | Malformed):
                self._discard_damaged(version_digest[0], error)
            else:
                log.warning("weights of version %d: %s; asking again", version_digest[0], error)
            time.sleep(ASK_AGAIN_S)
            return False
        # Only a whole version clears this: after a lost connection the pieces that came stay.
        self._staging = None
        self._damaged_in_a_row = 0
        self._must_pull = False
        self.counts.pull_s += time.monotonic() - started_s
        self._have = (snapshot.manifest.version, snapshot.manifest.digest)
        # The server may have sent a newer version: then the wanted one is not asked for again.
        self._served = version_digest
        self._staged.put(snapshot)
        return True

    def _discard_damaged(self, version: int, error: Exception) -> None:
        """Discard everything pulled, so that the next pull is a full one; PeerLost after too many."""
        self._staging = self._held = None
        self.counts.damaged += 1
        self._damaged_in_a_row += 1
        times = self._damaged_in_a_row
        log.warning("pull %d of version %d failed: %s", times, version, error)
        if times >= DAMAGED_PULLS_ALLOWED:
            raise PeerLost(
                f"version {version} arrived damaged {times} times in a row: {error}"
            ) from None

    def _shared_pull(self, client: WeightsClient, version: int) -> Snapshot:
        """Return `version`, or the newest one where that is gone, pulled here or by another rollout."""
        manifest = self._manifest(client, version)
        check_manifest(manifest)
        memories: list[Memory] = []

        def is_there() -> bool:
            memory = (
                None
                if self._must_pull
                else self._host.find_memory(manifest.digest, manifest.size_bytes)
            )
            memories.extend([memory] if memory is not None else [])
            return bool(memories)

        # One rollout of a host pulls a version; the others wait for it in shared memory.
        with self._host.turn(manifest.digest, is_there) as alive:
            if memories or is_there():
                self._staging = None
                self.counts.from_host += 1
                return Snapshot(manifest, memories[0])
            staging = self._pull(client, manifest, alive)
            snapshot = staging.finish()
            # Only once it is whole and verified: the others take it as it is.
            self._host.announce(manifest.digest, snapshot.memory)
        self.counts.delta += bool(staging.chain)
        self.counts.full += not staging.chain
        return snapshot

    def _pull(
        self, client: WeightsClient, manifest: Manifest, alive: Callable[[], None]
    ) -> Staging:
        # An interrupted pull of the same bytes goes on.
        if self._staging is None or self._staging.manifest != manifest:
            self._staging = None  # frees its memory for the next one
            memory = self._files.take_memory(manifest.size_bytes)
            self._staging = Staging(manifest, memory, self._held)
        staging = self._staging
        to_ask = staging.missing()
        under_way = dict[int, int]()
        while not staging.is_complete:
            while not under_way or (
                sum(under_way.values()) < WINDOW_BYTES and len(under_way) < WINDOW_PIECES
            ):
                number = next(to_ask, None)
                if number is None:
                    break
                client.send(staging.request(number), timeout_s=ANSWER_S)
                under_way[number] = staging.size_of(number)
            self._receive(client, staging, under_way)
            alive()
        return staging

    def _receive(self, client: WeightsClient, staging: Staging, under_way: dict[int, int]) -> None:
        message, frames = self._answer(client, "chunk")
        if isinstance(message, Gone):
            raise PeerLost(
                f"version {message.version} was superseded by {message.latest} during the pull"
            )
        number = staging.number_of(message) if isinstance(message, Chunk) else None
        if number is not None:  # else an answer to an earlier pull that was given up
            self.counts.wire_bytes += sum(len(frame) for frame in frames)
            if under_way.pop(number, None) is not None:
                self._useless_in_a_row = 0
            staging.put(number, frames)

    def _manifest(self, client: WeightsClient, version: int) -> Manifest:
        client.send(GetManifest(version), timeout_s=ANSWER_S)
        while True:
            match self._answer(client, "manifest")[0]:
                case Manifest() as manifest if manifest.version >= version:
                    self._useless_in_a_row = 0
                    return manifest
                case Gone(gone, latest) if gone == version:
                    if latest <= version:
                        raise PeerLost(f"version {version} is not there (newest: {latest})")
                    version = latest
                    client.send(GetManifest(version), timeout_s=ANSWER_S)

    def _answer(self, client: WeightsClient, what: str) -> tuple[FromWeights, list[memoryview]]:
        """Return the next answer; PeerLost where none comes, BadSnapshot where too many led to nothing."""
        answer = client.receive_views(ANSWER_S)
        if answer is None:
            raise PeerLost(f"no {what} from {self._source.endpoint} for {ANSWER_S:g} s")
        self._useless_in_a_row += 1
        if self._useless_in_a_row > USELESS_ANSWERS_ALLOWED:
            self._useless_in_a_row = 0
            raise BadSnapshot(f"{USELESS_ANSWERS_ALLOWED} answers in a row brought no {what}")
        return answer
