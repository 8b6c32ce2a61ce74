"""Versions: the weights each worker holds, proved or not. Pure: messages in, messages out.

The other half is `rollout/swap.py`: the same steps in the same order, under the same names.

    learner      broker, `Versions`                                     rollout, `WeightSwap`
    Published ─▶ publish: keep the note with its probe
                 news ────────────────── Beat(note) ──────────────────▶ news: the fetcher pulls that version
                 staged: draining ◀───── Staged(version) ────────────── offer: every second until the Swap
                 grant: swapping ─────── Swap(version) ───────────────▶ granted, due: install when open tasks allow it
                 installed: judge ◀───── Installed(digest, probe) ───── proof: every second until the answer
                   proved: ready ─────── Probed(proved) ─────────────▶ proved: deliver the results kept back
                   unclear ───────────── Probed(unclear) ────────────▶ unclear: proof, with a checksum of the weights
                   refused: loading ──── Probed(refused) ────────────▶ failed: hand those back, pull again
                 check_prefixes ◀─────── Prefixes(version, digests) ─── tokens of proved weights only

A draining rollout waits for `grant`, and that for its open leases and for evaluations that need its present version; a
swapping one gets no task until its version is proved. Lost messages come again; who installs nothing is given up.
"""

import logging
from typing import assert_never

import numpy as np

from prefixrl.common.config.run import RunConfig
from prefixrl.common.wire.messages.fields import UNPROVED
from prefixrl.common.wire.messages.learner import FromBroker
from prefixrl.common.wire.messages.weights import Proof, WeightsNote
from prefixrl.common.wire.messages.worker import Installed, Prefixes, Probed, Ready, Swap
from prefixrl.common.wire.packing import digests, logprobs, probe_positions
from prefixrl.learner.broker.groups.evaluations import EvaluationQueue
from prefixrl.learner.broker.workers.identity import IdentityCheck
from prefixrl.learner.broker.workers.proofs import Checksums, Logprobs, ProbeVerdict, judge
from prefixrl.learner.broker.workers.workers import Phase, Worker

log = logging.getLogger(__name__)

PROBE_FAILURES_ALLOWED = 3
NOTES_KEPT = 4
PROBES_KEPT = 256
"""Versions whose probe is kept for workers that proved them, and install a later one."""


