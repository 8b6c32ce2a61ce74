"""The exchange of ranks and operators with the broker, and the unions of its socket."""

from typing import Annotated

from msgspec import Meta, field

from prefixrl.common.wire.messages.fields import (
    MOST_GROUPS,
    MOST_SAMPLES,
    Count,
    Message,
    Name,
    Seconds,
    Text,
    Version,
)
from prefixrl.common.wire.messages.groups import BatchGroup, Prompt, Sampling
from prefixrl.common.wire.messages.weights import WeightsNote
from prefixrl.common.wire.messages.worker import FromWorker, MemoryUse, ToRollout, ToWorker


class GetBatch(Message):
    """A rank's request for a batch; answered by Batch, NotYet, RunOver, Halt or CannotGoOn."""

    iteration: Count
    rank: int
    ranks: int
    is_stopping: bool = False
    """This rank was asked to stop: all ranks halt before the first iteration whose batch no rank holds."""
    memory: MemoryUse | None = None
    """Memory of the rank; None where the system does not tell."""


class GetGroups(Message):
    """A rank's request for the groups of a batch that it trains; answered by Groups."""

    iteration: Count
    groups: Annotated[tuple[Count, ...], Meta(max_length=MOST_GROUPS)]
    """Indices into `Batch.groups`, ascending."""


class IterationDone(Message):
    """Every rank finished the optimiser steps of this iteration; its groups are trained."""

    iteration: Count
    optimizer_steps: Count
    relative_ess: Seconds | None = None
    """Effective sample size of tokens of age 1 and more, over that of age 0; None without old ones."""


class Published(Message):
    """The weight server holds a new version."""

    note: WeightsNote


class Evaluate(Message, kw_only=True):
    """A request to judge every prompt, with prefixes of one version or with one given prefix."""

    name: Name
    version: Version
    """-1: no adapter; `prefix_tokens` stands before every completion (and may be empty). Rollouts that reach a version
    to be evaluated stay at it until its prefixes are sampled."""
    prefix_tokens: bytes
    prompts: tuple[Prompt, ...]
    prefix_sampling: Sampling
    completion_sampling: Sampling
    samples: Annotated[int, Meta(ge=1, le=MOST_SAMPLES)] = 1
    """Rows per prompt, each with draws of its own."""
    prefix_text: str | None = None
    """`prefix_tokens` as text, with the meaning of `Row.text`."""


class GetEvaluation(Message):
    """A request for EvaluationProgress."""

    name: Name


class Forget(Message):
    """A finished evaluation was fetched: the broker need not hold it any longer."""

    name: Name


class GetStatus(Message):
    """A request for Status."""


class Stop(Message):
    """The operator or rank 0 ends the run; workers get Done. Accepted is answered by Goodbye."""

    reason: Text


class HaltRun(Message):
    """The operator wants all ranks to save and end; answered by Accepted."""

    reason: Text


class DrainWorker(Message):
    """The operator wants a worker to leave; answered by Accepted."""

    worker: Name


class Batch(Message, kw_only=True):
    """The facts that every rank plans an iteration by."""

    iteration: int
    total_iterations: int
    seed: int
    groups: tuple[BatchGroup, ...]
    """Every group of the iteration, in training order."""
    waited_s: dict[str, float]
    """Seconds the ranks waited for this batch, by cause: rollouts, scorers, or the report of another rank."""


class Groups(Message):
    """Groups of a batch; payload frames: a ScoredGroup per index."""

    iteration: int
    groups: tuple[int, ...]


class NotYet(Message):
    """There is no batch yet; names what the broker waits for and from whom."""

    iteration: int
    waiting_for: str


class RunOver(Message):
    """There is no such iteration: the data is used up, or the run ends in order for another reason."""

    iterations: int
    reason: str = ""
    """That reason; "" where the data is used up."""


class Halt(Message):
    """A rank was asked to stop: all of them save at this iteration and end."""

    iteration: int


class CannotGoOn(Message):
    """There will be no such batch; every rank ends with this reason."""

    reason: str


class EvaluationProgress(Message, kw_only=True):
    """The state of an evaluation. Payload frames: the scored groups, once complete."""

    name: str
    total: int
    judged: int = field(name="done")
    failed: int
    unsampled: int = 0
    """Groups whose prefixes of a pinned version are still missing."""
    causes: tuple[tuple[int, str], ...] = ()
    """(index into `prompts`, cause) of every failed group."""
    is_halting: bool = False
    """The operator wants the ranks to save and end: no rank waits for the rest."""


class Status(Message):
    """The state of the run, for the live view and for programs."""

    document: bytes
    """JSON."""


class Accepted(Message):
    """The request was carried out."""


FromOperator = GetStatus | Stop | HaltRun | DrainWorker
FromPeer = (
    GetBatch
    | GetGroups
    | IterationDone
    | Published
    | Evaluate
    | GetEvaluation
    | Forget
    | FromOperator
)
"""Requests of ranks, among them all that operators may make."""
_ToLearner = (
    Batch | Groups | NotYet | RunOver | Halt | CannotGoOn | EvaluationProgress | Status | Accepted
)
ToBroker = FromWorker | FromPeer
FromBroker = ToWorker | ToRollout | _ToLearner
