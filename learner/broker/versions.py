"""Versions: the weights each worker holds, proved or not. Pure: messages in, messages out.

The other half is `rollout/swap.py`: the same steps in the same order, under the same names.

    learner      broker, `Versions`                                     rollout, `WeightSwap`
    Published ─▶ publish: keep the note with its probe
                 news ────────────────── Beat(note) ──────────────────▶ news: the fetcher pulls that version
                 staged: draining ◀───── Staged(version) ────────────── offer: every second until the Swap
                 grant: swapping ─────── Swap(version) ───────────────▶ granted, due: install when open tasks allow it
                 installed: compare ◀─── Installed(digest, probe) ───── proof: every second until the answer
                   it fits: ready ────── Proved(version) ─────────────▶ proved: deliver the results kept back
                   it differs: loading ─ ProbeFailed(version) ────────▶ failed: hand those back, pull again
                 check_prefixes ◀─────── Prefixes(version, digests) ─── tokens of proved weights only

Who waits for whom: a draining rollout gets no new training task and waits for `grant`. `grant` waits for the rollout's
open leases (all of them with `rollout.swap = "drain"`, those of evaluations with "in_flight") and for evaluations that
still need prefixes of its present version. A swapping rollout gets no task at all until its probe fits. The rollout
repeats Staged and Installed, so a lost answer is sent again; one that installs nothing is given up after
`broker.stall_s`. Weights that fail the probe `PROBE_FAILURES_ALLOWED` times end their worker.
"""

import logging

import numpy as np

from prefixrl.common.config.run import RunConfig
from prefixrl.common.wire import messages
from prefixrl.common.wire.packing import digests, logprobs, token_ids
from prefixrl.learner.broker.evaluations import EvaluationQueue
from prefixrl.learner.broker.identity import IdentityCheck
from prefixrl.learner.broker.workers import Worker

log = logging.getLogger(__name__)

PROBE_FAILURES_ALLOWED = 3
NOTES_KEPT = 4


