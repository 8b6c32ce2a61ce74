"""Every type that crosses a socket or stands in the journal, one tagged union per link and direction.

Token ids travel as little-endian int32 bytes, logprobs as little-endian float32 bytes (`packing.py` reads and checks them).
A worker of any role talks like this (W worker, B broker):

    W Hello ─▶ B Welcome | Reject      the worker learns the run's resolved config, loads its model
    W Ready ─▶ B                       digests are compared, slots become credit
    B PrefixTask | ScoreTask ─▶ W      a lease; Heartbeat renews it by progress, Prefixes | Scores | Refused ends it
    B Ack ─▶ W                         the result is held (Scores: in the journal); until then the worker sends it again
    B Beat ─▶ W                        answers each Heartbeat with the newest published version
    W Staged ─▶ B Swap ─▶ W Installed  a rollout has the new weights in memory, may swap, scored the probe with them
    B Proved | ProbeFailed ─▶ W        what it samples with them counts, or is thrown away and the weights are fetched again

Learner ranks and operators use the same socket: GetBatch, IterationDone, Published, Evaluate, GetStatus.
"""

from collections import Counter
from typing import Literal

import msgspec

PROTOCOL = 5
"""Raised whenever a message changes; both sides must hold the same number."""

UNPROVED = -1
"""In place of a version: no version may be claimed."""

Role = Literal["rollout", "scorer", "rank", "operator"]
Finish = Literal["eos", "length", "error"]
VerdictStatus = Literal["ok", "no_answer", "parse_fail", "timeout", "truncated", "no_gold", "error"]
UNJUDGED: frozenset[VerdictStatus] = frozenset({"error", "truncated", "no_gold"})
"""Without a reward: the verifier failed, a cut text is left out, there is no gold answer."""
Fault = Literal[
    "",
    "question not rendered",
    "too long for a child",
    "gold answer unreadable",
    "verifier raised",
    "process died",
    "sandbox refused",
    "sandbox failed",
    "sandbox overran",
    "function raised",
    "function overran",
    "function returned no reward",
    "no completion",
]
"""Why a row has no verdict; "" where it has one. A list of its own, so that counts by cause stay few whatever a reason says."""
Kind = Literal["train", "eval"]
CodeMode = Literal["none", "answers", "tests"]
"""Which programs in answers are run: `data.code` says what each means."""


class _Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A message of one of the unions below; its tag is its class name."""


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A piece of a message."""


# --- parts -----------------------------------------------------------------------------------------------------------


class Sampling(_Part, frozen=True):
    """How an engine draws tokens. Everything not named here is off: a model's generation_config never leaks in."""

    temperature: float
    """0 means greedy."""
    max_new_tokens: int
    top_k: int = 0
    """0 for all tokens."""
    top_p: float = 1.0
    min_p: float = 0.0


class ModelDigests(_Part, frozen=True):
    """What a worker loaded; two workers of one role must agree or the later one is refused."""

    model: str
    tokenizer: str
    chat_template: str
    reward_function: str = ""
    """Digest of the file of `reward.function`, "" without one and for rollouts."""


class Prompt(_Part, frozen=True):
    """One problem as the broker hands it to workers; each renders it with its own tokenizer."""

    prompt_id: str
    question: str
    gold: str
    """Empty where there is none: answers then get no verdict. Never of a training problem."""
    code: CodeMode = "none"
    """How programs in its answers are judged."""


class GroupTask(_Part, frozen=True):
    """One group to sample: a prompt, the group's sequence number and the seed every row is derived from."""

    seq: int
    prompt: Prompt
    seed: int


class VersionSpan(_Part, frozen=True):
    """Consecutive tokens of a row that were sampled with one version of the adapter."""

    version: int
    weights_digest: str
    tokens: int
    """How many, at least one."""


class Row(_Part, frozen=True):
    """One sampled prefix."""

    tokens: bytes
    """int32 ids exactly as sampled, an EOS that ended the prefix included."""
    logprobs: bytes
    """float32, under the distribution each token was sampled from, one per token."""
    finish: Finish
    spans: tuple[VersionSpan, ...]
    """Which version sampled which tokens: every token once, versions strictly rising. More than one only with
    `rollout.swap = "in_flight"`; none where no adapter wrote the row."""
    text: str | None = None
    """In prefix mode: what the adapter's tokenizer reads in the tokens, special ones included, without the stop at the end. A
    target whose tokenizer reads something else in them is given the text."""


class GroupPrefixes(_Part, frozen=True):
    """All rows of one group: one engine call."""

    seq: int
    prompt: Prompt
    seed: int
    prompt_tokens: bytes
    """int32 ids of the rendered prompt the adapter saw; empty for rows that no adapter wrote."""
    rows: tuple[Row, ...]
    error: str = ""
    """Why the group could not be sampled (an over-long prompt, say); rows is then empty."""


