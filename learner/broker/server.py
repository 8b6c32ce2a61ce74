"""The broker: the one process that holds a run's state, behind the one address every worker knows.

    rollout ◀─ PrefixTask ── broker ── ScoreTask ─▶ scorer          ranks ── GetBatch ─▶ broker ── Batch | NotYet ─▶ ranks
       └────── Prefixes ───▶   │  ◀── Scores ─────────┘

What waits for what: a rollout with free slots waits for the window to open (the learner publishes a version and finishes an
iteration); a scorer waits for prefixes; a rank waits for groups it is told the names of. What ends a wait: a result, a
refusal, a worker given up for silence or lack of progress, the operator. Results are acknowledged after the journal holds them.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from prefixrl.common.config import RunConfig
from prefixrl.common.journal import Journal
from prefixrl.common.messages import (
    PROTOCOL,
    UNPROVED,
    Accepted,
    Ack,
    Beat,
    Done,
    Evaluate,
    EvaluationProgress,
    Forget,
    FromBroker,
    GetBatch,
    GetEvaluation,
    GetStatus,
    Goodbye,
    Heartbeat,
    Hello,
    Installed,
    IterationDone,
    Prefixes,
    ProbeFailed,
    Proved,
    Published,
    Ready,
    Refused,
    Reject,
    Scores,
    Staged,
    Status,
    Stop,
    Swap,
    ToBroker,
    Unknown,
    WeightsNote,
    Welcome,
)
from prefixrl.common.packing import digests, logprobs, token_ids
from prefixrl.common.records import VersionPublished
from prefixrl.common.requester import is_tag
from prefixrl.common.transport import Malformed, Payload, Server, Undeliverable
from prefixrl.learner.broker.batches import BatchDesk
from prefixrl.learner.broker.dispatch import Dispatcher
from prefixrl.learner.broker.identity import IdentityCheck
from prefixrl.learner.broker.ledger import Ledger
from prefixrl.learner.broker.spending import Spending
from prefixrl.learner.broker.status import document
from prefixrl.learner.broker.workers import Worker

log = logging.getLogger(__name__)

PROBE_FAILURES_ALLOWED = 3
CHECK_EVERY_S = 0.1
MESSAGES_PER_SYNC = 64
NOTES_KEPT = 4
GOODBYE_S = 6.0
"""More than `requester.ASK_AGAIN_S`: a Stop whose answer was lost is said again to a broker that is still there. Less than
`servers.CLOSE_S`, by more than `LINGER_S`."""
LINGER_S = 2.0
"""How long the last words may take to leave."""
APART = {"simulated", "openai"}
"""Engines that share a run with no other: their targets are not loaded from the same files."""


@dataclass(frozen=True)
class RunState:
    """What the broker knows of the run besides the ledger."""

    run_id: str
    weights_endpoint: str
    problems: int
    identity: IdentityCheck
    begun: int = -1
    """The iteration at which an earlier broker died under the ranks of now; -1 where ranks begin with this one."""


class Broker:
    """State of one run and the handlers of every message; `serve` is the only method that waits."""

    def __init__(
        self,
        config: RunConfig,
        run: "RunState",
        dispatcher: Dispatcher,
        journal: Journal,
        server: Server[ToBroker, FromBroker],
    ) -> None:
        self.config = config
        self.run = run
        self.dispatcher = dispatcher
        self.ledger: Ledger = dispatcher.ledger
        self.journal = journal
        self.latest: WeightsNote | None = None
        self.started_s = time.monotonic()
        self.malformed = 0
        self._server = server
        self._identity = run.identity
        self._peers: dict[bytes, str] = {}
        self._tags: dict[bytes, bytes] = {}
        self.batches = BatchDesk(config, dispatcher, run.problems, run.begun)
        self.spending = Spending(Path(config.directory), config.scorer.openai)
        self._acks: list[tuple[bytes, Ack]] = []
        self._stopping: str | None = None
        self._stoppers: set[bytes] = set()
        self._notes: dict[int, WeightsNote] = {}

    # --- the loop ----------------------------------------------------------------------------------------------------

    def serve(self, stopped: Callable[[], bool]) -> None:
        """Handle messages until stopped; workers are sent home only when the run is over, not when the learner restarts."""
        while not stopped() and self._stopping is None:
            self._receive_some()
            now_s = time.monotonic()
            self._give_up_lost(now_s)
            self.dispatcher.dispatch(now_s)
            answers = self.batches.answers(now_s)
            self._write_down()
            for peer, (message, payload) in answers.items():
                self._send(peer, message, payload)
            self._flush()
            self.spending.save(now_s)
        # Before the wait for who leaves: it outlasts the patience of some supervisors.
        self.spending.save(time.monotonic(), at_once=True)
        if self._stopping is not None:
            self._send_home(Done(self._stopping))

    def _send_home(self, done: Done) -> None:
        """Tell every worker to go and wait, not long, for the Goodbyes of all and of who said Stop.

        What a client has not read yet is lost with the connection: one that misses it would wait for a broker that is gone.
        """
        workers = set(self.dispatcher.registry.by_identity)
        for identity in workers:
            self._send(identity, done)
        leaving = workers | self._stoppers
        deadline_s = time.monotonic() + GOODBYE_S
        while leaving and time.monotonic() < deadline_s:
            received = self._receive(CHECK_EVERY_S)
            if received is None:
                continue
            peer, message = received
            if isinstance(message, Goodbye):
                leaving.discard(peer)
            else:
                self._send(peer, Accepted() if isinstance(message, Stop) else done)

    def _receive_some(self) -> None:
        """Take what is there, up to a bound, so that one sync to disk serves many results."""
        timeout_s = CHECK_EVERY_S
        for _ in range(MESSAGES_PER_SYNC):
            received = self._receive(timeout_s)
            if received is None:
                return
            timeout_s = 0.0
            self._handle(*received)
            if self._stopping is not None:
                return  # what follows, a Goodbye perhaps, is for `_send_home`

    def _receive(self, timeout_s: float) -> tuple[bytes, ToBroker] | None:
        """Next message and who sent it; None after `timeout_s` or one that is malformed."""
        try:
            received = self._server.receive(timeout_s)
        except Malformed as error:
            self.malformed += 1
            log.warning("ignored a malformed message: %s", error)
            return None
        if received is None:
            return None
        peer, message, payload = received
        if payload and is_tag(payload[0]):
            self._tags[peer] = payload[0]
        return peer, message

    def _write_down(self) -> None:
        records, self.ledger.records = self.ledger.records, []
        self.journal.append(records)
        for peer, ack in self._acks:
            self._send(peer, ack)
        self._acks.clear()

    def _flush(self) -> None:
        outgoing, self.dispatcher.outgoing = self.dispatcher.outgoing, []
        for peer, message in outgoing:
            self._send(peer, message)

    def _send(self, peer: bytes, message: FromBroker, payload: list[Payload] | None = None) -> None:
        frames = list(payload or [])
        if peer in self._tags:
            frames.insert(0, self._tags[peer])
        try:
            self._server.send(peer, message, frames)
        except Undeliverable as error:
            # A lease that could not be delivered comes back when its worker is given up for silence.
            log.debug("could not deliver %s: %s", type(message).__name__, error)

    def _give_up_lost(self, now_s: float) -> None:
        for worker, reason in self.dispatcher.registry.lost(now_s):
            held = self.dispatcher.lose(worker, reason, died=True)
            log.warning(
                "gave up %s (%s pid %d): %s; it held %s",
                worker.name,
                worker.host,
                worker.pid,
                reason,
                held or "nothing",
            )
            self._send(worker.identity, Unknown())

    # --- messages ----------------------------------------------------------------------------------------------------

    def _handle(self, peer: bytes, message: ToBroker) -> None:
        now_s = time.monotonic()
        worker = self.dispatcher.registry.by_identity.get(peer)
        if worker is not None:
            worker.heard_s = now_s
        match message:
            case Hello():
                self._hello(peer, message, now_s)
            case (
                GetBatch()
                | IterationDone()
                | Published()
                | Evaluate()
                | GetEvaluation()
                | Forget()
                | GetStatus()
                | Stop()
            ):
                if peer in self._peers:
                    self._handle_peer(peer, message, now_s)
                else:
                    self._send(peer, Unknown())
            case _ if worker is None:
                # A result of a worker given up meanwhile: it says Hello again and sends the result again.
                self._send(peer, Unknown())
            case _:
                self._handle_worker(worker, message, now_s)

    def _hello(self, peer: bytes, hello: Hello, now_s: float) -> None:
        if hello.protocol != PROTOCOL:
            theirs = f"{hello.role} on {hello.host} speaks {hello.protocol}"
            reason = f"this run speaks protocol {PROTOCOL}, {theirs}; use one release"
            self._send(peer, Reject(reason))
            return
        if hello.role in ("rank", "operator"):
            self._peers[peer] = name = str(hello.role)
        else:
            name = self._enrol(peer, hello, now_s).name
        self._send(
            peer,
            Welcome(
                PROTOCOL,
                self.run.run_id,
                name,
                self.config.model_dump_json(),
                self.run.weights_endpoint,
            ),
        )

    def _enrol(self, peer: bytes, hello: Hello, now_s: float) -> Worker:
        """Register a worker, or take one back that says Hello again; it keeps its name and gives its leases back."""
        known = self.dispatcher.registry.by_identity.get(peer)
        if known is not None:
            self.dispatcher.return_leases(known)
            known.phase, known.wanted_version, known.refused = "loading", UNPROVED, None
            known.has_said_ready, known.without_ready_s = False, None
            return known
        assert hello.role == "rollout" or hello.role == "scorer"
        worker = self.dispatcher.registry.add(peer, hello.role, hello.host, hello.pid, now_s)
        log.info("%s joined from %s pid %d", worker.name, hello.host, hello.pid)
        return worker

    def _handle_worker(self, worker: Worker, message: ToBroker, now_s: float) -> None:
        try:
            match message:
                case Heartbeat(progress, busy_slot_s, leases, state, usage):
                    self.spending.note(worker.identity.decode(errors="replace"), usage)
                    worker.heartbeat(progress, busy_slot_s, state, now_s)
                    self.dispatcher.reconcile(worker, leases, now_s)
                    if worker.lost_its_ready(now_s):
                        log.warning("%s works, but its Ready was lost: asking again", worker.name)
                        self._send(worker.identity, Unknown())
                    else:
                        self._send(worker.identity, Beat(self._news_for(worker)))
                case Ready():
                    self._ready(worker, message, now_s)
                case Prefixes():
                    self._check_prefixes(message, worker)
                    self.dispatcher.take_prefixes(worker, message, now_s)
                    self._acks.append((worker.identity, Ack(message.task, message.attempt)))
                case Scores():
                    self._check_known(digests(group.prefixes for group in message.groups))
                    self.dispatcher.take_scores(worker, message, now_s)
                    self._acks.append((worker.identity, Ack(message.task, message.attempt)))
                case Refused():
                    self.dispatcher.take_refusal(worker, message)
                case Staged(version):
                    worker.phase, worker.wanted_version = "draining", version
                    worker.refused = None
                case Installed():
                    self._installed(worker, message)
                case Goodbye(reason):
                    log.info("%s left: %s", worker.name, reason)
                    self.dispatcher.lose(worker, reason, died=False)
                case _:
                    raise ValueError(f"a {worker.role} may not send {type(message).__name__}")
        except ValueError as error:
            self.malformed += 1
            self._reject(worker, str(error))
        self._grant_swap(worker, now_s)

    def _reject(self, worker: Worker, reason: str) -> None:
        log.error("refused %s (%s pid %d): %s", worker.name, worker.host, worker.pid, reason)
        self._send(worker.identity, Reject(reason))
        self.dispatcher.lose(worker, reason, died=True)

    def _ready(self, worker: Worker, ready: Ready, now_s: float) -> None:
        if ready.slots < 1:
            raise ValueError(
                f"a worker with {ready.slots} slots cannot work; its engine must offer at least one"
            )
        section = self.config.rollout if worker.role == "rollout" else self.config.scorer
        if ready.engine != section.engine and {ready.engine, section.engine} & APART:
            raise ValueError(
                f"its engine is {ready.engine}, the run's {worker.role}.engine is {section.engine}"
            )
        self._identity.check(worker.role, ready.digests)
        is_proved = worker.role == "scorer" or ready.version != UNPROVED
        if worker.role == "rollout" and is_proved:
            self._identity.check_version(ready.version, ready.weights_digest)
        worker.slots, worker.digests, worker.engine = ready.slots, ready.digests, ready.engine
        worker.version, worker.weights_digest = ready.version, ready.weights_digest
        if is_proved:
            worker.prove(ready.version, ready.weights_digest)
        # Installed follows with the probe.
        worker.phase = "ready" if is_proved else "swapping"
        worker.has_said_ready = True
        worker.ready_s = worker.progressed_s = now_s
        log.info(
            "%s is ready: %d slots, %s engine, version %d",
            worker.name,
            ready.slots,
            ready.engine,
            ready.version,
        )

    def _check_prefixes(self, result: Prefixes, worker: Worker) -> None:
        """Raise ValueError unless every token is of published weights, of which this worker proved that it holds them."""
        if worker.role != "rollout":
            raise ValueError(f"a {worker.role} may not send Prefixes")
        written_by = digests(result.groups)
        self._check_known({(result.version, result.weights_digest)} | written_by)
        if result.task not in worker.leases:
            return  # another broker, or this one before the worker joined again, took the proof
        for version, digest in written_by:
            if worker.proved.get(version) != digest:
                raise ValueError(
                    f"task {result.task} has tokens of version {version}, weights {digest}, which it did not prove to hold"
                )

    def _check_known(self, written_by: set[tuple[int, str]]) -> None:
        for version, digest in sorted(written_by):
            self._identity.check_version(version, digest)

    def _grant_swap(self, worker: Worker, now_s: float) -> None:
        """A rollout that asked may swap, unless what it has open, or an evaluation still to come, needs the version it has."""
        if (
            worker.phase == "draining"
            and not self.dispatcher.needs_version(worker)
            and not self.dispatcher.evaluations.needs_version(worker.version, worker.weights_digest)
        ):
            worker.phase, worker.progressed_s = "swapping", now_s
            self._send(worker.identity, Swap(worker.wanted_version))

    def _installed(self, worker: Worker, report: Installed) -> None:
        if worker.phase != "swapping" or report.version < worker.wanted_version:
            # Said again before our answer arrived, or although it was lost.
            if worker.refused is not None:
                self._send(worker.identity, worker.refused)
            elif (report.version, report.digest) == (worker.version, worker.weights_digest):
                self._send(worker.identity, Proved(report.version))
            return
        note = self._notes.get(report.version)
        if note is None:
            # Superseded so long ago that nothing proves it any more, and the worker fetches the newest one next; or not
            # published yet by a learner that goes the same way again, and the worker says it again.
            worker.version = UNPROVED
            return
        expected = logprobs(note.probe_logprobs, len(token_ids(note.probe_tokens)) - 1)
        got = np.frombuffer(report.probe_logprobs, dtype="<f4")
        if got.shape != expected.shape:
            raise ValueError(f"{got.size} probe logprobs for {expected.size}")
        difference = float(np.abs(got - expected).max())
        worker.engine_mismatch = difference
        tolerance = self.config.probe_tolerance
        if difference <= tolerance and report.digest == note.digest:
            worker.phase, worker.version, worker.weights_digest = "ready", note.version, note.digest
            worker.probe_failures = 0
            worker.prove(note.version, note.digest)
            self._send(worker.identity, Proved(note.version))
            return
        worker.probe_failures += 1
        log.warning(
            "%s failed the probe of version %d: difference %.3g",
            worker.name,
            note.version,
            difference,
        )
        if worker.probe_failures >= PROBE_FAILURES_ALLOWED:
            raise ValueError(
                f"the engine does not hold version {note.version} after {worker.probe_failures} installations: "
                f"probe differs by {difference:.3g}, tolerance {tolerance:.3g} (rollout.probe_tolerance)"
            )
        worker.phase, worker.version = "loading", UNPROVED
        worker.refused = ProbeFailed(note.version, difference, tolerance, worker.probe_failures)
        self._send(worker.identity, worker.refused)

    # --- learner and operator ----------------------------------------------------------------------------------------

    def _handle_peer(self, peer: bytes, message: ToBroker, now_s: float) -> None:
        """A request that makes no sense is refused; it must not end the one process that holds the run's state."""
        try:
            self._handle_learner(peer, message, now_s)
        except ValueError as error:
            self.malformed += 1
            log.error("refused %s of a %s: %s", type(message).__name__, self._peers[peer], error)
            self._send(peer, Reject(str(error)))

    def _handle_learner(self, peer: bytes, message: ToBroker, now_s: float) -> None:
        match message:
            case GetBatch(rank=rank, ranks=ranks) if not 0 <= rank < ranks:
                raise ValueError(f"there is no rank {rank} among {ranks}")
            case GetBatch():
                self.batches.ask(peer, message, now_s)
            case IterationDone(iteration):
                self.ledger.trained(iteration)
                self._send(peer, Accepted())
            case Published(note):
                self._published(note)
                self._send(peer, Accepted())
            case Evaluate():
                self.dispatcher.evaluations.add(message)
                self._send(peer, Accepted())
            case GetEvaluation(name):
                self._send_evaluation(peer, name)
            case Forget(name):
                self.dispatcher.evaluations.forget(name)
                self._send(peer, Accepted())
            case GetStatus():
                self._send(peer, Status(msgspec.json.encode(document(self, now_s))))
            case Stop(reason):
                self._stopping = reason
                self._stoppers.add(peer)
                self._send(peer, Accepted())

    def announce(self, note: WeightsNote) -> None:
        """Make a published version the one workers are told of."""
        self.latest = note
        self._notes[note.version] = note
        self.dispatcher.evaluations.published(note.version, note.digest)

    def _published(self, note: WeightsNote) -> None:
        if self.latest == note:
            return
        self.journal.append([VersionPublished(note)])
        self.announce(note)
        needed = self.dispatcher.evaluations.unsampled_versions()
        for old in set(sorted(self._notes)[:-NOTES_KEPT]) - needed:
            del self._notes[old]
        self._identity.publish(note.version, note.digest)
        for worker in list(self.dispatcher.registry.of("rollout")):
            if (
                worker.version == note.version
                and worker.weights_digest != note.digest
                and note.version == 0
            ):
                self._reject(
                    worker,
                    f"its initial adapter has digest {worker.weights_digest}, the learner's {note.digest}",
                )
            else:
                self._send(worker.identity, Beat(self._news_for(worker)))

    def _news_for(self, worker: Worker) -> WeightsNote | None:
        """The newest version, or an earlier one on the way there of which an evaluation still needs prefixes."""
        needed = [
            version
            for version in self.dispatcher.evaluations.unsampled_versions()
            if version in self._notes and _is_ahead(self._notes[version], worker)
        ]
        return self._notes[min(needed)] if needed and worker.role == "rollout" else self.latest

    def _send_evaluation(self, peer: bytes, name: str) -> None:
        run = self.dispatcher.evaluations.get(name)
        if run is None:
            self._send(peer, EvaluationProgress(name, -1, 0, 0))
            return
        encode = msgspec.msgpack.Encoder().encode
        payload: list[Payload] = (
            [encode(run.results[seq]) for seq in sorted(run.results)] if run.finished else []
        )
        done, failed = len(run.results), len(run.failed)
        causes = tuple((seq - run.first, cause) for seq, cause in run.failed.items())
        progress = EvaluationProgress(name, run.total, done, failed, run.unsampled, causes)
        self._send(peer, progress, payload)


def _is_ahead(note: WeightsNote, worker: Worker) -> bool:
    """Whether a rollout can still get to a version: it has none as new, or other weights of the same number."""
    is_another = note.version == worker.version and note.digest != worker.weights_digest
    return note.version > worker.version or is_another
