"""Publication of versions: snapshot and delta to disk, note to the broker, in a thread."""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from prefixrl.common.errors import PeerLost, PrefixRLError, TrainingFault
from prefixrl.common.journal.crash_points import crash_point
from prefixrl.common.run.disk import when_there_is_room
from prefixrl.common.weights.delta import write_delta
from prefixrl.common.weights.folders import prune, versions
from prefixrl.common.weights.snapshot import describe, write_snapshot
from prefixrl.common.wire.address import Address
from prefixrl.common.wire.messages.fields import VERSIONS_KEPT
from prefixrl.common.wire.messages.weights import WeightsNote
from prefixrl.common.wire.packing import Logprobs, ProbeRow, pack_logprobs, pack_tokens
from prefixrl.learner.broker.client import BrokerClient
from prefixrl.learner.run.stop import NO_STOP, StopSignal
from prefixrl.learner.weights.copies import HostCopies, HostCopy, not_finite

log = logging.getLogger(__name__)

KEPT = 2
CHECK_EVERY_S = 0.5
FLUSH_S = 120.0
CLOSE_S = 10.0
"""Longest wait at the end of a run for room on the disk, or for an answer: the next start publishes again."""
QUEUED = 2


Tensors = dict[str, torch.Tensor]


class _Handed(NamedTuple):
    """A version on its way to the thread."""

    version: int
    copied: HostCopy
    probe_logprobs: Logprobs
    finish: Callable[[Tensors], Tensors]


class _RunEnd:
    """The end of the run: from then on, the thread waits for disk or broker for `CLOSE_S` only."""

    def __init__(self, stop: StopSignal) -> None:
        self._stop = stop
        self.since_s: float | None = None

    def check(self) -> None:
        """Raise if waiting for disk or broker is useless: the run ended, or the broker is gone."""
        if self.since_s is not None and time.monotonic() - self.since_s > CLOSE_S:
            raise TrainingFault(
                f"the learner ends, and there was no room on the disk, or no answer, for {CLOSE_S:g} s"
            )
        self._stop.check_servers()


class Publisher:
    """Rank 0's publisher; it keeps the newest two versions, and versions pinned by an evaluation."""

    def __init__(
        self,
        address: Address,
        directory: Path,
        probe: Sequence[ProbeRow],
        deltas: bool = True,
        stop: StopSignal = NO_STOP,
    ) -> None:
        """`stop`: its servers end the wait for an answer if they ended for good."""
        self._address = address
        self._directory = directory
        self._deltas = deltas
        self._run_end = _RunEnd(stop)
        self._probe = probe
        self._queue = queue.Queue[_Handed | None](QUEUED)
        self.copies = HostCopies(self)
        self._failure: BaseException | None = None
        self.newest = -1
        self.digests: dict[int, str] = {}
        """Digests of the newest published versions and of pinned versions."""
        self.pinned: frozenset[int] = frozenset()
        """Versions that must stay, besides the newest."""
        self._thread = threading.Thread(target=self._run, name="publish", daemon=True)
        self._thread.start()

    def publish(
        self,
        version: int,
        weights: Iterable[tuple[str, torch.Tensor]],
        probe_logprobs: Logprobs,
        finish: Callable[[Tensors], Tensors] = lambda copied: copied,
    ) -> None:
        """Hand over a copy of weights that may change as soon as this returns; raises TrainingFault."""
        copied, bad = self.copies.copy(weights)
        _refuse(version, bad)
        self._hand_over(_Handed(version, copied, probe_logprobs, finish))

    def _hand_over(self, handed: _Handed) -> None:
        while True:
            self.check()
            with contextlib.suppress(
                queue.Full
            ):  # the disk is slower than training; a dead thread shows in check()
                return self._queue.put(handed, timeout=CHECK_EVERY_S)

    def check(self) -> None:
        """Raise TrainingFault when a publication failed, PeerLost when the broker is gone."""
        if self._failure is not None:
            error = PeerLost if isinstance(self._failure, PeerLost) else TrainingFault
            raise error(
                f"version {self.newest + 1} could not be published: {self._failure}"
            ) from self._failure

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
        now_s = time.monotonic()
        self._run_end.since_s = now_s
        deadline_s = now_s + FLUSH_S
        # A full queue has no room for the end, and none comes where the thread fails meanwhile.
        while self._thread.is_alive() and time.monotonic() < deadline_s:
            with contextlib.suppress(queue.Full):
                self._queue.put(None, timeout=CHECK_EVERY_S)
                break
        self._thread.join(max(0.0, deadline_s - time.monotonic()))

    def _run(self) -> None:
        try:
            client = BrokerClient(self._address, StopSignal(servers=self._run_end))
            while (handed := self._queue.get()) is not None:
                self._publish(client, handed)
            client.close()
        except PrefixRLError as error:
            self._failure = error
            log.error("publication failed: %s", error)
        except BaseException as error:
            self._failure = error
            log.exception("publication failed")

    def _publish(self, client: BrokerClient, handed: _Handed) -> None:
        version = handed.version
        handed.copied.wait()
        tensors = handed.finish(handed.copied.tensors)
        # Check again: tensors made from finite weights, and copies, may not be finite.
        _refuse(version, not_finite(tensors))
        manifest = describe(version, tensors)
        self._write(
            lambda: write_snapshot(self._directory, manifest, tensors),
            f"version {version} of the weights",
        )
        # The copy may be overwritten only now, since the file was written from it.
        handed.copied.release()
        # A delta is for workers that hold the version before; without its file there is no base.
        if self._deltas and version - 1 in versions(self._directory):
            self._write(
                lambda: write_delta(self._directory, version - 1, version),
                f"the delta to version {version}",
            )
        crash_point("version.written")
        # Announced last: a worker that hears of a version asks for its files at once.
        client.published(weights_note(version, manifest.digest, self._probe, handed.probe_logprobs))
        crash_point("version.announced")
        log.info(
            "version %d: %d bytes in %d tensors",
            version,
            manifest.size_bytes,
            len(manifest.tensors),
        )
        # Evaluations that are still open compare digests of earlier versions.
        needed = self.pinned.union(range(version - VERSIONS_KEPT, version))
        older = {each: known for each, known in self.digests.items() if each in needed}
        self.digests = older | {version: manifest.digest}
        self.newest = version
        prune(self._directory, {version - back for back in range(KEPT)} | self.pinned)

    def _write(self, write: Callable[[], object], what: str) -> None:
        when_there_is_room(write, self._directory, what, self._run_end.check)


def weights_note(
    version: int, digest: str, rows: Sequence[ProbeRow], logprobs: Logprobs
) -> WeightsNote:
    """Return the announcement of a version with its probe."""
    tokens = np.concatenate([part for row in rows for part in row])
    sizes = tuple((given.size, scored.size) for given, scored in rows)
    # A token that is as good as certain may be rounded to more than that.
    packed = pack_logprobs(np.minimum(logprobs, np.float32(0.0)))
    return WeightsNote(version, digest, pack_tokens(tokens), packed, sizes)


def _refuse(version: int, bad: list[str]) -> None:
    if bad:
        names = ", ".join(bad[:3])
        raise TrainingFault(
            f"version {version} has non-finite weights in {names}; it is not published"
        )
