"""The versions that a rollout stages, installs and proves: messages in, messages out.

The other half is `learner/broker/workers/versions.py`: the same steps by the same names, with the picture.
"""

import logging
from collections.abc import Callable, Collection
from typing import Literal

import msgspec

from prefixrl.common.engines.interface.base import AdapterEngine
from prefixrl.common.errors import Refusal
from prefixrl.common.weights.snapshot import Snapshot
from prefixrl.common.wire.messages.fields import UNPROVED
from prefixrl.common.wire.messages.weights import EngineChecksum, PreviousProof, Proof, WeightsNote
from prefixrl.common.wire.messages.worker import Installed, PrefixTask, Staged
from prefixrl.common.wire.packing import pack_logprobs, probe_rows, token_ids

log = logging.getLogger(__name__)

OFFER_AGAIN_S = 1.0
REFUSALS_ALLOWED = 3


class WeightSwap:
    """The installed version, its successor, and the messages about them."""

    def __init__(self, digest: str, mode: Literal["drain", "in_flight"]) -> None:
        """Take the digest of the weights that the engine started with, version 0."""
        self.version = 0
        self.digest = digest
        self.is_proved = True
        self.digest_of = {0: digest}
        """Digest of every version that open tasks may have tokens of."""
        self._mode = mode
        self._latest: WeightsNote | None = None
        self.staged: Snapshot | None = None
        """Fetched version that waits to be installed."""
        self._offer_s = self._proof_s = 0.0
        self.is_granted = False
        """True from the broker's Swap to the installation."""
        self._proof: Installed | None = None
        self._before: PreviousProof | None = None
        """The version that was proved last, scored with the present probe."""
        self._probe: tuple[bytes, tuple[tuple[int, int], ...]] = b"", ()
        self._checksum = ""
        """Checksum of the weights before the installed version, "" where it was not made."""
        self._wants_checksum = True
        """True until a version is proved by its logprobs: the probe may show no change."""
        self._refusals = 0

    def ready(self) -> int:
        """Return the version to claim in Ready: UNPROVED until it is proved, then the probe follows."""
        self._proof_s = 0.0
        return self.version if self.is_proved else UNPROVED

    def news(self, note: WeightsNote) -> bool:
        """Take an announcement; False for the installed weights or an older version."""
        is_news = note.version > self.version or (
            note.version == self.version and note.digest != self.digest
        )
        self._latest = note if is_news else self._latest
        return is_news

    def stage(self, snapshot: Snapshot | None) -> None:
        """Take a snapshot that was fetched since the last call."""
        self.staged = snapshot or self.staged

    def offer(self, now_s: float) -> Staged | None:
        """Return the offer of the staged version when it is time to send it."""
        # It is repeated until it is granted: the broker may have been restarted, or its Swap lost, in between.
        if self.staged is None or now_s < self._offer_s:
            return None
        self._offer_s = now_s + OFFER_AGAIN_S
        return Staged(self.staged.version)

    def due(self, open_tasks: Collection[PrefixTask]) -> Snapshot | None:
        """Return the snapshot to install now, once; None where there is none or a task forbids it."""
        if not self.is_granted or not self._may_install(open_tasks):
            return None
        self.is_granted = False
        snapshot = self.staged
        self.staged = None
        if snapshot is not None:
            self._offer_s = 0.0
        return snapshot

    def _may_install(self, open_tasks: Collection[PrefixTask]) -> bool:
        """Return True if open tasks allow it; after a new Hello the broker may not know them."""
        is_anew = self.staged is not None and self.staged.version == self.version
        if self._mode == "drain" or is_anew:
            # Spans name versions, not digests: tasks of two digests of one version must not overlap.
            return not open_tasks
        return all(task.kind == "train" for task in open_tasks)

    def install(
        self, engine: AdapterEngine, snapshot: Snapshot, open_tasks: Collection[PrefixTask]
    ) -> bool:
        """Install a version and score the probe; False where it does not fit; raises Refusal."""
        assert self._latest is not None
        probe = self._latest.probe_tokens, self._latest.probe_rows
        rows = probe_rows(token_ids(probe[0]), probe[1])
        # The change is measured from the version that was proved last, by the same probe.
        if self.is_proved and self._probe != probe:
            self._probe = probe
            self._before = PreviousProof(
                self.version, self.digest, pack_logprobs(engine.score(rows))
            )
        # Before the installation: afterwards it could not be told whether the weights changed.
        if self.is_proved and self._wants_checksum and not self._checksum:
            self._checksum = engine.checksum().value
        try:
            engine.install(snapshot)
        except ValueError as error:
            self._refusals += 1
            failed = f"version {snapshot.version} could not be installed {self._refusals} times in a row: {error}"
            log.warning(
                "version %d cannot be installed: %s; fetching again", snapshot.version, error
            )
            if self._refusals >= REFUSALS_ALLOWED:
                raise Refusal(failed) from None
            return False
        self._refusals = 0
        self.version = snapshot.version
        self.digest = snapshot.manifest.digest
        # Tokens of open tasks may be of any version since their start: each needs its digest.
        oldest = min((task.version for task in open_tasks), default=self.version)
        known_digests = {each: digest for each, digest in self.digest_of.items() if each >= oldest}
        self.digest_of = known_digests | {self.version: self.digest}
        # Until the broker has judged the probe, nothing that these weights write is delivered.
        self.is_proved = False
        self._proof = Installed(
            self.version, self.digest, pack_logprobs(engine.score(rows)), self._before
        )
        self._proof_s = 0.0
        if self._wants_checksum:
            self.unclear(engine.checksum)
        return True

    def unclear(self, checksum: Callable[[], EngineChecksum]) -> None:
        """Add the checksum of the installed weights to the proof and send it again, once."""
        if not self.is_proved and self._proof is not None and self._proof.checksum is None:
            checksummed = msgspec.structs.replace(checksum(), before=self._checksum)
            self._proof = msgspec.structs.replace(self._proof, checksum=checksummed)
            self._proof_s = 0.0

    def proof(self, now_s: float) -> Installed | None:
        """Return the probe when it is time to send it."""
        # It is repeated until the broker answers: one that was restarted may not know the version yet.
        if self.is_proved or self._proof is None or now_s < self._proof_s:
            return None
        self._proof_s = now_s + OFFER_AGAIN_S
        return self._proof

    def proved(self, by: Proof | None = None) -> None:
        """Record that the installed version is proved; `by` is None without the broker's Probed."""
        if self._proof is not None and not self.is_proved:
            proof = self._proof
            self._before = PreviousProof(proof.version, proof.digest, proof.probe_logprobs)
            self._checksum = proof.checksum.value if proof.checksum else ""
        if by is not None:
            self._wants_checksum = by == "checksum"
        self.is_proved = True

    def failed(self) -> None:
        """Drop what is staged and the probe: the engine does not hold the installed version."""
        self.staged = self._proof = None
