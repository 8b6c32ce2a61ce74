"""Every type that crosses a socket or stands in the journal: a tagged union per direction.

Token ids travel as little-endian int32 bytes, logprobs as little-endian float32 bytes (`packing.py` writes, reads and
checks them). A worker (W) and the broker (B) exchange, in this order:

    W Hello      ─▶ B Welcome | Reject       the worker receives the run's resolved config and loads its model
    W Ready      ─▶ B                        the broker compares digests; its room for rows becomes credit
    B PrefixTask | ScoreTask ─▶ W            a lease: Heartbeat renews it; Prefixes, Scores or Refused end it
    B Ack        ─▶ W                        the result is held (Scores: in the journal); until then it is sent again
    W RowsLeft   ─▶ B                        rows of a lease have ended: their credit returns before its result
    B Beat       ─▶ W                        answers each Heartbeat with the newest published version
    W Staged     ─▶ B Swap ─▶ W Installed    a rollout holds new weights, may swap, has scored the probe
    B ProbeUnclear ─▶ W Installed            the probe cannot tell versions apart: with a checksum of the weights, too
    B Proved | ProbeFailed   ─▶ W            its samples count, or are dropped and the weights fetched again
    B Leave      ─▶ W                        the operator drains it
    W Leaving    ─▶ B                        it was asked to stop: no new task; Goodbye follows the last open one

Learner ranks and operators use the same socket: GetBatch, GetGroups, Published, Evaluate, GetStatus and others. In
this file: parts; worker to broker; broker to worker; rank or operator to broker; broker to rank or operator; weights.
"""

from collections import Counter
from statistics import fmean
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

PROTOCOL = 13
"""Number of the wire format, raised whenever a message changes; both sides must hold the same one."""

VERSIONS_KEPT = 1024
"""Newest versions whose digests are known: more than any window, evaluation or sleeping worker spans."""
UNPROVED = -1
"""Value in place of a version while no version may be claimed."""

Role = Literal["rollout", "scorer", "rank", "operator"]
Finish = Literal["eos", "length", "error"]
VerdictStatus = Literal["ok", "no_answer", "parse_fail", "timeout", "truncated", "no_gold", "error"]
UNJUDGED: frozenset[VerdictStatus] = frozenset({"error", "truncated", "no_gold"})
"""Statuses without a reward: the verifier failed, a cut text is masked, there is no gold answer."""
_VerifierFault = Literal["too long for a child", "gold answer unreadable", "verifier raised", "process died"]
_SandboxFault = Literal["sandbox refused", "sandbox failed", "sandbox overran"]
_FunctionFault = Literal["function raised", "function overran", "function returned no reward"]
_StepFault = Literal["too long for the process reward model", "steps without a score"]
Fault = Literal["", "question not rendered", _VerifierFault, _SandboxFault, _FunctionFault, _StepFault, "no completion"]
"""Cause of a missing verdict, "" where there is one. A closed list, so that counts by cause stay few."""
Kind = Literal["train", "eval"]
CodeMode = Literal["none", "answers", "tests"]
"""Programs in answers that are run; `data.code` explains the values."""


MOST_NAME_CHARS, MOST_TEXT_CHARS = 256, 4096
Name = Annotated[str, Meta(max_length=MOST_NAME_CHARS)]
"""A name, digest or host; longer ones are refused where they arrive."""
Text = Annotated[str, Meta(max_length=MOST_TEXT_CHARS)]
"""A reason, state or short answer; its sender cuts it with `cut_text`."""
Count = Annotated[int, Meta(ge=0, le=2**53)]
MOST_ROWS = 8192
"""More rows than any engine takes at once; a worker that offers more would take all there is to do."""
MOST_GROUPS = 2**20
"""Groups that a rank may ask for at once."""
MOST_STEPS = 4096
"""Most steps of an answer that a process reward model scores."""
MOST_LEASES_LISTED = 2**15
"""A worker holds fewer tasks than rows, and the broker gives it a small multiple of `MOST_ROWS` at most."""
Version = Annotated[int, Meta(ge=UNPROVED, le=2**31 - 1)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]
"""A time or another figure that is not negative; neither NaN nor infinite."""


