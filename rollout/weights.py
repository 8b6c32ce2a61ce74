"""Fetches published weights in the background while the engine works: piece by piece, verified, whole or not at all.

    manifest ─▶ pieces of the snapshot, or of the deltas from the one held ─▶ staged in memory, checked as they come ─▶ take()

Whatever goes wrong, a version is handed out with every checksum proved, or it is asked for again and counted: damaged bytes are
thrown away and all of them pulled anew, pieces that arrived before a connection was lost are kept.
"""

import logging
import queue
import secrets
import threading
import time
from dataclasses import dataclass

import torch

from prefixrl.common.errors import PeerLost, PrefixRLError
from prefixrl.common.memory_file import MemoryFiles
from prefixrl.common.messages import (
    Chunk,
    FromWeights,
    GetManifest,
    Gone,
    Manifest,
    ToWeights,
)
from prefixrl.common.transport import Client, Malformed, keep_receive_buffers
from prefixrl.common.weights import BadSnapshot, check_manifest
from prefixrl.rollout.staging import Held, Staging

log = logging.getLogger(__name__)

WINDOW_BYTES = 16 * 2**20
"""Asked for ahead of what is being received."""
WINDOW_PIECES = 32
ANSWER_S = 5.0
ASK_AGAIN_S = 0.2
DAMAGED_PULLS_ALLOWED = 3
NOTHING = -1, ""
"""Version and digest of no weights."""


@dataclass
class Counts:
    """What became of pulls."""

    full: int = 0
    delta: int = 0
    wire_bytes: int = 0
    """Of pieces, those of given-up pulls included."""
    retries: int = 0
    """Pulls that did not end with a version, for whatever reason."""
    damaged: int = 0
    """Those of them in which bytes or the manifest were wrong."""
    pull_s: float = 0.0
    """Time of the pulls that did."""


