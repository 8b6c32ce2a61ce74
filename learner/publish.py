"""Publishes a version: snapshot written, broker told; in a thread of its own, so that the next iteration never waits for it."""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from prefixrl.common.delta import write_delta
from prefixrl.common.errors import PeerLost, TrainingFault
from prefixrl.common.messages import WeightsNote
from prefixrl.common.packing import pack_logprobs, pack_tokens
from prefixrl.common.seeds import derive
from prefixrl.common.snapshots import prune, versions
from prefixrl.common.weights import describe, write_snapshot
from prefixrl.learner.client import BrokerClient

log = logging.getLogger(__name__)

PROBE_TOKENS = 64
KEPT = 2
CHECK_EVERY_S = 0.5
FLUSH_S = 120.0
QUEUED = 2
"""Versions that may wait for the disk; the learner is held up only when it is that far ahead."""


def probe_tokens(seed: int, vocabulary: int) -> list[int]:
    """The tokens by which installed weights are proved: the same in every version of a run."""
    generator = np.random.Generator(np.random.PCG64(derive(seed, "probe")))
    tokens: list[int] = generator.integers(0, vocabulary, PROBE_TOKENS).tolist()
    return tokens


class Publisher:
    """Rank 0's publisher; the newest two versions are kept, and those that an evaluation holds rollouts at."""

    def __init__(
        self,
        endpoint: str,
        directory: Path,
        probe: list[int],
        deltas: bool = True,
        watch: Callable[[], None] = lambda: None,
    ) -> None:
        """`watch`: called while the broker's answer is waited for; may raise what makes waiting useless."""
        self._endpoint = endpoint
        self._watch = watch
        self._deltas = deltas
        self._directory = directory
        self._probe = pack_tokens(probe)
        self._queue: queue.Queue[tuple[int, dict[str, torch.Tensor], list[float]] | None] = (
            queue.Queue(QUEUED)
        )
        self._failure: BaseException | None = None
        self.newest = -1
        self.digests: dict[int, str] = {}
        """Of what was published, by version."""
        self.pinned: frozenset[int] = frozenset()
        """Versions that must stay, besides the newest."""
        self._thread = threading.Thread(target=self._run, name="publish", daemon=True)
        self._thread.start()

    def publish(
        self, version: int, tensors: dict[str, torch.Tensor], probe_logprobs: list[float]
    ) -> None:
        """Hand a version over; raises TrainingFault when its weights are not finite or an earlier publication failed."""
        bad = [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]
        if bad:
            raise TrainingFault(
                f"version {version} has non-finite weights in {', '.join(bad[:3])}; it is not published"
            )
        while True:
            self.check()
            try:
                self._queue.put((version, tensors, probe_logprobs), timeout=CHECK_EVERY_S)
                return
            except queue.Full:
                continue  # the disk is slower than training; a dead thread shows in check()

    def check(self) -> None:
        """Raise TrainingFault when a publication failed, PeerLost when that is because the broker is gone."""
        if self._failure is not None:
            error = PeerLost if isinstance(self._failure, PeerLost) else TrainingFault
            raise error(
                f"version {self.newest + 1} could not be published: {self._failure}"
            ) from self._failure

    def flush(self, version: int) -> None:
        """Wait until `version` is published; raises TrainingFault when it fails or takes longer than `FLUSH_S`."""
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
            client = BrokerClient(self._endpoint, self._watch)
            while (item := self._queue.get()) is not None:
                version, tensors, logprobs = item
                manifest = describe(version, tensors)
                write_snapshot(self._directory, manifest, tensors)
                if self._deltas and version - 1 in versions(self._directory):
                    write_delta(self._directory, version - 1, version)
                client.published(
                    WeightsNote(version, manifest.digest, self._probe, pack_logprobs(logprobs))
                )
                self.digests[version] = manifest.digest
                self.newest = version
                kept = {version - back for back in range(KEPT)}
                prune(self._directory, kept | self.pinned)
            client.close()
        except BaseException as error:
            self._failure = error
            log.exception("publication failed")