def encodable(text: str) -> str:
    """Return a text without lone surrogates, which no message can hold."""
    return text.encode(errors="replace").decode()


def cut_text(text: str, most: int = MOST_TEXT_CHARS) -> str:
    """Return a text short enough to be sent as `Text`, in characters that can be encoded."""
    return encodable(text if len(text) <= most else text[: most - 4] + " ...")


class _Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True, gc=False):
    """A message of one of the unions below; its tag is its class name.

    Messages and their parts are trees of plain values: no cycle can hold one, so the garbage collector need not look.
    """


class _Leased(_Message, frozen=True):
    """A message about one lease of a task."""

    task: Name
    """Its name, which no other lease ever has."""


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A piece of a message."""


# --- parts ----------------------------------------------------------------------------------------------------------


class Sampling(_Part, frozen=True, kw_only=True):
    """All settings of an engine's draws; a model's generation_config never leaks in."""

    temperature: Annotated[float, Meta(ge=0.0, le=1e3)]
    """0 decodes greedily."""
    max_new_tokens: Annotated[int, Meta(ge=1, le=2**24)]
    top_k: Count = 0
    """0 for all tokens."""
    top_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 1.0
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0


class ModelDigests(_Part, frozen=True):
    """Digests of what a worker loaded; a worker that differs from its role is refused."""

    model: Name
    tokenizer: Name
    chat_template: Name
    reward_function: Name = ""
    """Digest of the file of `reward.function`; "" without one and for rollouts."""
    process_model: Name = ""
    """Digest of the model of `scorer.prm`; "" without one and for rollouts."""


class Prompt(_Part, frozen=True):
    """One problem as the broker hands it to workers; each renders it with its own tokenizer."""

    prompt_id: str
    question: str
    gold: str
    """Gold answer; empty only in evaluations of problems without one, whose answers get no verdict."""
    code: CodeMode = "none"
    """Programs in its answers that are run."""
    system: str = ""
    """The row's own system turn; "" where it has none, or none is asked."""
    source: str = ""
    """Name that its figures are listed under: its source, and `/FAMILY` where these are few."""


class GroupTask(_Part, frozen=True):
    """One group to sample, and the seed from which the seed of every row is derived."""

    seq: Count
    prompt: Prompt
    seed: int


class VersionSpan(_Part, frozen=True):
    """Consecutive tokens of a row that one version of the adapter sampled."""

    version: Version
    weights_digest: Name
    tokens: Count
    """Number of these tokens, at least one."""


class Row(_Part, frozen=True, kw_only=True):
    """One sampled prefix; in direct mode one whole answer."""

    tokens: bytes
    """int32 ids, shape (tokens,), exactly as sampled; an EOS that ended the row is among them."""
    logprobs: bytes
    """float32, shape (tokens,), under the distribution from which each token was sampled."""
    finish: Finish
    spans: tuple[VersionSpan, ...]
    """Versions of the tokens: every token once, versions strictly rising. Several only with `rollout.swap =
    "in_flight"`; empty where no adapter wrote the row."""
    text: str | None = None
    """Prefix mode: the tokens as text of the adapter's tokenizer, special tokens included, without the stop at the end.
    A target whose tokenizer reads another text in the tokens continues this text instead."""
    has_control: bool = False
    """True if a special token that is no stop is among the tokens; never where these are masked."""


class GroupPrefixes(_Part, frozen=True, kw_only=True):
    """All rows of one group, the result of one engine call."""

    seq: Count
    prompt: Prompt
    seed: int
    prompt_tokens: bytes
    """int32 ids of the rendered prompt the adapter saw; empty for rows that no adapter wrote."""
    rows: tuple[Row, ...]
    error: Text = ""
    """Reason why the group could not be sampled (an over-long prompt, say); `rows` is then empty."""


_Score = Annotated[float, Meta(ge=0.0, le=1.0)]


class StepScores(_Part, frozen=True):
    """The scores of a process reward model for one text, and the verdict of the verifier."""

    outcome: _Score
    """The verifier's reward; that of the text holds the scores too."""
    scores: Annotated[tuple[_Score, ...], Meta(max_length=MOST_STEPS)]
    """Probability that a step is good, given those before it; none for a text without steps."""
    ends: Annotated[tuple[Count, ...], Meta(max_length=MOST_STEPS)]
    """Tokens of the answer up to the end of each step: in direct mode of the row, else of prefix and completion in the
    target's tokens. Empty where the text alone is known: an endpoint returned no ids, or a cache."""


