"""A learner rank's side of the work link; every wait has a deadline and names what is waited for."""

import logging
import time
from collections.abc import Callable
from typing import cast

import msgspec

from prefixrl.common.errors import PeerLost
from prefixrl.common.messages import (
    Accepted,
    Batch,
    Evaluate,
    EvaluationProgress,
    GetBatch,
    GetEvaluation,
    GetStatus,
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

log = logging.getLogger(__name__)

_BATCH_ANSWERS = cast("type[Batch | RunOver | NotYet]", Batch | RunOver | NotYet)


class BrokerClient:
    """One connection, used by one thread. Every request may be repeated: the broker treats a repetition as the same."""

    def __init__(self, endpoint: str) -> None:
        self._requester = Requester(endpoint, "rank")
        self._ask = self._requester.ask

    def next_batch(
        self, request: GetBatch, timeout_s: float, stopped: Callable[[], bool]
    ) -> tuple[Batch, list[ScoredGroup]] | None:
        """A rank's shard, or None when the run is over or stopped; raises PeerLost naming what was waited for."""
        deadline_s, waiting_for, iteration = time.monotonic() + timeout_s, "", request.iteration
        while not stopped():
            answer, payload = self._requester.ask(request, _BATCH_ANSWERS)
            if isinstance(answer, RunOver):
                return None
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
        return None

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

    def status(self) -> bytes:
        """The run's status document, JSON."""
        return self._ask(GetStatus(), Status)[0].document

    def stop(self, reason: str) -> None:
        """End the run: the broker tells every worker to go, and goes."""
        self._ask(Stop(reason), Accepted)

    def close(self) -> None:
        """Close the connection."""
        self._requester.close()