class TextVerdict(_Part, frozen=True):
    """What became of one text: a completion of the target, or in direct mode the adapter's answer, judged."""

    reward: float
    """In [0, 1]; meaningless where the text is not judged: it is never trained."""
    status: VerdictStatus
    extracted: str
    """The answer found in the text; with status `error` the reason, where one is known."""
    finish: Finish
    """What ended the text that was judged; `length`: it was cut. In direct mode a cut answer has reward 0."""
    completion_tokens: int
    """Tokens the scorer's engine wrote: 0 in direct mode, and where the completion was in its cache."""
    elapsed_ms: int
    completion: str = ""
    """The whole text judged, kept for evaluations and where `scorer.keep_completions` asks for it."""
    fault: Fault = ""
    """The kind of failure where status is `error`."""
    was_text: bool = False
    """The prefix reached the target as text: its tokenizer is of another family than the adapter's."""
    was_cached: bool = False
    """The scorer had this greedy completion already."""

    @property
    def is_judged(self) -> bool:
        """Whether `reward` says something."""
        return self.status not in UNJUDGED


class Verdict(TextVerdict, frozen=True):
    """What became of one row: that of its text, or what those of its continuations amount to (`continuations.py`)."""

    continuations: tuple[TextVerdict, ...] = ()
    """With `scorer.continuations` > 1 one per continuation, in order; else empty."""

    @property
    def texts(self) -> tuple[TextVerdict, ...]:
        """One per text."""
        return self.continuations or (self,)


class ScoredGroup(_Part, frozen=True):
    """A group with one verdict per row. Self-contained: it carries the prefixes it judged."""

    prefixes: GroupPrefixes
    version: int
    """The adapter's when it wrote the oldest token of the task; -1 where no adapter wrote any."""
    weights_digest: str
    verdicts: tuple[Verdict, ...]
    scorer: str
    sampled_s: float = 0.0
    """Seconds the rollout spent on the task the group was in."""
    scoring_s: float = 0.0
    """Seconds the scorer spent on the task the group was in."""

    @property
    def texts(self) -> tuple[TextVerdict, ...]:
        """A verdict per text: one per row, or `scorer.continuations` of them."""
        return tuple(text for row in self.verdicts for text in row.texts)

    @property
    def faults(self) -> dict[str, int]:
        """Texts without a verdict, by the kind of failure."""
        return dict(Counter(each.fault for each in self.texts if each.status == "error"))


class WeightsNote(_Part, frozen=True):
    """One published version: what a worker must fetch and how its installation is proved."""

    version: int
    digest: str
    probe_tokens: bytes
    probe_logprobs: bytes
    """The learner's logprob of each probe token but the first, given those before it, under the published weights."""


# --- worker to broker ------------------------------------------------------------------------------------------------


class Hello(_Message, frozen=True):
    """First message of every connection, sent again whenever the broker does not know the sender."""

    protocol: int
    role: Role
    incarnation: str
    """Random per process: a restarted worker is another worker."""
    host: str
    pid: int


class Ready(_Message, frozen=True):
    """The model is loaded: how many tasks may run at once, and what exactly was loaded."""

    slots: int
    digests: ModelDigests
    version: int
    """Installed version; 0 is the initial adapter, UNPROVED weights that no probe has passed yet, and for scorers."""
    weights_digest: str
    engine: str


class Usage(_Part, frozen=True):
    """What a scorer has asked of the endpoint that serves its target, since the scorer was started."""

    requests: int = 0
    """Answered ones."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    """Both as the endpoint counts them."""
    retries: int = 0
    """Requests that failed and were, or will be, made again."""
    limited_s: float = 0.0
    """Seconds in which some row waited for a rate limit."""


class Heartbeat(_Message, frozen=True):
    """Sent on a clock by the network thread; the figures come from the work loop, so a hung loop shows."""

    progress: int
    """Grows with every decoded token, finished verification or loading step; and while an engine waits for the endpoint that
    serves its model, which it does for a limited time."""
    busy_slot_s: float
    leases: tuple[str, ...]
    state: str
    usage: Usage | None = None
    """None unless the engine asks an endpoint."""


class Prefixes(_Message, frozen=True):
    """Result of a PrefixTask."""

    task: str
    attempt: int
    kind: Kind
    version: int
    """Of the oldest token; the task's version where no group could be sampled."""
    weights_digest: str
    groups: tuple[GroupPrefixes, ...]
    elapsed_s: float


class Scores(_Message, frozen=True):
    """Result of a ScoreTask."""

    task: str
    attempt: int
    kind: Kind
    groups: tuple[ScoredGroup, ...]


class Refused(_Message, frozen=True):
    """The worker hands a lease back unworked (revoked, draining, wrong version)."""

    task: str
    attempt: int
    reason: str