class TextVerdict(_Part, frozen=True, kw_only=True):
    """The verdict on one text: the target's completion, in direct mode the adapter's answer."""

    reward: float
    """In [0, 1]; meaningless where the text is not judged, which is never trained."""
    status: VerdictStatus
    extracted: Text
    """The answer found in the text; with status `error` the reason, where one is known."""
    finish: Finish
    """End of the text that was judged; `length`: it was cut. In direct mode a cut answer has reward 0."""
    completion_tokens: Count
    """Tokens the scorer's engine wrote: 0 in direct mode, and where the completion was in its cache."""
    elapsed_ms: Count
    completion: str = ""
    """The whole text judged, in evaluations and with `scorer.keep_completions`; else empty."""
    fault: Fault = ""
    """Kind of failure where the status is `error`."""
    was_text: bool = False
    """True if the prefix reached the target as text: its tokenizer is of another family than the adapter's."""
    was_cached: bool = False
    """True if the scorer had this greedy completion already."""
    is_answered: bool = False
    """True if the prefix alone has an answer in a box already."""
    process: StepScores | None = None
    """With `scorer.prm` the scores in `reward`; None for cut texts whose reward is 0. In evaluations
    beside `reward`, where a problem has several answers; else None."""

    @property
    def is_judged(self) -> bool:
        """True if `reward` has a meaning."""
        return self.status not in UNJUDGED

    @property
    def outcome(self) -> float:
        """The verifier's reward, without scores of steps."""
        return self.process.outcome if self.process else self.reward


class Verdict(TextVerdict, frozen=True, kw_only=True):
    """The verdict on one row: that of its text, or that of its continuations together."""

    continuations: tuple[TextVerdict, ...] = ()
    """With `scorer.continuations` > 1 one per continuation, in order; else empty."""

    @property
    def texts(self) -> tuple[TextVerdict, ...]:
        """One verdict per text of the row."""
        return self.continuations or (self,)

    @property
    def outcome(self) -> float:
        """The verifier's reward; of several continuations the mean over the judged ones."""
        judged = [each for each in self.continuations if each.is_judged]
        return fmean(each.outcome for each in judged) if judged else super().outcome


class ScoredGroup(_Part, frozen=True, kw_only=True):
    """A group with a verdict per row, and the prefixes judged, so that nothing is joined by id."""

    prefixes: GroupPrefixes
    version: Version
    """The adapter's when it wrote the oldest token of the task; -1 where no adapter wrote any."""
    weights_digest: Name
    verdicts: tuple[Verdict, ...]
    scorer: Name
    sampled_s: Seconds = 0.0
    scoring_s: Seconds = 0.0
    """Seconds that the rollout (`sampled_s`) and the scorer spent on the tasks that held the group."""

    @property
    def texts(self) -> tuple[TextVerdict, ...]:
        """A verdict per text: one per row, or `scorer.continuations` of them."""
        if not any([row.continuations for row in self.verdicts]):
            return self.verdicts
        return tuple(text for row in self.verdicts for text in row.texts)

    @property
    def faults(self) -> dict[str, int]:
        """Number of texts without a verdict, by the kind of failure."""
        found = [each.fault for each in self.texts if each.status == "error"]
        return dict(Counter(found)) if found else {}


class StageTimes(_Part, frozen=True):
    """Seconds a group spent in each stage, from its first token to the iteration that trains it."""

    sampling_s: float
    queued_s: float
    """Sampled, and at no scorer."""
    scoring_s: float
    waiting_s: float
    """Scored, and in no iteration."""


