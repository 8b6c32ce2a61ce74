"""The broker's server: socket, clock, enrolment and the handlers of every message.

    rollout ◀─ PrefixTask ── broker ── ScoreTask ─▶ scorer      ranks ── GetBatch ──▶ broker ── Batch | NotYet ─▶ ranks
       └────── Prefixes ───▶   │  ◀── Scores ─────────┘       ranks ── GetGroups ─▶ broker ── Groups ─────────▶ ranks

Results are acknowledged after the journal holds them. While its disk is full no worker gets work.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec

from prefixrl.common.config.run import RunConfig
from prefixrl.common.config.workers.engines import may_share_run
from prefixrl.common.errors import ConfigError, DiskFault, TrainingFault
from prefixrl.common.host.log_lines import CAUSE
from prefixrl.common.host.process import is_gone
from prefixrl.common.journal.journal import Journal
from prefixrl.common.journal.records import JournalRecord, SegmentStart, VersionPublished
from prefixrl.common.run.disk import FullDisk
from prefixrl.common.wire.messages import learner as rank_messages
from prefixrl.common.wire.messages import worker as worker_messages
from prefixrl.common.wire.messages.fields import cut_text
from prefixrl.common.wire.messages.protocol import PROTOCOL
from prefixrl.common.wire.messages.weights import WeightsNote
from prefixrl.common.wire.transport import (
    Malformed,
    Payload,
    Received,
    Server,
    Undeliverable,
    Unlisted,
)
from prefixrl.learner.broker.batches import BatchAnswers
from prefixrl.learner.broker.groups.ceiling import CostCeiling
from prefixrl.learner.broker.peers import Peers, why_not
from prefixrl.learner.broker.status import StatusSources, UsageFile, document
from prefixrl.learner.broker.workers.dispatch import Dispatcher
from prefixrl.learner.broker.workers.identity import RunState
from prefixrl.learner.broker.workers.versions import Versions, probe_of
from prefixrl.learner.broker.workers.workers import Worker, check_offer

Request = Received[rank_messages.ToBroker]
MESSAGES = 64
"""Most messages of a turn; results wait for their acknowledgement until its end."""
GATHER_S = 0.005
"""Length of a turn: work is given and results are acknowledged at its end, with one sync to disk for all of them.
Heartbeats and questions are answered at once."""
NAP_S = 0.002
"""Sleep when no message is there: a wake-up costs more than handling most messages."""


def gathered(receive: Callable[[float], Request | None], wait_s: float) -> Iterator[Request]:
    """Yield the messages of a turn; the first may take `wait_s`."""
    end_s = None
    for _ in range(MESSAGES):
        received = receive(wait_s if end_s is None else 0.0)
        now_s = time.monotonic()
        if end_s is None and received is None:
            return
        end_s = now_s + GATHER_S if end_s is None else end_s
        if received is not None:
            yield received
        elif now_s >= end_s:
            return
        else:
            time.sleep(min(NAP_S, end_s - now_s))


log = logging.getLogger(__name__)

CHECK_EVERY_S = 0.1
GOODBYE_S = 6.0
"""Longest wait for the Goodbyes. More than `requester.ASK_AGAIN_S`: a Stop whose answer was lost is sent again. Less
than `servers.CLOSE_S`, by more than `LINGER_S`."""
LINGER_S = 2.0


def _ceiling_of(config: RunConfig) -> CostCeiling | None:
    most_cost = config.scorer.openai.most_cost
    if most_cost is None or not config.scorer.is_served:
        return None
    algorithm = config.algorithm
    texts = algorithm.samples_per_prompt * config.scorer.continuations
    texts += config.adapter.sees_draft
    return CostCeiling(most_cost, texts, algorithm.groups_per_iteration)


class Broker:
    """State of one run and the handlers of every message; only `serve` waits."""

    def __init__(
        self,
        config: RunConfig,
        run: RunState,
        dispatcher: Dispatcher,
        journals: tuple[Journal, Journal | None],
        server: Server[rank_messages.ToBroker, rank_messages.FromBroker],
    ) -> None:
        """`journals`: that of the groups, and that of the target's kept answers if there is a target."""
        self.config, self.run = config, run
        self.journal, self.answer_journal = journals
        self.dispatcher, self.ledger, self.outbox = dispatcher, dispatcher.ledger, dispatcher.outbox
        self.versions = Versions(config, run.identity, dispatcher.evaluations)
        self.batches = BatchAnswers(config, dispatcher, run.problems, run.start)
        self.usage_file = UsageFile(Path(config.directory), config.scorer.openai)
        self.server = server
        self._status = StatusSources(
            run.header.run_id,
            config.directory,
            dispatcher,
            self.batches,
            self.usage_file,
            self.journal,
            time.monotonic(),
        )
        self._ceiling = _ceiling_of(config)
        self._disk = FullDisk(Path(config.directory), "the journal")
        self._malformed = 0
        """Messages that were not accepted: no message at all, or refused."""
        self._peers = Peers()
        self._counted_s = 0.0
        """Time of the last search for silent workers."""
        self._stopping: str | None = None
        self._stoppers: set[bytes] = set()

    def serve(self, stopped: Callable[[], bool]) -> None:
        """Handle messages until stopped; only the end of a run, not a restart, stops the workers."""
        while not stopped() and self._stopping is None:
            self._receive_some()
            now_s = time.monotonic()
            self._give_up_lost(now_s)
            if obstacle := self._disk.why:
                for peer, answer in self.batches.put_off(obstacle, now_s).items():
                    self._send(peer, *answer)
            else:
                # Before work is given: a batch that goes to the learner makes room for groups.
                self._keep_ceiling(now_s)
                self.outbox.add_batches(self.batches.answers(now_s))
                self.dispatcher.dispatch(now_s)
            if self._write_records(now_s):
                for outgoing in self.outbox.after_sync():
                    self._send(*outgoing)
                if self.journal.is_long:
                    # The next segment begins with the state so far.
                    start = SegmentStart(
                        self.journal.size_bytes,
                        self.run.header,
                        self.ledger.state(),
                        self.run.identity.digests,
                        self.versions.latest,
                    )
                    self._takes(partial(self.journal.begin_segment, start), now_s)
            elif self.outbox.batches:
                self.outbox.batches = []
                self.batches.withdraw_newest()  # the ranks ask again
            self.usage_file.save(now_s)
        # Before the wait for Goodbyes: it outlasts the patience of some supervisors.
        self.usage_file.save(time.monotonic(), at_once=True)
        if self._stopping is not None:
            self._dismiss(worker_messages.Done(self._stopping))

    def _keep_ceiling(self, now_s: float) -> None:
        """Begin no group that would exceed the cost of the run."""
        ceiling, ledger = self._ceiling, self.ledger
        if ceiling is None:
            return
        ceiling.note_usage(self.usage_file.total())
        open_texts = self.dispatcher.open_texts
        if excess := ceiling.excess(open_texts):
            evaluations = self.dispatcher.evaluations
            if name := evaluations.refuse_newest(excess):
                log.warning("evaluation %s is given up: %s", name, excess)
        if not ledger.may_issue:
            return
        ledger.most_new = ceiling.new_groups(open_texts)
        if ceiling.reason:
            ledger.is_closed = True
            self.dispatcher.end_drafting()
            self.batches.ending = ceiling.reason
            self.dispatcher.note_event("the cost reached its ceiling", now_s)
            log.warning("the run ends in order: %s", ceiling.reason)

    def _start_evaluation(self, request: rank_messages.Evaluate) -> None:
        """Start an evaluation, or refuse it where it would exceed the cost of the run."""
        evaluations = self.dispatcher.evaluations
        is_new = request.name not in evaluations.runs
        before_texts, texts = self.dispatcher.open_texts, evaluations.texts_of(request)
        evaluations.add(request)
        if self._ceiling is None or not is_new:
            return
        self._ceiling.note_usage(self.usage_file.total())
        if objection := self._ceiling.objection(texts, before_texts):
            log.warning("evaluation %s is not made: %s", request.name, objection)
            evaluations.refuse_evaluation(request.name, objection)

    def _dismiss(self, done_message: worker_messages.Done) -> None:
        """Send Done to every worker; wait for their Goodbyes, and for the Goodbye of the peer that sent Stop."""
        # A client loses unread messages with the connection. Without Done it would wait for a dead broker.
        workers = set(self.dispatcher.registry.by_identity)
        for identity in workers:
            self._send(identity, done_message)
        leaving = workers | self._stoppers
        deadline_s = time.monotonic() + GOODBYE_S
        while leaving and time.monotonic() < deadline_s:
            match self._receive(CHECK_EVERY_S):
                case Received(peer, worker_messages.Goodbye()):
                    leaving.discard(peer)
                case Received(peer, message):
                    self._send(
                        peer,
                        rank_messages.Accepted()
                        if isinstance(message, rank_messages.Stop)
                        else done_message,
                    )

    def _receive_some(self) -> None:
        """Handle the messages of a turn."""
        for received in gathered(self._receive, CHECK_EVERY_S):
            self._handle_safely(received)
            if received.peer not in self._peers:
                self._peers.drop(received.peer)  # drop the tag of a sender that is not enrolled
            if self._stopping is not None:
                return  # `_dismiss` handles the messages behind a Stop

    def _receive(self, timeout_s: float) -> Request | None:
        """Return the next message; None after `timeout_s`, or for a message that is dropped."""
        try:
            workers = self.dispatcher.registry.by_identity
            received = self.server.receive(
                timeout_s, lambda peer: peer in self._peers or peer in workers
            )
        except Malformed as error:
            self._malformed += 1
            log.warning("ignored a malformed message, %d in all: %s", self._malformed, error)
            return None
        except Unlisted as error:
            self._shut_out(error.peer)
            return None
        if received is not None and received.tag:
            self._peers.tags[received.peer] = received.tag
        return received

    def _shut_out(self, peer: bytes) -> None:
        """Refuse a peer whose key was removed while it was connected."""
        reason = "its key was removed from the run's list"
        worker = self.dispatcher.registry.by_identity.get(peer)
        if worker is not None:
            log.warning("refused %s: %s", worker.label, reason)
            self.dispatcher.lose_worker(worker, reason, died=True)
        self._send(peer, worker_messages.Reject(reason))
        self._peers.drop(peer)

    def _write_records(self, now_s: float, *more: JournalRecord) -> bool:
        """Write the ledger's records and `more` to the journal, synced; False while the disk is full."""
        answers = self.dispatcher.answers
        if answers.records and (file := self.answer_journal):
            if not self._takes(lambda: file.append(answers.records), now_s):
                return False
            answers.records = []
        if not self._takes(lambda: self.journal.append([*self.ledger.records, *more]), now_s):
            return False
        self.ledger.records = []
        return True

    def close_journals(self) -> None:
        """Close the files; everything that was acknowledged is on disk."""
        self.journal.close()
        if self.answer_journal:
            self.answer_journal.close()

    def _takes(self, write: Callable[[], None], now_s: float) -> bool:
        """Write to the journal; False while the disk is full; raises DiskFault, TrainingFault."""
        try:
            return self._disk.takes(write, now_s)
        except OSError as error:
            # The next broker cuts off a record that is half written.
            raise DiskFault(
                f"the journal of {self.config.directory} cannot be written: {error}"
            ) from error

    def _send(
        self, peer: bytes, message: rank_messages.FromBroker | None, payload: Sequence[Payload] = ()
    ) -> None:
        if message is None:
            return
        tag = [self._peers.tags[peer]] if peer in self._peers.tags else []
        try:
            self.server.send(peer, message, [*tag, *payload])
        except Undeliverable as error:
            # A lease that could not be delivered is taken back when its worker is given up for silence.
            log.debug("could not deliver %s: %s", type(message).__name__, error)
        except ConfigError as error:
            log.error("could not send %s: %s", type(message).__name__, error)
            if isinstance(message, worker_messages.PrefixTask | worker_messages.ScoreTask):
                self.dispatcher.take_back(peer, message.task)

    def _give_up_lost(self, now_s: float) -> None:
        if now_s - self._counted_s < self.dispatcher.registry.look_every_s:
            return
        self._counted_s = now_s
        self.journal.check()
        for worker, reason in self.dispatcher.registry.lost(now_s):
            self._give_up_worker(worker, reason)

    def _give_up_worker(self, worker: Worker, reason: str) -> None:
        tasks = self.dispatcher.lose_worker(worker, reason, died=True)
        log.error("gave up %s: %s; it held %s", worker.label, reason, tasks or "nothing")
        self._send(worker.identity, worker_messages.Unknown())

    def _handle_safely(self, received: Request) -> None:
        """Handle a message; a fault in it ends its sender, never the process with the run's state."""
        peer, message = received.peer, received.message
        cause = CAUSE.set(peer)
        try:
            self._handle(received)
        except (DiskFault, TrainingFault):
            raise
        except ValueError as error:
            self._refuse(peer, message, str(error))
        except Exception as error:
            name = type(message).__name__
            log.exception("a fault in handling %s", name)
            self._refuse(
                peer,
                message,
                f"the broker failed over this {name} ({error!r}); its log has the trace",
            )
        finally:
            CAUSE.reset(cause)

    def _refuse(self, peer: bytes, message: rank_messages.ToBroker, reason: str) -> None:
        self._malformed += 1
        reason = cut_text(reason)  # it may name what a peer sent
        worker = self.dispatcher.registry.by_identity.get(peer)
        if worker is not None:
            self._reject(worker, reason)
        else:
            log.error(
                "refused %s of a %s: %s", type(message).__name__, self._peers.name(peer), reason
            )
            self._send(peer, worker_messages.Reject(reason))
        # If the fault left the ledger half changed, this raises, and the next broker rebuilds it from the journal.
        self.ledger.check()

    def _handle(self, received: Request) -> None:
        peer, message, now_s = received.peer, received.message, time.monotonic()
        worker = self.dispatcher.registry.by_identity.get(peer)
        key = self._peers.key(peer) or (worker.key if worker is not None else "")
        # An identity belongs to the key that enrolled it: no other client may speak for it.
        if key and (received.client is None or received.client.name != key):
            self._send(
                peer,
                worker_messages.Reject(f"this identity belongs to a process with the key {key!r}"),
            )
            return
        if worker is not None:
            worker.hear(now_s)
        match message:
            case worker_messages.Hello():
                self._hello(received, message, now_s)
            case _ if isinstance(message, rank_messages.FromPeer):
                if peer in self._peers:
                    self._peers.check(peer, message)
                    self._send(peer, *self._answer_peer(peer, message, now_s))
                else:
                    self._send(peer, worker_messages.Unknown())
            case _ if worker is not None:
                self._handle_worker(worker, message, now_s)
            case _:
                # The worker was given up meanwhile. It sends Hello and its result again.
                self._send(peer, worker_messages.Unknown())

    def _hello(self, received: Request, hello: worker_messages.Hello, now_s: float) -> None:
        peer = received.peer
        if reason := why_not(hello.role, received.client):
            self._send(peer, worker_messages.Reject(reason))
            return
        if hello.protocol != PROTOCOL:
            peer_protocol = f"{hello.role} on {hello.host} speaks {hello.protocol}"
            reason = f"this run speaks protocol {PROTOCOL}, {peer_protocol}; use one release"
            self._send(peer, worker_messages.Reject(reason))
            return
        if hello.role == "rank" or hello.role == "operator":
            self._peers.add(peer, hello.role, received.client.name if received.client else "")
            self._send(peer, self.run.welcome(hello.role, self.config))
        else:
            worker = self._enrol(received, hello, now_s)
            self._send(peer, self.run.welcome(worker.name, self.config, worker.beat_s))

    def _enrol(self, received: Request, hello: worker_messages.Hello, now_s: float) -> Worker:
        """Register a worker; one that sends Hello again keeps its name and loses its leases."""
        worker = self.dispatcher.registry.by_identity.get(received.peer)
        if worker is not None:
            self.dispatcher.return_leases(worker)
            worker.join_again()
            return worker
        predecessor = self.dispatcher.registry.predecessor(hello, now_s)
        if predecessor and is_gone(predecessor.host, predecessor.pid):
            self._give_up_worker(predecessor, "its process is gone")
        worker = self.dispatcher.registry.add(received.peer, hello, now_s)
        worker.key = received.client.name if received.client else ""
        log.info("%s joined from %s pid %d", worker.name, hello.host, hello.pid)
        return worker

    def _handle_worker(self, worker: Worker, message: rank_messages.ToBroker, now_s: float) -> None:
        match message:
            case worker_messages.Heartbeat():
                self._heartbeat(worker, message, now_s)
            case worker_messages.Ready():
                self._ready(worker, message, now_s)
            case worker_messages.RowsLeft(tasks):
                for task, rows in tasks:
                    worker.rows_left(task, rows)
            case worker_messages.Prefixes() if worker.role == "rollout":
                # Before the ledger takes it: tokens of unproved weights must change nothing.
                self.versions.check_prefixes(worker, message)
                self.dispatcher.take_prefixes(worker, message, now_s)
                self.outbox.add_ack(worker.identity, message.task)
            case worker_messages.Scores() if worker.role == "scorer":
                self.batches.describe(self.dispatcher.take_scores(worker, message, now_s))
                self.outbox.add_ack(worker.identity, message.task)
            case worker_messages.Refused():
                self.dispatcher.take_refusal(worker, message)
            case worker_messages.Staged(version) if worker.role == "rollout":
                self.versions.staged(worker, version)
            case worker_messages.Installed() if worker.role == "rollout":
                self._send(worker.identity, self.versions.installed(worker, message))
            case worker_messages.Leaving():
                log.info("%s takes no more tasks, %d are open", worker.name, len(worker.leases))
                worker.is_leaving, worker.is_drained = True, False
            case worker_messages.Goodbye(reason):
                log.info("%s left: %s", worker.name, reason)
                self.dispatcher.lose_worker(worker, reason, died=False)
            case _:
                raise ValueError(f"a {worker.role} may not send {type(message).__name__}")
        # Any message may end what a swap waits for: an open lease, or an evaluation.
        self._send(worker.identity, self.versions.grant(worker, now_s))

    def _heartbeat(self, worker: Worker, message: worker_messages.Heartbeat, now_s: float) -> None:
        if worker.role == "scorer":
            name = worker.identity.decode(errors="replace")
            self.usage_file.note_usage(name, message.usage, now_s)
        worker.heartbeat(message, now_s)
        self.dispatcher.reconcile(worker, message.leases, now_s)
        if worker.lost_its_ready(now_s):
            log.warning("%s works, but its Ready was lost: asking again", worker.name)
            self._send(worker.identity, worker_messages.Unknown())
        elif worker.is_drained:
            self._send(worker.identity, worker_messages.Leave())
        else:
            grant = self._grant(worker, message, now_s)
            self._send(worker.identity, worker_messages.Beat(self.versions.news(worker), grant))

    def _grant(
        self, worker: Worker, message: worker_messages.Heartbeat, now_s: float
    ) -> worker_messages.RequestGrant | None:
        """Return what a scorer's demand gets; a rest that began is told to the other scorers at once."""
        if message.demand is None:
            return None
        allowance = self.dispatcher.allowance
        before_s = allowance.rest_s(now_s)
        usage = message.usage or worker_messages.Usage()
        grant = allowance.grant(worker.identity, message.demand, usage, now_s)
        if before_s <= 0.0 < grant.rest_s:
            for other in self.dispatcher.registry.workers_of("scorer"):
                repeated = allowance.repeated_grant(other.identity, now_s)
                if other is not worker and repeated is not None:
                    news = self.versions.news(other)
                    self._send(other.identity, worker_messages.Beat(news, repeated))
        return grant

    def _reject(self, worker: Worker, reason: str) -> None:
        log.error("refused %s: %s", worker.label, reason)
        self._send(worker.identity, worker_messages.Reject(reason))
        self.dispatcher.lose_worker(worker, reason, died=True)

    def _ready(self, worker: Worker, ready: worker_messages.Ready, now_s: float) -> None:
        check_offer(ready)
        section = self.config.engine_section(worker.role)
        if ready.engine != section.engine and not (may_share_run(ready.engine, section.engine)):
            raise ValueError(
                f"its engine is {ready.engine}, the run's {worker.role}.engine is {section.engine}"
            )
        self.run.identity.check(worker.role, ready.digests)
        self.versions.ready(worker, ready)
        worker.take_ready(ready, now_s)
        engine = f"{ready.engine} engine" + (f" ({ready.about})" if ready.about else "")
        version = f", version {ready.version}" if worker.role == "rollout" else ""
        log.info("%s is ready: %d seats, %s%s", worker.name, ready.seats, engine, version)

    def _answer_peer(
        self, peer: bytes, message: rank_messages.ToBroker, now_s: float
    ) -> tuple[rank_messages.FromBroker | None, Sequence[Payload]]:
        """Return the answer to a rank or operator with its payload; None for one that comes later."""
        match message:
            # The batch is sent at the end of a turn, once the journal names its groups.
            case rank_messages.GetBatch():
                self.batches.take_request(peer, message, now_s)
                return None, []
            case rank_messages.GetGroups() | rank_messages.GetEvaluation():
                return self.batches.fetched(message) or (None, [])
            case rank_messages.GetStatus():
                return rank_messages.Status(
                    msgspec.json.encode(document(self._status, self._malformed, now_s))
                ), []
            case rank_messages.IterationDone():
                self.batches.iteration_done(message, now_s)
            case rank_messages.Published(note):
                if not self._published(note, now_s):
                    return None, []  # the publisher asks again
            case rank_messages.Evaluate():
                self._start_evaluation(message)
            case rank_messages.Forget(name):
                self.dispatcher.evaluations.forget(name)
            # Only noted here: `serve` ends its turn, so that the journal holds what was accepted.
            case rank_messages.Stop(reason):
                self._stopping = reason
                self._stoppers.add(peer)
            case rank_messages.HaltRun(reason):
                self.batches.halt(reason)
            case rank_messages.DrainWorker(name):
                worker = self.dispatcher.registry.drain(name)
                log.info("the operator wants %s to leave", worker.label)
                self._send(worker.identity, worker_messages.Leave())
        return rank_messages.Accepted(), []

    def _published(self, note: WeightsNote, now_s: float) -> bool:
        """Announce a version once the journal names it; False while the journal's disk is full."""
        if self.versions.latest == note:
            return True
        probe_of(note)  # what is malformed is refused before anything is written
        if not self._write_records(now_s, VersionPublished(note)):
            return False
        self.versions.publish(note)
        self.dispatcher.note_event(f"version {note.version} was published", now_s)
        for worker in list(self.dispatcher.registry.workers_of("rollout")):
            if objection := self.versions.objection(worker):
                self._reject(worker, objection)
            else:
                self._send(worker.identity, worker_messages.Beat(self.versions.news(worker)))
        return True