class Fetcher:
    """Give it the version to have (`want`), take the newest complete one (`take`); older ones are skipped, not queued."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._wanted = self._have = NOTHING
        self._served = NOTHING
        """What was wanted when the newest version came: the server may have gone on meanwhile."""
        self._changed = threading.Event()
        self._staged: queue.SimpleQueue[tuple[Manifest, dict[str, torch.Tensor]]] = (
            queue.SimpleQueue()
        )
        self._failure: BaseException | None = None
        self._damaged_in_a_row = 0
        self._files = MemoryFiles()
        self._held: Held | None = None
        self._staging: Staging | None = None
        """A pull that was interrupted."""
        self.counts = Counts()
        keep_receive_buffers()
        threading.Thread(target=self._run, name="weights", daemon=True).start()

    @property
    def retries(self) -> int:
        """Pulls that were given up."""
        return self.counts.retries

    def want(self, version: int, digest: str) -> None:
        """Fetch these weights unless they are fetched already; a learner that went back publishes a version anew."""
        is_another = version == self._wanted[0] and digest != self._wanted[1]
        if version > self._wanted[0] or is_another:
            self._wanted = version, digest
            self._changed.set()

    def use(self, endpoint: str) -> None:
        """Fetch from this weight server from now on."""
        self._wanted = self._have  # what the former server announced may not be there (yet)
        self._endpoint = endpoint

    def again(self) -> None:
        """The version fetched last proved bad: fetch all of the wanted one anew."""
        self._held = None
        self._have = self._served = NOTHING
        self._changed.set()

    def take(self) -> tuple[Manifest, dict[str, torch.Tensor]] | None:
        """The newest complete snapshot since the last call; raises what ended the fetching."""
        if self._failure is not None:
            raise self._failure
        newest = None
        while not self._staged.empty():
            newest = self._staged.get_nowait()
        return newest

    def _run(self) -> None:
        client: Client[FromWeights, ToWeights] | None = None
        try:
            while True:
                self._changed.wait()
                self._changed.clear()
                if client is None or client.endpoint != self._endpoint:
                    if client is not None:
                        client.close()
                    client = Client(self._endpoint, FromWeights, secrets.token_hex(8).encode())
                if self._is_missing(wanted := self._wanted) and not self._fetch(client, wanted):
                    self._changed.set()  # ask again, perhaps for a newer version, perhaps elsewhere
        except BaseException as error:
            # Unseen, it would leave a rollout at its version for ever.
            if not isinstance(error, PrefixRLError):
                log.exception("fetching weights from %s failed", self._endpoint)
            self._failure = error
        finally:
            if client is not None:
                client.close()
            self._files.close()

    def _is_missing(self, wanted: tuple[int, str]) -> bool:
        return wanted not in (self._have, self._served) and wanted[0] >= self._have[0]

    def _fetch(self, client: Client[FromWeights, ToWeights], wanted: tuple[int, str]) -> bool:
        """One try; raises PeerLost when a version arrived damaged too often."""
        started_s = time.monotonic()
        try:
            staging = self._pull(client, wanted[0])
            self._held, tensors = staging.finish()
        except (BadSnapshot, Malformed) as error:
            self._give_up_damaged(wanted[0], error)
            return False
        except (PeerLost, OSError) as error:
            self.counts.retries += 1
            log.warning("weights of version %d: %s; asking again", wanted[0], error)
            time.sleep(ASK_AGAIN_S)
            return False
        self._damaged_in_a_row = 0
        self._staging = None
        if staging.chain:
            self.counts.delta += 1
        else:
            self.counts.full += 1
        self.counts.pull_s += time.monotonic() - started_s
        self._have, self._served = (staging.manifest.version, staging.manifest.digest), wanted
        self._staged.put((staging.manifest, tensors))
        return True

    def _give_up_damaged(self, version: int, error: Exception) -> None:
        """The next pull is a full one: nothing that stands here is relied on."""
        self._staging = self._held = None
        self.counts.retries += 1
        self.counts.damaged += 1
        self._damaged_in_a_row += 1
        times = self._damaged_in_a_row
        log.warning("pull %d of version %d failed: %s", times, version, error)
        if times >= DAMAGED_PULLS_ALLOWED:
            raise PeerLost(
                f"version {version} arrived damaged {times} times in a row: {error}"
            ) from None
        time.sleep(ASK_AGAIN_S)

    def _pull(self, client: Client[FromWeights, ToWeights], version: int) -> Staging:
        """All pieces of `version`, or of the newest one where that is gone already."""
        manifest = self._manifest(client, version)
        check_manifest(manifest)
        staging = self._resumed(manifest)
        to_ask, under_way = staging.missing(), dict[int, int]()
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
        return staging

    def _resumed(self, manifest: Manifest) -> Staging:
        """What an interrupted pull of the same bytes left, else a fresh start."""
        begun = self._staging
        if begun is not None and begun.manifest == manifest:
            return begun
        self._staging = None  # its memory serves again
        memory = self._files.take(manifest.size_bytes)
        self._staging = Staging(manifest, memory, self._held)
        return self._staging

    def _receive(
        self, client: Client[FromWeights, ToWeights], staging: Staging, under_way: dict[int, int]
    ) -> None:
        answer = client.receive_views(ANSWER_S)
        if answer is None:
            raise PeerLost(f"no chunk from {self._endpoint} for {ANSWER_S:g} s")
        message, frames = answer
        if isinstance(message, Gone):
            raise PeerLost(
                f"version {message.version} was superseded by {message.latest} during the pull"
            )
        number = staging.number_of(message) if isinstance(message, Chunk) else None
        if number is None:
            return  # an answer to an earlier pull that was given up
        self.counts.wire_bytes += sum(len(frame) for frame in frames)
        under_way.pop(number, None)
        staging.put(number, frames)

    def _manifest(self, client: Client[FromWeights, ToWeights], version: int) -> Manifest:
        client.send(GetManifest(version), timeout_s=ANSWER_S)
        while True:
            answer = client.receive(ANSWER_S)
            if answer is None:
                raise PeerLost(f"no manifest from {self._endpoint} for {ANSWER_S:g} s")
            match answer[0]:
                case Manifest() as manifest if manifest.version >= version:
                    return manifest
                case Gone(gone, latest) if gone == version:
                    if latest <= version:
                        raise PeerLost(f"version {version} is not there (newest: {latest})")
                    version = latest
                    client.send(GetManifest(version), timeout_s=ANSWER_S)
                case _:
                    continue