class BatchGroup(_Part, frozen=True, kw_only=True):
    """The facts about a group that every rank needs for baselines and the plan."""

    seq: int
    prompt_id: str
    version: int
    weights_digest: str
    lengths: tuple[tuple[int, int], ...]
    """(prompt tokens, prefix tokens) per row that can be trained."""
    rewards: tuple[float, ...]
    """One per row that can be trained; rows without a verdict are left out."""
    stages: StageTimes
    statuses: dict[VerdictStatus, int]
    """Texts of all its rows by their verdict: one per row, or `scorer.continuations` of them."""
    completion_tokens: int = 0
    """Tokens of the target over these rows."""
    truncated: int = 0
    """Judged texts of these rows that a length limit cut."""
    cached: int = 0
    """Judged texts of these rows that a scorer had in its cache."""
    as_text: int = 0
    """Rows, of these, whose prefix reached the target as text."""
    answered: int = 0
    """Rows, of these, whose prefix alone has an answer already."""
    with_control: int = 0
    """Rows, of these, with a special token that is no stop."""
    outcomes: tuple[float, ...] = ()
    """With `scorer.prm` the verifier's reward of each of these rows; else empty."""
    steps: int = 0
    """Scored steps of the judged texts."""
    step_score_sum: float = 0.0
    texts: tuple[int, ...] = ()
    """A hash of each row's tokens, of 63 bits: equal where the adapter wrote the same."""
    source: str = ""
    """`Prompt.source` of its prompt."""

    @property
    def judged(self) -> int:
        """Number of texts with a reward."""
        return sum(count for status, count in self.statuses.items() if status not in UNJUDGED)


class WeightsNote(_Part, frozen=True):
    """One published version: what a worker must fetch and how its installation is proved."""

    version: Version
    digest: Name
    probe_tokens: bytes = b""
    """int32 ids of the rows that the engine scores after installing, end to end; scorers get none."""
    probe_logprobs: bytes = b""
    """The learner's logprobs, at temperature 1, of the scored tokens of every row, under the published weights."""
    probe_rows: tuple[tuple[Count, Count], ...] = ()
    """Tokens of each row: those given, and those scored after them. Empty: one row, scored but for its first."""


Proof = Literal["digest", "change", "checksum"]
"""Evidence that an engine holds a version (docs/weights.md)."""


class Before(_Part, frozen=True):
    """The version that an engine proved last, and its own logprobs of the probe with it."""

    version: Version
    digest: Name
    probe_logprobs: bytes


class EngineChecksum(_Part, frozen=True):
    """Checksum of the weights that an engine computes with."""

    value: Name
    follows: Literal["snapshot", "other", "unknown"]
    """Equal to what follows from the installed snapshot, not equal, or in a layout that cannot be told from it."""
    before: Name = ""
    """Checksum before the installation, "" where it was not made."""
    layout: Name = ""
    """Name of the layout: weights in the same one have the same checksum."""


class Usage(_Part, frozen=True, kw_only=True):
    """A scorer's use of its target's endpoint since its start; the endpoint counts the tokens."""

    requests: Count = 0
    """Requests that were answered."""
    prompt_tokens: Count = 0
    completion_tokens: Count = 0
    retries: Count = 0
    """Requests that failed and were, or will be, made again."""
    limited_s: Seconds = 0.0
    """Seconds in which some row waited for a rate limit."""


class MemoryUse(_Part, frozen=True, kw_only=True):
    """The memory of a process, as Linux counts it."""

    resident_bytes: Count
    own_bytes: Count
    """The part that no other process has."""
    share_bytes: Count
    """Its own, and of pages of several processes an equal part."""


# --- worker to broker -----------------------------------------------------------------------------------------------


class Hello(_Message, frozen=True, kw_only=True):
    """The first message of every connection, sent again when the broker answers Unknown."""

    protocol: int
    role: Role
    incarnation: Name
    """Random per process: a restarted worker is another worker."""
    host: Name
    pid: Count
    number: Count | None = None
    """The number that a worker wants in its name: that of its starter, or of an earlier Welcome. None: any."""


class Ready(_Message, frozen=True, kw_only=True):
    """The model is loaded: how many rows it takes at once, and what exactly was loaded."""

    seats: int
    """Rows that it works on at once."""
    room: int
    """Rows that it takes before they end; those beyond the seats wait in the engine, so that no seat is left empty."""
    takes_runs: bool
    """True if a task's groups share a forward, which then takes all seats; else it is given a group at a time."""
    digests: ModelDigests
    version: Version
    """Installed version: 0 for the initial adapter, UNPROVED until a probe has passed and for scorers."""
    weights_digest: Name
    engine: Name
    about: Text = ""
    """The engine's own choices, in words."""