class Staged(_Message, frozen=True):
    """A rollout holds verified weights of this version in memory and asks to swap."""

    version: int


class Installed(_Message, frozen=True):
    """A rollout installed a version and scored the probe with its engine."""

    version: int
    digest: str
    probe_logprobs: bytes


class Goodbye(_Message, frozen=True):
    """The peer leaves on purpose; its leases go back at once."""

    reason: str


# --- learner rank and operator to broker -----------------------------------------------------------------------------


class GetBatch(_Message, frozen=True):
    iteration: int
    rank: int
    ranks: int
    is_stopping: bool = False
    """This rank was told to stop: every rank is halted before the first iteration of which none holds a shard."""


class IterationDone(_Message, frozen=True):
    """Every rank finished the optimiser steps of this iteration; its groups are trained."""

    iteration: int
    optimizer_steps: int


class Published(_Message, frozen=True):
    note: WeightsNote


class Evaluate(_Message, frozen=True):
    """Judge every prompt: with prefixes of a pinned adapter version, or with the given prefix.

    One of a version that is still to be published holds rollouts at that version until its prefixes are sampled.
    """

    name: str
    version: int
    """-1: no adapter; `prefix_tokens` stands before every completion (and may be empty)."""
    prefix_tokens: bytes
    prompts: tuple[Prompt, ...]
    prefix_sampling: Sampling
    completion_sampling: Sampling
    samples: int = 1
    """Rows per prompt, each with draws of its own."""
    prefix_text: str | None = None
    """As `Row.text`."""


class GetEvaluation(_Message, frozen=True):
    name: str


class Forget(_Message, frozen=True):
    """A finished evaluation that was fetched: the broker need not hold it any longer."""

    name: str


class GetStatus(_Message, frozen=True):
    pass


class Stop(_Message, frozen=True):
    """Operator or rank 0: end the run; workers are told to go. Whoever hears that it is accepted says Goodbye."""

    reason: str


# --- broker to peers -------------------------------------------------------------------------------------------------


class Welcome(_Message, frozen=True):
    protocol: int
    run_id: str
    worker: str
    """The name the broker gives this process in logs and messages, for example rollout-3."""
    config_json: str
    weights_endpoint: str


class Reject(_Message, frozen=True):
    """The peer must not work in this run; the process ends with this reason."""

    reason: str


class Beat(_Message, frozen=True):
    """Answer to a Heartbeat; level-triggered: losing one loses nothing."""

    latest: WeightsNote | None


class Unknown(_Message, frozen=True):
    """The broker does not know the sender (it was restarted, or gave the sender up): say Hello again."""


class PrefixTask(_Message, frozen=True):
    task: str
    attempt: int
    kind: Kind
    version: int
    """The version the worker must have installed; anything else is refused."""
    groups: tuple[GroupTask, ...]
    rows_per_group: int
    sampling: Sampling


class ScoreTask(_Message, frozen=True):
    task: str
    attempt: int
    kind: Kind
    version: int
    weights_digest: str
    groups: tuple[GroupPrefixes, ...]
    sampling: Sampling
    sampled_s: float


class Revoke(_Message, frozen=True):
    """Hand this lease back if it has not started."""

    task: str
    attempt: int


class Ack(_Message, frozen=True):
    task: str
    attempt: int


class Swap(_Message, frozen=True):
    """The worker may install, and no lease will follow until it reports Installed.

    With `rollout.swap = "drain"` no lease is open, with "in_flight" none of an evaluation.
    """

    version: int


class Proved(_Message, frozen=True):
    """The installed weights reproduce the learner's probe: what they sample may be delivered."""

    version: int


class ProbeFailed(_Message, frozen=True):
    """The installed weights do not reproduce the learner's probe: fetch and install again."""

    version: int
    difference: float
    tolerance: float
    failures: int


class Done(_Message, frozen=True):
    """The run is over (or the operator ended it): the worker leaves with exit code 0."""

    reason: str


class Batch(_Message, frozen=True):
    """One rank's shard of an iteration. One payload frame per group in `rows_of`, each a ScoredGroup."""

    iteration: int
    total_iterations: int
    seed: int
    groups: tuple["BatchGroup", ...]
    """Every group of the iteration, in training order."""
    payload_groups: tuple[int, ...]
    """Index into `groups` of each payload frame: the groups of which this rank trains at least one row."""
    waited_s: dict[str, float]
    """How long the ranks waited for this batch, by what held it up: rollouts, scorers, or the report of another rank."""


