"""A learner rank's side of the work link; every wait has a deadline and names what is waited for."""

import logging
import time
from collections.abc import Callable
from typing import cast

import msgspec

from prefixrl.common.errors import NothingToTrain, PeerLost
from prefixrl.common.messages import (
    Accepted,
    Batch,
    CannotGoOn,
    Done,
    Evaluate,
    EvaluationProgress,
    Forget,
    GetBatch,
    GetEvaluation,
    GetStatus,
    Halt,
    IterationDone,
    NotYet,
    Published,
    RunOver,
    ScoredGroup,
    Status,
    Stop,
    WeightsNote,
)
from prefixrl.common.requester import Requester
from prefixrl.common.status import Document

log = logging.getLogger(__name__)

REPLAY_S = 1800.0
"""Longest that a broker may take to be there: it replays its journal first."""
ANSWER_S = REPLAY_S + 600.0
"""Longest wait of a rank for any answer: its broker may be starting, after rank 0 has read a checkpoint."""
STOP_S = 15.0
"""A broker that does not answer a Stop for so long is gone, and nobody starts it again; a few times `requester.ASK_AGAIN_S`."""

_Answer = Batch | RunOver | Halt | CannotGoOn | NotYet | Done
_BATCH_ANSWERS = cast("type[_Answer]", _Answer)


class BrokerClient:
    """One connection, used by one thread. Every request may be repeated: the broker treats a repetition as the same."""

    def __init__(self, endpoint: str, watch: Callable[[], None] = lambda: None) -> None:
        """`watch`: called while an answer is waited for; may raise what makes waiting useless."""
        self._endpoint, self._watch = endpoint, watch
        self._requester = Requester(endpoint, "rank", ANSWER_S, watch)
        self._ask = self._requester.ask

    def next_batch(
        self, request: GetBatch, timeout_s: float, stopped: Callable[[], bool]
    ) -> tuple[Batch, list[ScoredGroup]] | RunOver | Halt:
        """A rank's shard, or what every rank is told instead of one.

        `stopped` is passed on to the broker, which halts all ranks at the same iteration.

        Raises:
            PeerLost: naming what was waited for.
            NothingToTrain: the filter lets too little through, or too much fails.
        """
        deadline_s, waiting_for, iteration = time.monotonic() + timeout_s, "", request.iteration
        while True:
            request = msgspec.structs.replace(request, is_stopping=stopped())
            answer, payload = self._requester.ask(request, _BATCH_ANSWERS)
            if isinstance(answer, RunOver | Halt):
                return answer
            if isinstance(answer, Done):
                return _over(request, answer.reason)
            if isinstance(answer, CannotGoOn):
                raise NothingToTrain(answer.reason)
            if isinstance(answer, Batch) and answer.iteration == iteration:
                decoder = msgspec.msgpack.Decoder(ScoredGroup)
                return answer, [decoder.decode(frame) for frame in payload]
            if isinstance(answer, NotYet) and answer.waiting_for != waiting_for:
                waiting_for = answer.waiting_for
                log.info("iteration %d waits for %s", iteration, waiting_for)
            if time.monotonic() > deadline_s:
                raise PeerLost(
                    f"iteration {iteration} got no batch within {timeout_s:g} s; it waits for {waiting_for}"
                )

    def iteration_done(self, iteration: int, optimizer_steps: int) -> None:
        """Report that every rank finished an iteration."""
        self._ask(IterationDone(iteration, optimizer_steps), Accepted)

    def published(self, note: WeightsNote) -> None:
        """Announce a version that workers can fetch now."""
        self._ask(Published(note), Accepted)

    def evaluate(self, request: Evaluate) -> None:
        """Start an evaluation; repeating it changes nothing."""
        self._ask(request, Accepted)

    def evaluation(self, name: str) -> tuple[EvaluationProgress, list[ScoredGroup]]:
        """How far an evaluation is; its groups once it is finished. `total` is -1 where the broker does not know it."""
        answer, payload = self._ask(GetEvaluation(name), EvaluationProgress)
        decoder = msgspec.msgpack.Decoder(ScoredGroup)
        return answer, [decoder.decode(frame) for frame in payload]

    def forget(self, name: str) -> None:
        """Free what the broker holds of an evaluation that was fetched."""
        self._ask(Forget(name), Accepted)

    def status(self) -> Document:
        """What the broker says of the run."""
        return msgspec.json.decode(self._ask(GetStatus(), Status)[0].document, type=Document)

    def stop(self, reason: str) -> None:
        """End the run: the broker tells every worker to go, and goes; one that does not answer is warned of, no error."""
        try:
            # Of its own: the others' patience is for a broker that comes back, and this one need not.
            stopping = Requester(self._endpoint, "rank", STOP_S, self._watch)
        except PeerLost as error:
            log.warning("%s; workers are not sent home", error)
            return
        try:
            stopping.ask(Stop(reason), Accepted)
            stopping.leave(reason)
        except PeerLost as error:
            log.warning("%s; perhaps workers are not sent home", error)
        finally:
            stopping.close()

    def close(self) -> None:
        """Close the connection."""
        self._requester.close()


def _over(request: GetBatch, reason: str) -> RunOver:
    """What Done means to a rank: rank 0 has said Stop, once no rank is to train any more, before this one had asked.

    Raises:
        PeerLost: this is rank 0, and somebody else ended the broker.
    """
    if request.rank == 0:
        raise PeerLost(f"the broker goes, and no rank told it to: {reason}")
    return RunOver(request.iteration)