class Versions:
    """Announced versions and the steps by which workers swap to them; see the module's picture."""

    def __init__(
        self, config: RunConfig, identity: IdentityCheck, evaluations: EvaluationQueue
    ) -> None:
        self.latest: WeightsNote | None = None
        self._tolerance = config.probe_tolerance
        self._drains = config.rollout.swap == "drain"
        self._identity = identity
        self._evaluations = evaluations
        self._notes: dict[int, WeightsNote] = {}
        self._probes: dict[int, WeightsNote] = {}
        self._checksums = Checksums()

    def announce(self, note: WeightsNote) -> None:
        """Make a published version the one that workers are to install."""
        self.latest = self._notes[note.version] = self._probes[note.version] = note
        for old in sorted(self._probes)[:-PROBES_KEPT]:
            del self._probes[old]
        self._evaluations.published(note.version, note.digest)

    def publish(self, note: WeightsNote) -> None:
        """Announce a new version and forget those that no worker will install."""
        self.announce(note)
        needed = self._evaluations.unsampled_versions()
        for old in set(sorted(self._notes)[:-NOTES_KEPT]) - needed:
            del self._notes[old]
        self._identity.publish(note.version, note.digest)

    def objection(self, worker: Worker) -> str | None:
        """Return why a rollout with another initial adapter cannot take part, else None."""
        note = self.latest
        if (
            note is None
            or note.version != 0
            or worker.version != 0
            or worker.weights_digest == note.digest
        ):
            return None
        return (
            f"its initial adapter has digest {worker.weights_digest}, the learner's {note.digest}"
        )

    def ready(self, worker: Worker, ready: Ready) -> None:
        """Take over the version of a ready worker; ValueError for weights never published."""
        # A rollout whose weights are not proved shows its probe next, like one that has just installed them.
        is_proved = worker.role == "scorer" or ready.version != UNPROVED
        if worker.role == "rollout" and is_proved:
            self._identity.check_version(ready.version, ready.weights_digest)
        worker.version, worker.weights_digest = ready.version, ready.weights_digest
        if is_proved:
            worker.prove(ready.version, ready.weights_digest)
        worker.phase = Phase.READY if is_proved else Phase.SWAPPING

    def news(self, worker: Worker) -> WeightsNote | None:
        """Return the newest version, or an earlier one that an evaluation needs; scorers get it without the probe."""
        if worker.role == "scorer" and self.latest is not None:
            return WeightsNote(self.latest.version, self.latest.digest)
        versions = self._evaluations.unsampled_versions() & self._notes.keys()
        # It can still swap to a version that is newer, or the same with new weights.
        present = worker.version, worker.weights_digest
        needed = [
            each
            for each in versions
            if each >= worker.version and (each, self._notes[each].digest) != present
        ]
        return self._notes[min(needed)] if needed else self.latest

    def staged(self, worker: Worker, version: int) -> None:
        """Stop giving a rollout training tasks: it holds another version in memory."""
        worker.phase = Phase.DRAINING
        worker.wanted_version = version
        worker.refused = None

    def grant(self, worker: Worker, now_s: float) -> Swap | None:
        """Allow a draining rollout to swap unless a lease or an evaluation needs its version."""
        if (
            worker.phase is not Phase.DRAINING
            or any(self._drains or lease.kind == "eval" for lease in worker.leases.values())
            or self._evaluations.needs_version(worker.version, worker.weights_digest)
        ):
            return None
        worker.phase = Phase.SWAPPING
        worker.progressed_s = now_s
        return Swap(worker.wanted_version)

    def installed(self, worker: Worker, report: Installed) -> FromBroker | None:
        """Judge a rollout's probe by the learner's; return the answer, None if it must wait; raises ValueError."""
        if worker.phase is not Phase.SWAPPING or report.version < worker.wanted_version:
            # Sent again before our answer arrived, or because it was lost.
            if worker.refused is not None:
                return worker.refused
            is_held = (report.version, report.digest) == (worker.version, worker.weights_digest)
            return (
                Probed(version=report.version, outcome="proved", by=worker.proof)
                if is_held
                else None
            )
        note = self._notes.get(report.version)
        if note is None:
            # Superseded so long ago that its probe is forgotten, and the worker fetches the newest version next; or not
            # published yet by a learner that resumed from a checkpoint, and the worker sends the report again.
            worker.version = UNPROVED
            return None
        judged = self._judge(note, report)
        if np.isfinite(judged.mismatch):
            worker.engine_mismatch = judged.mismatch  # JSON, in which status travels, has no NaN
        worker.probe_slope = judged.slope.value if judged.slope and judged.slope.is_seen else None
        if report.digest != note.digest:
            return self._refuse(
                worker, note, judged, f"its weights have digest {report.digest}, not {note.digest}"
            )
        match judged.outcome:
            case "proved":
                return self._admit(worker, note, "change")
            case "refused":
                return self._refuse(worker, note, judged, judged.reason)
            case "unclear":
                if report.checksum is None:
                    return Probed(version=note.version, outcome="unclear")
                before = report.before.digest if report.before else ""
                if reason := self._checksums.objection(note.digest, report.checksum, before):
                    return self._refuse(worker, note, judged, reason)
                self._checksums.admit(note.digest, report.checksum)
                return self._admit(worker, note, "checksum")
            case unknown:
                assert_never(unknown)

    def _judge(self, note: WeightsNote, report: Installed) -> ProbeVerdict:
        """Return what the logprobs say; ValueError where their number is not the probe's."""
        learner = probe_of(note)
        engine, before = _as_array(report.probe_logprobs, learner.size), None
        if report.before is not None:
            earlier = self._probes.get(report.before.version)
            if earlier and (earlier.digest, earlier.probe_tokens) == (
                report.before.digest,
                note.probe_tokens,
            ):
                before = _as_array(report.before.probe_logprobs, learner.size), probe_of(earlier)
        return judge(engine, learner, before, self._tolerance)

    def _admit(self, worker: Worker, note: WeightsNote, by: Proof) -> Probed:
        worker.phase = Phase.READY
        worker.version = note.version
        worker.weights_digest = note.digest
        worker.probe_failures = 0
        worker.proof = by
        worker.prove(note.version, note.digest)
        return Probed(version=note.version, outcome="proved", by=by)

    def _refuse(
        self, worker: Worker, note: WeightsNote, judged: ProbeVerdict, reason: str
    ) -> Probed:
        worker.probe_failures += 1
        log.warning("%s failed the proof of version %d: %s", worker.name, note.version, reason)
        if worker.probe_failures >= PROBE_FAILURES_ALLOWED:
            raise ValueError(
                f"the engine does not hold version {note.version} after {worker.probe_failures} installations: {reason}"
            )
        worker.phase = Phase.LOADING
        worker.version = UNPROVED
        worker.refused = Probed(
            version=note.version,
            outcome="refused",
            difference=judged.mismatch,
            failures=worker.probe_failures,
        )
        return worker.refused

    def check_prefixes(self, worker: Worker, result: Prefixes) -> None:
        """Raise ValueError unless every token is of weights that this worker proved to hold."""
        written_by = digests(result.groups)
        for version, digest in sorted({(result.version, result.weights_digest)} | written_by):
            self._identity.check_version(version, digest)
        if result.task not in worker.leases:
            return  # another broker, or this one before the worker joined again, took the proof
        for version, digest in written_by:
            if worker.proved.get(version) != digest:
                raise ValueError(
                    f"task {result.task} has tokens of version {version}, weights {digest}, which it did not prove to "
                    f"hold"
                )


def probe_of(note: WeightsNote) -> Logprobs:
    """Return the learner's logprobs of a version; ValueError where they are malformed."""
    return logprobs(note.probe_logprobs, probe_positions(note))


def _as_array(packed: bytes, size: int) -> Logprobs:
    """Read an engine's probe, which may hold NaN; ValueError where it has another size."""
    values = np.frombuffer(packed, dtype="<f4")
    if values.size != size:
        raise ValueError(f"{values.size} probe logprobs for {size}")
    return values