class BatchGroup(_Part, frozen=True):
    """What every rank must know of a group, its own or not: baselines and the plan need lengths and rewards."""

    seq: int
    prompt_id: str
    version: int
    weights_digest: str
    lengths: tuple[tuple[int, int], ...]
    """(prompt tokens, prefix tokens) per row that can be trained."""
    rewards: tuple[float, ...]
    """One per row that can be trained: rows that are not judged are not among them."""
    stages: "StageTimes"
    statuses: dict[VerdictStatus, int]
    """Texts of all its rows by their verdict: one per row, or `scorer.continuations` of them."""
    completion_tokens: int = 0
    """Of the target, over these rows."""
    truncated: int = 0
    """How many of their judged texts were cut by a length limit."""
    cached: int = 0
    """How many of their judged texts a scorer had in its cache."""
    as_text: int = 0
    """Of how many of these rows the prefix reached the target as text."""

    @property
    def judged(self) -> int:
        """Texts with a reward."""
        return sum(count for status, count in self.statuses.items() if status not in UNJUDGED)


class StageTimes(_Part, frozen=True):
    """How long a group was in each stage, from its rollout's first token to the iteration that trains it."""

    sampling_s: float
    queued_s: float
    """Sampled, and no scorer had it."""
    scoring_s: float
    waiting_s: float
    """Scored, and in no iteration."""


class NotYet(_Message, frozen=True):
    """No batch yet; names what the broker waits for and from whom."""

    iteration: int
    waiting_for: str


class RunOver(_Message, frozen=True):
    """There is no such iteration: the data is used up."""

    iterations: int


class Halt(_Message, frozen=True):
    """A rank was told to stop: all of them save at this iteration and end."""

    iteration: int


class CannotGoOn(_Message, frozen=True):
    """There will be no such batch; every rank ends with this reason."""

    reason: str


class EvaluationProgress(_Message, frozen=True):
    """Payload frames: the scored groups, once complete."""

    name: str
    total: int
    done: int
    failed: int
    unsampled: int = 0
    """Groups whose prefixes of a pinned version are still to come."""
    causes: tuple[tuple[int, str], ...] = ()
    """Which groups failed, by their place among the prompts, and why."""


class Status(_Message, frozen=True):
    """A JSON document: what a person reads in the live view a program reads too."""

    document: bytes


class Accepted(_Message, frozen=True):
    """The request was carried out."""


ToBroker = (
    Hello
    | Ready
    | Heartbeat
    | Prefixes
    | Scores
    | Refused
    | Staged
    | Installed
    | Goodbye
    | GetBatch
    | IterationDone
    | Published
    | Evaluate
    | GetEvaluation
    | Forget
    | GetStatus
    | Stop
)
FromBroker = (
    Welcome
    | Reject
    | Beat
    | Unknown
    | PrefixTask
    | ScoreTask
    | Revoke
    | Ack
    | Swap
    | Proved
    | Done
    | ProbeFailed
    | Batch
    | NotYet
    | RunOver
    | Halt
    | CannotGoOn
    | EvaluationProgress
    | Status
    | Accepted
)


# --- weight link -----------------------------------------------------------------------------------------------------


class GetManifest(_Message, frozen=True):
    version: int


class GetChunk(_Message, frozen=True):
    version: int
    index: int
    is_delta: bool = False
    """Block `index` of the delta that leads to `version`, instead of the version's own bytes."""


class TensorEntry(_Part, frozen=True):
    """Where one tensor stands in the snapshot's bytes."""

    name: str
    dtype: Literal["float32", "bfloat16"]
    shape: tuple[int, ...]
    offset_bytes: int
    size_bytes: int
    checksum: str


class Delta(_Part, frozen=True):
    """What leads from the bytes of one snapshot to those of the next: XOR, in blocks of `chunk_bytes` of the snapshot."""

    version: int
    digest: str
    """Of the snapshot it leads to."""
    base_digest: str
    """Of the snapshot it starts from: a version may have had several digests, a digest has one content."""
    plane_bytes: int
    """Bytes per value: each block holds the first byte of every value, then the second, and so on, then zstd."""
    sizes: tuple[int, ...]
    """Compressed bytes per block; 0 where nothing changed."""


class Manifest(_Message, frozen=True):
    version: int
    digest: str
    """xxh3-128 of the whole snapshot."""
    size_bytes: int
    chunk_bytes: int
    tensors: tuple[TensorEntry, ...]
    deltas: tuple[Delta, ...] = ()
    """Oldest first, each starting where the one before ends, the last ending here. Whoever holds one of the bases may pull the
    deltas from there on instead of the snapshot."""


class Chunk(_Message, frozen=True):
    """The bytes are the one payload frame."""

    version: int
    index: int
    is_delta: bool = False


class Gone(_Message, frozen=True):
    """This version is no longer held (or never was); `latest` is, or -1 while nothing is published."""

    version: int
    latest: int


ToWeights = GetManifest | GetChunk
FromWeights = Manifest | Chunk | Gone
