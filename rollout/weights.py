"""Fetches published weights in the background while the engine works: chunk by chunk, verified, whole or not at all."""

import logging
import queue
import secrets
import threading
import time

import torch

from prefixrl.common.errors import PeerLost, PrefixRLError
from prefixrl.common.messages import (
    Chunk,
    FromWeights,
    GetChunk,
    GetManifest,
    Gone,
    Manifest,
    ToWeights,
)
from prefixrl.common.transport import Client, Malformed
from prefixrl.common.weights import BadSnapshot, check_manifest, rebuild

log = logging.getLogger(__name__)

WINDOW_CHUNKS = 4
"""Chunks asked for ahead of the one being received."""
ANSWER_S = 5.0
ASK_AGAIN_S = 0.2
DAMAGED_PULLS_ALLOWED = 3


class Fetcher:
    """Give it the version to have (`want`), take the newest complete one (`take`); older ones are skipped, not queued."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._wanted = -1
        self._have = -1
        self._changed = threading.Event()
        self._staged: queue.SimpleQueue[tuple[Manifest, dict[str, torch.Tensor]]] = (
            queue.SimpleQueue()
        )
        self._failure: PrefixRLError | None = None
        self._damaged = 0
        self.retries = 0
        threading.Thread(target=self._run, name="weights", daemon=True).start()

    def want(self, version: int) -> None:
        """Fetch this version unless it is fetched already."""
        if version > self._wanted:
            self._wanted = version
            self._changed.set()

    def use(self, endpoint: str) -> None:
        """Fetch from this weight server from now on."""
        self._wanted = self._have  # what the former server announced may not be there (yet)
        self._endpoint = endpoint

    def again(self) -> None:
        """The version fetched last proved bad: fetch the wanted one anew."""
        self._have = -1
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
                    client = Client(self._endpoint, FromWeights, secrets.token_bytes(8))
                if self._have < self._wanted and not self._fetch(client):
                    self._changed.set()  # ask again, perhaps for a newer version, perhaps elsewhere
        except PrefixRLError as error:
            self._failure = error
        finally:
            if client is not None:
                client.close()

    def _fetch(self, client: Client[FromWeights, ToWeights]) -> bool:
        """One try; raises PeerLost when a version arrived damaged too often."""
        try:
            manifest, tensors = self._pull(client, self._wanted)
        except (BadSnapshot, Malformed) as error:
            self.retries += 1
            self._damaged += 1
            log.warning("pull %d of version %d failed: %s", self._damaged, self._wanted, error)
            if self._damaged >= DAMAGED_PULLS_ALLOWED:
                times = f"{self._damaged} times in a row"
                raise PeerLost(f"version {self._wanted} arrived damaged {times}: {error}") from None
            return False
        except PeerLost as error:
            self.retries += 1
            log.warning("weights of version %d: %s; asking again", self._wanted, error)
            time.sleep(ASK_AGAIN_S)
            return False
        self._damaged = 0
        self._have = manifest.version
        self._staged.put((manifest, tensors))
        return True

    def _pull(
        self, client: Client[FromWeights, ToWeights], version: int
    ) -> tuple[Manifest, dict[str, torch.Tensor]]:
        """One whole snapshot: of `version`, or of the newest one where that is gone already."""
        manifest = self._manifest(client, version)
        check_manifest(manifest)
        chunks = -(-manifest.size_bytes // manifest.chunk_bytes)
        data, asked = bytearray(manifest.size_bytes), 0
        received: set[int] = set()
        while len(received) < chunks:
            while asked < min(chunks, len(received) + WINDOW_CHUNKS):
                client.send(GetChunk(manifest.version, asked), timeout_s=ANSWER_S)
                asked += 1
            answer = client.receive(ANSWER_S)
            if answer is None:
                raise PeerLost(f"no chunk from {self._endpoint} for {ANSWER_S:g} s")
            message, frames = answer
            if isinstance(message, Gone):
                raise PeerLost(
                    f"version {message.version} was superseded by {message.latest} during the pull"
                )
            if not isinstance(message, Chunk) or message.version != manifest.version:
                continue  # an answer to an earlier pull that was given up
            start = message.index * manifest.chunk_bytes
            size = min(manifest.chunk_bytes, manifest.size_bytes - start)
            if len(frames) != 1 or len(frames[0]) != size or message.index >= chunks:
                raise BadSnapshot(
                    f"chunk {message.index} holds {[len(frame) for frame in frames]} bytes, expected {size}"
                )
            data[start : start + size] = frames[0]
            received.add(message.index)
        return manifest, rebuild(manifest, data)

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
