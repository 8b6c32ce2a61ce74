"""A rank's connection to the broker; every wait has a deadline and names what it waits for."""

import contextlib
import logging
import time
from collections.abc import Sequence
from typing import cast

import msgspec

from prefixrl.common.errors import NothingToTrain, PeerLost
from prefixrl.common.host.memory_use import memory_now
from prefixrl.common.run.status import StatusDocument
from prefixrl.common.wire.address import Address
from prefixrl.common.wire.messages.fields import cut_text
from prefixrl.common.wire.messages.groups import ScoredGroup
from prefixrl.common.wire.messages.learner import (
    Accepted,
    Batch,
    CannotGoOn,
    Evaluate,
    EvaluationProgress,
    Forget,
    GetBatch,
    GetEvaluation,
    GetGroups,
    GetStatus,
    Groups,
    Halt,
    IterationDone,
    NotYet,
    Published,
    RunOver,
    Status,
    Stop,
)
from prefixrl.common.wire.messages.weights import WeightsNote
from prefixrl.common.wire.messages.worker import Done
from prefixrl.common.wire.requester import Requester
from prefixrl.learner.run.stop import StopSignal

log = logging.getLogger(__name__)

REPLAY_S = 1800.0
ANSWER_S = REPLAY_S + 600.0
"""Longest wait of a rank for an answer: its broker may be starting, after rank 0 has read a checkpoint."""
LOG_AFTER_S = 30.0
STOP_S = 15.0
"""Longest wait for the answer to a Stop, a few times `requester.ASK_AGAIN_S`; later the broker counts as gone."""

_Answer = Batch | RunOver | Halt | CannotGoOn | NotYet | Done
_BATCH_ANSWERS = cast("type[_Answer]", _Answer)


class _Unanswered(Exception):
    """A stop came while the broker does not answer."""


class BrokerClient:
    """A connection for one thread. Repeating a request changes nothing at the broker."""

    def __init__(self, address: Address, stop: StopSignal | None = None) -> None:
        """`stop`: ends the wait for an answer if its servers ended for good; it learns of an operator's stop."""
        self._address = address
        self._stop = stop or StopSignal()
        self._may_give_up = False
        """True while a stop ends the wait for an answer."""
        self._requester = Requester(address, "rank", ANSWER_S, self._check_wait)
        self._ask = self._requester.ask_broker

    def next_batch(self, request: GetBatch, timeout_s: float) -> Batch | RunOver | Halt:
        """Return a batch, or what every rank gets instead; raises PeerLost, NothingToTrain. A stop halts all."""
        from_s, waiting_for, iteration = time.monotonic(), "", request.iteration
        log_after_s = LOG_AFTER_S
        request = msgspec.structs.replace(request, memory=memory_now())
        while True:
            request = msgspec.structs.replace(request, is_stopping=self._stop.is_requested())
            try:
                # Of several ranks another one may have the batch already.
                self._may_give_up = request.ranks == 1
                answer, _ = self._requester.ask_broker(request, _BATCH_ANSWERS)
            except _Unanswered:
                log.warning("the broker does not answer: this rank stops without it")
                return Halt(iteration)
            finally:
                self._may_give_up = False
            match answer:
                case RunOver() | Halt():
                    return answer
                case Done(reason):
                    if request.rank == 0:
                        raise PeerLost(f"the broker ended, and no rank had stopped it: {reason}")
                    return RunOver(iteration)  # rank 0 stopped the run before this one asked
                case CannotGoOn(reason):
                    raise NothingToTrain(reason)
                case Batch() if answer.iteration == iteration:
                    return answer
                case NotYet():
                    waiting_for = answer.waiting_for
            waited_s = time.monotonic() - from_s
            if waiting_for and waited_s >= log_after_s:
                log.info("iteration %d has waited %.0f s for %s", iteration, waited_s, waiting_for)
                log_after_s = 2 * max(waited_s, log_after_s)
            if waited_s > timeout_s:
                raise PeerLost(
                    f"iteration {iteration} got no batch within {timeout_s:g} s; it waits for {waiting_for}"
                )

    def _check_wait(self) -> None:
        self._stop.check_servers()
        if self._may_give_up and self._stop.is_requested():
            raise _Unanswered

    def groups(self, iteration: int, indices: Sequence[int]) -> dict[int, ScoredGroup]:
        """Return groups of the batch of an iteration, by index in the batch."""
        answer, payload = self._ask(GetGroups(iteration, tuple(indices)), Groups)
        return dict(zip(answer.groups, _groups(payload), strict=True))

    def iteration_done(
        self, iteration: int, optimizer_steps: int, relative_ess: float | None = None
    ) -> None:
        """Report a finished iteration, and the relative effective sample size of its old samples."""
        self._ask(IterationDone(iteration, optimizer_steps, relative_ess), Accepted)

    def published(self, note: WeightsNote) -> None:
        """Announce a version that workers can fetch now."""
        self._ask(Published(note), Accepted)

    def evaluate(self, request: Evaluate) -> None:
        """Start an evaluation; repeating it changes nothing."""
        self._ask(request, Accepted)

    def evaluation(self, name: str) -> tuple[EvaluationProgress, list[ScoredGroup]]:
        """Return the progress of an evaluation and, once finished, its groups; `total` -1: unknown."""
        answer, payload = self._ask(GetEvaluation(name), EvaluationProgress)
        self._stop.is_halting = answer.is_halting
        return answer, _groups(payload)

    def forget(self, name: str) -> None:
        """Let the broker free an evaluation that was fetched."""
        self._ask(Forget(name), Accepted)

    def status(self) -> StatusDocument:
        """Return the status document of the run."""
        return msgspec.json.decode(self._ask(GetStatus(), Status)[0].document, type=StatusDocument)

    def stop(self, reason: str) -> None:
        """End the run: the broker stops every worker and itself. No answer is logged, no error."""
        try:
            # Not by `_requester`, which waits for a broker to come back: this broker need not come back.
            with contextlib.closing(
                Requester(self._address, "rank", STOP_S, self._stop.check_servers)
            ) as stopping:
                stopping.ask_broker(Stop(cut_text(reason)), Accepted)
                stopping.leave(reason)
        except PeerLost as error:
            log.warning("%s; perhaps workers are not stopped", error)

    def close(self) -> None:
        """Close the connection."""
        self._requester.close()


def _groups(payload: list[bytes]) -> list[ScoredGroup]:
    return [msgspec.msgpack.decode(frame, type=ScoredGroup) for frame in payload]