class Heartbeat(_Message, frozen=True, kw_only=True):
    """A sign of life, sent on a clock, with figures of the work loop: a hung loop shows."""

    progress: Count
    """Grows with every token, verification and loading step; for a limited time also while an endpoint is out."""
    busy_row_s: Seconds
    """Row-seconds in a seat since its start."""
    leases: Annotated[tuple[Name, ...], Meta(max_length=MOST_LEASES_LISTED)]
    state: Text
    usage: Usage | None = None
    """None unless the engine uses an endpoint."""
    waiting_rows: Count = 0
    """Rows at the engine that wait for a seat."""
    tokens: Count = 0
    """Tokens that the engine has written."""
    memory: MemoryUse | None = None
    """None where the system does not tell."""


class RowsLeft(_Message, frozen=True):
    """The rows of open tasks that have not ended at the engine."""

    tasks: Annotated[tuple[tuple[Name, Count], ...], Meta(max_length=MOST_LEASES_LISTED)]
    """Name and rows of every task of which some have ended since the message before."""


class Prefixes(_Leased, frozen=True, kw_only=True):
    """The result of a PrefixTask."""

    kind: Kind
    version: Version
    """Version of the oldest token; the task's version where no group could be sampled."""
    weights_digest: Name
    groups: tuple[GroupPrefixes, ...]
    elapsed_s: Seconds


class Scores(_Leased, frozen=True):
    """The result of a ScoreTask."""

    kind: Kind
    groups: tuple[ScoredGroup, ...]


class Refused(_Leased, frozen=True):
    """A lease that the worker hands back without a result (revoked, leaving, wrong version)."""

    reason: Text


class Staged(_Message, frozen=True):
    """A rollout holds verified weights of this version in memory and asks to swap."""

    version: Version


class Installed(_Message, frozen=True):
    """A rollout installed a version and scored the probe with its engine."""

    version: Version
    digest: Name
    probe_logprobs: bytes
    """float32, one per scored token of the probe."""
    before: Before | None = None
    """None where no version was proved with this probe."""
    checksum: EngineChecksum | None = None


class Leaving(_Message, frozen=True):
    """The worker takes no new task, finishes what it can of the open ones, then says Goodbye."""


class Goodbye(_Message, frozen=True):
    """The peer leaves on purpose; its leases go back at once."""

    reason: Text


# --- broker to worker -----------------------------------------------------------------------------------------------


class Welcome(_Message, frozen=True, kw_only=True):
    """The answer to a Hello; ranks and operators get it too."""

    protocol: int
    run_id: str
    worker: str
    """Name the broker gives this process in logs and messages, for example rollout-3."""
    config_json: str
    weights_endpoint: str
    weights_door: str = ""
    """Endpoint of the same server for workers of this user on its host, without encryption."""


class Reject(_Message, frozen=True):
    """The peer must not work in this run; its process ends with this reason."""

    reason: str


class Unknown(_Message, frozen=True):
    """The broker does not know the sender, after a restart or a long silence: send Hello again."""


class Beat(_Message, frozen=True):
    """The answer to a Heartbeat. It repeats the current state, so a lost one costs nothing."""

    latest: WeightsNote | None
    """Newest published version; None before the first publication."""


class PrefixTask(_Leased, frozen=True, kw_only=True):
    """A lease on groups to sample."""

    kind: Kind
    version: int
    """Version the worker must have installed; it refuses any other."""
    groups: tuple[GroupTask, ...]
    rows_per_group: int
    sampling: Sampling


class ScoreTask(_Leased, frozen=True, kw_only=True):
    """A lease on sampled groups to judge."""

    kind: Kind
    version: int
    weights_digest: str
    groups: tuple[GroupPrefixes, ...]
    sampling: Sampling
    sampled_s: float


class Revoke(_Leased, frozen=True):
    """A request to hand this lease back if it has not started."""


class Ack(_Leased, frozen=True):
    """The broker holds the result; the worker need not send it again."""