class Versions:
    """Announced versions and the steps by which workers swap to them; see the module's picture."""

    def __init__(self, config: RunConfig, identity: IdentityCheck, evaluations: EvaluationQueue) -> None:
        self.latest: messages.WeightsNote | None = None
        self._tolerance = config.probe_tolerance
        self._drains = config.rollout.swap == "drain"
        self._identity = identity
        self._evaluations = evaluations
        self._notes: dict[int, messages.WeightsNote] = {}

    def announce(self, note: messages.WeightsNote) -> None:
        """Make a published version the one that workers are to install."""
        self.latest = note
        self._notes[note.version] = note
        self._evaluations.published(note.version, note.digest)

    def publish(self, note: messages.WeightsNote) -> None:
        """Announce a new version and forget those that nobody is to install any more."""
        self.announce(note)
        needed = self._evaluations.unsampled_versions()
        for old in set(sorted(self._notes)[:-NOTES_KEPT]) - needed:
            del self._notes[old]
        self._identity.publish(note.version, note.digest)

    def objection(self, worker: Worker) -> str | None:
        """Return why a rollout with another initial adapter cannot take part, else None."""
        note = self.latest
        if note is None or note.version != 0 or worker.version != 0 or worker.weights_digest == note.digest:
            return None
        return f"its initial adapter has digest {worker.weights_digest}, the learner's {note.digest}"

    def ready(self, worker: Worker, ready: messages.Ready) -> None:
        """Take over the version of a ready worker; ValueError for weights never published."""
        # A rollout whose weights are not proved shows its probe next, like one that has just installed them.
        is_proved = worker.role == "scorer" or ready.version != messages.UNPROVED
        if worker.role == "rollout" and is_proved:
            self._identity.check_version(ready.version, ready.weights_digest)
        worker.version, worker.weights_digest = ready.version, ready.weights_digest
        if is_proved:
            worker.prove(ready.version, ready.weights_digest)
        worker.phase = "ready" if is_proved else "swapping"

    def news(self, worker: Worker) -> messages.WeightsNote | None:
        """Return the newest version, or an earlier one that an evaluation needs prefixes of."""
        known = self._evaluations.unsampled_versions() & self._notes.keys()
        needed = [version for version in known if _is_ahead(self._notes[version], worker)]
        return self._notes[min(needed)] if needed and worker.role == "rollout" else self.latest

    def staged(self, worker: Worker, version: int) -> None:
        """Stop giving a rollout training tasks: it holds another version in memory."""
        worker.phase, worker.wanted_version, worker.refused = "draining", version, None

    def grant(self, worker: Worker, now_s: float) -> messages.Swap | None:
        """Allow a draining rollout to swap unless a lease or an evaluation needs its version."""
        if (
            worker.phase != "draining"
            or any(self._drains or lease.kind == "eval" for lease in worker.leases.values())
            or self._evaluations.needs_version(worker.version, worker.weights_digest)
        ):
            return None
        worker.phase, worker.progressed_s = "swapping", now_s
        return messages.Swap(worker.wanted_version)

    def installed(self, worker: Worker, report: messages.Installed) -> messages.FromBroker | None:
        """Compare a rollout's probe with the learner's; return the answer, None for none yet.

        ValueError: the probe has another length, or failed `PROBE_FAILURES_ALLOWED` times.
        """
        if worker.phase != "swapping" or report.version < worker.wanted_version:
            # Sent again before our answer arrived, or because it was lost.
            if worker.refused is not None:
                return worker.refused
            is_held = (report.version, report.digest) == (worker.version, worker.weights_digest)
            return messages.Proved(report.version) if is_held else None
        note = self._notes.get(report.version)
        if note is None:
            # Superseded so long ago that its probe is forgotten, and the worker fetches the newest version next; or not
            # published yet by a learner that resumed from a checkpoint, and the worker sends the report again.
            worker.version = messages.UNPROVED
            return None
        difference = _probe_difference(note, report)
        if np.isfinite(difference):
            worker.engine_mismatch = difference  # JSON, in which status travels, has no NaN
        if difference <= self._tolerance and report.digest == note.digest:
            worker.phase, worker.version, worker.weights_digest = "ready", note.version, note.digest
            worker.probe_failures = 0
            worker.prove(note.version, note.digest)
            return messages.Proved(note.version)
        worker.probe_failures += 1
        log.warning("%s failed the probe of version %d: difference %.3g", worker.name, note.version, difference)
        if worker.probe_failures >= PROBE_FAILURES_ALLOWED:
            raise ValueError(
                f"the engine does not hold version {note.version} after {worker.probe_failures} installations: "
                f"probe differs by {difference:.3g}, tolerance {self._tolerance:.3g} (rollout.probe_tolerance)"
            )
        worker.phase, worker.version = "loading", messages.UNPROVED
        worker.refused = messages.ProbeFailed(note.version, difference, self._tolerance, worker.probe_failures)
        return worker.refused

    def check_prefixes(self, worker: Worker, result: messages.Prefixes) -> None:
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


def _is_ahead(note: messages.WeightsNote, worker: Worker) -> bool:
    """Return True if a rollout can still swap to a version: newer, or the same with new weights."""
    is_another = note.version == worker.version and note.digest != worker.weights_digest
    return note.version > worker.version or is_another


def _probe_difference(note: messages.WeightsNote, report: messages.Installed) -> float:
    """Return the largest difference of two probes; ValueError where their lengths differ."""
    expected = logprobs(note.probe_logprobs, len(token_ids(note.probe_tokens)) - 1)
    got = np.frombuffer(report.probe_logprobs, dtype="<f4")
    if got.shape != expected.shape:
        raise ValueError(f"{got.size} probe logprobs for {expected.size}")
    return float(np.abs(got - expected).max())
