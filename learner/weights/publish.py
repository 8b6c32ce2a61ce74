"""Publication of versions: snapshot and delta to disk, note to the broker, in a thread."""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from prefixrl.common.errors import PeerLost, TrainingFault
from prefixrl.common.seeds import derive
from prefixrl.common.weights.delta import write_delta
from prefixrl.common.weights.folders import prune, versions
from prefixrl.common.weights.snapshot import describe, write_snapshot
from prefixrl.common.wire.address import Address
from prefixrl.common.wire.messages import WeightsNote
from prefixrl.common.wire.packing import pack_logprobs, pack_tokens
from prefixrl.learner.broker.client import BrokerClient

log = logging.getLogger(__name__)

PROBE_TOKENS = 64
KEPT = 2
CHECK_EVERY_S = 0.5
FLUSH_S = 120.0
QUEUED = 2
"""Number of versions that may wait for the disk before the learner is held up."""


def probe_tokens(seed: int, vocabulary: int) -> list[int]:
    """Return the probe's tokens, the same in every version of a run."""
    generator = np.random.Generator(np.random.PCG64(derive(seed, "probe")))
    tokens: list[int] = generator.integers(0, vocabulary, PROBE_TOKENS).tolist()
    return tokens


class Publisher:
    """Rank 0's publisher; it keeps the newest two versions and those pinned by an evaluation."""

    def __init__(
        self,
        address: Address,
        directory: Path,
        probe: list[int],
        deltas: bool = True,
        raise_if_hopeless: Callable[[], None] = lambda: None,
    ) -> None:
        """Call `raise_if_hopeless` while an answer is awaited; it may raise to end the wait."""
        self._address, self._raise_if_hopeless = address, raise_if_hopeless
        self._directory, self._deltas = directory, deltas
        self._probe = pack_tokens(probe)
        self._queue: queue.Queue[tuple[int, dict[str, torch.Tensor], list[float]] | None] = queue.Queue(QUEUED)
        self._failure: BaseException | None = None
        self.newest = -1
        self.digests: dict[int, str] = {}
        """Digests of published versions."""
        self.pinned: frozenset[int] = frozenset()
        """Versions that must stay, besides the newest."""
        self._thread = threading.Thread(target=self._run, name="publish", daemon=True)
        self._thread.start()

    def publish(self, version: int, tensors: dict[str, torch.Tensor], probe_logprobs: list[float]) -> None:
        """Hand over a version; TrainingFault if it is not finite or an earlier one failed."""
        bad = ", ".join([name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()][:3])
        if bad:
            raise TrainingFault(f"version {version} has non-finite weights in {bad}; it is not published")
        while True:
            self.check()
            with contextlib.suppress(queue.Full):  # the disk is slower than training; a dead thread shows in check()
                return self._queue.put((version, tensors, probe_logprobs), timeout=CHECK_EVERY_S)

    def check(self) -> None:
        """Raise TrainingFault when a publication failed, PeerLost when the broker is gone."""
        if self._failure is not None:
            error = PeerLost if isinstance(self._failure, PeerLost) else TrainingFault
            raise error(f"version {self.newest + 1} could not be published: {self._failure}") from self._failure

    def flush(self, version: int) -> None:
        """Wait until `version` is published; TrainingFault when it fails or takes `FLUSH_S`."""
        deadline_s = time.monotonic() + FLUSH_S
        while self.newest < version:
            self.check()
            if time.monotonic() > deadline_s:
                raise TrainingFault(f"version {version} was not published within {FLUSH_S:g} s")
            time.sleep(0.02)

    def close(self) -> None:
        """Finish what was handed over, unless publishing fails or takes longer than `FLUSH_S`."""
        deadline_s = time.monotonic() + FLUSH_S
        # A full queue has no room for the end, and none comes where the thread fails meanwhile.
        while self._thread.is_alive() and time.monotonic() < deadline_s:
            with contextlib.suppress(queue.Full):
                self._queue.put(None, timeout=CHECK_EVERY_S)
                break
        self._thread.join(max(0.0, deadline_s - time.monotonic()))

    def _run(self) -> None:
        try:
            client = BrokerClient(self._address, self._raise_if_hopeless)
            while (item := self._queue.get()) is not None:
                version, tensors, logprobs = item
                manifest = describe(version, tensors)
                write_snapshot(self._directory, manifest, tensors)
                if self._deltas and version - 1 in versions(self._directory):
                    write_delta(self._directory, version - 1, version)
                client.published(WeightsNote(version, manifest.digest, self._probe, pack_logprobs(logprobs)))
                self.digests[version] = manifest.digest
                self.newest = version
                prune(self._directory, {version - back for back in range(KEPT)} | self.pinned)
            client.close()
        except BaseException as error:
            self._failure = error
            log.exception("publication failed")