class Swap(_Message, frozen=True):
    """The worker may install, and no lease follows until it reports Installed.

    With `rollout.swap = "drain"` no lease is open, with "in_flight" none of an evaluation.
    """

    version: int


class Proved(_Message, frozen=True):
    """The installed weights are proved: what they sample may be delivered."""

    version: int
    by: Proof = "change"


class ProbeUnclear(_Message, frozen=True):
    """The probe cannot tell the installed version from the last: the weights' checksum must."""

    version: int


class ProbeFailed(_Message, frozen=True):
    """The installed weights do not reproduce the learner's probe: fetch and install again."""

    version: int
    difference: float
    tolerance: float
    failures: int


class Leave(_Message, frozen=True):
    """The operator wants this worker to leave; sent again until it says Leaving."""


class Done(_Message, frozen=True):
    """The run is over (or the operator ended it): the worker leaves with exit code 0."""

    reason: str


# --- learner rank and operator to broker ----------------------------------------------------------------------------


class GetBatch(_Message, frozen=True):
    """A rank's request for a batch; answered by Batch, NotYet, RunOver, Halt or CannotGoOn."""

    iteration: Count
    rank: int
    ranks: int
    is_stopping: bool = False
    """This rank was asked to stop: all ranks halt before the first iteration of which none holds a batch."""
    memory: MemoryUse | None = None
    """The rank's; None where the system does not tell."""


class GetGroups(_Message, frozen=True):
    """A rank's request for the groups of a batch that it trains; answered by Groups."""

    iteration: Count
    groups: Annotated[tuple[Count, ...], Meta(max_length=MOST_GROUPS)]
    """Indices into `Batch.groups`, ascending."""


class IterationDone(_Message, frozen=True):
    """Every rank finished the optimiser steps of this iteration; its groups are trained."""

    iteration: Count
    optimizer_steps: Count
    relative_ess: Seconds | None = None
    """Effective sample size of tokens of age 1 and more, over that of age 0; None without old ones."""


class Published(_Message, frozen=True):
    """The weight server holds a new version."""

    note: WeightsNote


class Evaluate(_Message, frozen=True, kw_only=True):
    """A request to judge every prompt, with prefixes of one version or with one given prefix."""

    name: Name
    version: Version
    """-1: no adapter; `prefix_tokens` stands before every completion (and may be empty). Rollouts that reach a version
    to be evaluated stay at it until its prefixes are sampled."""
    prefix_tokens: bytes
    prompts: tuple[Prompt, ...]
    prefix_sampling: Sampling
    completion_sampling: Sampling
    samples: Annotated[int, Meta(ge=1, le=2**16)] = 1
    """Rows per prompt, each with draws of its own."""
    prefix_text: str | None = None
    """`prefix_tokens` as text, with the meaning of `Row.text`."""


class GetEvaluation(_Message, frozen=True):
    """A request for EvaluationProgress."""

    name: Name


class Forget(_Message, frozen=True):
    """A finished evaluation was fetched: the broker need not hold it any longer."""

    name: Name


class GetStatus(_Message, frozen=True):
    """A request for Status."""


class Stop(_Message, frozen=True):
    """The operator or rank 0 ends the run; workers get Done. Accepted is answered by Goodbye."""

    reason: Text


class HaltRun(_Message, frozen=True):
    """The operator wants all ranks to save and end; answered by Accepted."""

    reason: Text


class DrainWorker(_Message, frozen=True):
    """The operator wants a worker to leave; answered by Accepted."""

    worker: Name


# --- broker to learner rank and operator ----------------------------------------------------------------------------


class Batch(_Message, frozen=True, kw_only=True):
    """The facts that every rank plans an iteration by."""

    iteration: int
    total_iterations: int
    seed: int
    groups: tuple[BatchGroup, ...]
    """Every group of the iteration, in training order."""
    waited_s: dict[str, float]
    """Seconds the ranks waited for this batch, by cause: rollouts, scorers, or the report of another rank."""


class Groups(_Message, frozen=True):
    """Groups of a batch; payload frames: a ScoredGroup per index."""

    iteration: int
    groups: tuple[int, ...]


class NotYet(_Message, frozen=True):
    """There is no batch yet; names what the broker waits for and from whom."""

    iteration: int
    waiting_for: str


class RunOver(_Message, frozen=True):
    """There is no such iteration: the data is used up."""

    iterations: int


class Halt(_Message, frozen=True):
    """A rank was asked to stop: all of them save at this iteration and end."""

    iteration: int


class CannotGoOn(_Message, frozen=True):
    """There will be no such batch; every rank ends with this reason."""

    reason: str


class EvaluationProgress(_Message, frozen=True, kw_only=True):
    """The state of an evaluation. Payload frames: the scored groups, once complete."""

    name: str
    total: int
    done: int
    failed: int
    unsampled: int = 0
    """Groups whose prefixes of a pinned version are still missing."""
    causes: tuple[tuple[int, str], ...] = ()
    """(index into `prompts`, cause) of every failed group."""
    is_halting: bool = False
    """The operator wants the ranks to save and end: nobody waits for the rest."""


class Status(_Message, frozen=True):
    """The state of the run, for the live view and for programs."""

    document: bytes
    """JSON."""


class Accepted(_Message, frozen=True):
    """The request was carried out."""


_OfTask = RowsLeft | Prefixes | Scores | Refused
_FromWorker = Hello | Ready | Heartbeat | _OfTask | Staged | Installed | Leaving | Goodbye
_ToWorker = Welcome | Reject | Unknown | Beat | PrefixTask | ScoreTask | Revoke | Ack | Leave | Done
_ToRollout = Swap | Proved | ProbeUnclear | ProbeFailed
FromOperator = GetStatus | Stop | HaltRun | DrainWorker
FromPeer = GetBatch | GetGroups | IterationDone | Published | Evaluate | GetEvaluation | Forget | FromOperator
"""Requests of ranks, among them all that operators may make."""
_ToLearner = Batch | Groups | NotYet | RunOver | Halt | CannotGoOn | EvaluationProgress | Status | Accepted
ToBroker = _FromWorker | FromPeer
FromBroker = _ToWorker | _ToRollout | _ToLearner


# --- weight link ----------------------------------------------------------------------------------------------------


class TensorEntry(_Part, frozen=True, kw_only=True):
    """The position of one tensor in the snapshot's bytes."""

    name: str
    dtype: Literal["float32", "bfloat16"]
    shape: tuple[int, ...]
    offset_bytes: int
    size_bytes: int
    checksum: str


class Delta(_Part, frozen=True, kw_only=True):
    """The XOR of the bytes of two snapshots, in blocks of `chunk_bytes` of the snapshot."""

    version: int
    digest: str
    """Digest of the snapshot it leads to."""
    base_digest: str
    """Digest of the snapshot it starts from: a version may have had several digests, a digest has one content."""
    plane_bytes: int
    """Bytes per value: each block holds the first byte of every value, then the second, and so on, then zstd."""
    sizes: tuple[int, ...]
    """Compressed bytes per block; 0 where nothing changed."""


class GetManifest(_Message, frozen=True):
    """A request for the Manifest of a version."""

    version: int


class GetChunk(_Message, frozen=True):
    """A request for one Chunk of a version."""

    version: int
    index: int
    is_delta: bool = False
    """Block `index` of the delta that leads to `version`, instead of the version's own bytes."""


class Manifest(_Message, frozen=True, kw_only=True):
    """The content of a snapshot: where each tensor stands, and the deltas that lead to it."""

    version: int
    digest: str
    """xxh3-128 of the whole snapshot."""
    size_bytes: int
    chunk_bytes: int
    tensors: tuple[TensorEntry, ...]
    deltas: tuple[Delta, ...] = ()
    """Oldest first, each starting where the one before ends, the last ending here. A worker that holds one of the bases
    may pull the deltas from there on instead of the snapshot."""


class Chunk(_Message, frozen=True):
    """A piece of a snapshot or delta. The bytes are the one payload frame."""

    version: int
    index: int
    is_delta: bool = False


class Gone(_Message, frozen=True):
    """This version is no longer held (or never was)."""

    version: int
    latest: int
    """Newest version that is held; -1 while nothing is published."""


ToWeights = GetManifest | GetChunk
FromWeights = Manifest | Chunk | Gone
