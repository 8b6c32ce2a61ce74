"""The exchange of a worker (W) and the broker (B), in this order.

W Hello      ─▶ B Welcome | Reject       the worker receives the run's resolved config and loads its model
W Ready      ─▶ B                        the broker compares digests; its room for rows becomes credit
B PrefixTask | ScoreTask ─▶ W            a lease: Heartbeat renews it; Prefixes, Scores or Refused end it
B Ack        ─▶ W                        the result is held (Scores: in the journal); until then it is sent again
W RowsLeft   ─▶ B                        rows of a lease have ended: their credit returns before its result
B Beat       ─▶ W                        answers each Heartbeat with the newest published version
W Staged     ─▶ B Swap ─▶ W Installed    a rollout holds new weights, may swap, has scored the probe
B Probed     ─▶ W                        its samples count; or a checksum is needed; or the weights are dropped
B Leave      ─▶ W                        the operator drains it
W Leaving    ─▶ B                        it was asked to stop: no new task; Goodbye follows the last open one
"""

from typing import Annotated, Literal

from msgspec import Meta

from prefixrl.common.wire.messages.fields import (
    MOST_LEASES_LISTED,
    MOST_SAMPLES,
    Count,
    Leased,
    Message,
    Name,
    Part,
    Role,
    Seconds,
    Text,
    Version,
)
from prefixrl.common.wire.messages.groups import (
    GroupPrefixes,
    GroupTask,
    Sampling,
    ScoredGroup,
    TargetText,
    TaskKind,
)
from prefixrl.common.wire.messages.weights import EngineChecksum, PreviousProof, Proof, WeightsNote


class ModelDigests(Part):
    """Digests of what a worker loaded; a worker that differs from its role is refused."""

    model: Name
    tokenizer: Name
    chat_template: Name
    reward_function: Name = ""
    """Digest of the file of `reward.function`; "" without one and for rollouts."""
    process_model: Name = ""
    """Digest of the model of `scorer.prm`; "" without one and for rollouts."""


class Usage(Part, kw_only=True):
    """A scorer's use of its target's endpoint since its start; the endpoint counts the tokens."""

    requests: Count = 0
    """Requests that were answered."""
    prompt_tokens: Count = 0
    completion_tokens: Count = 0
    retries: Count = 0
    """Requests that failed and were, or will be, made again."""
    limited_s: Seconds = 0.0
    """Seconds in which some row waited for a rate limit."""


MOST_REST_S = 86_400.0
"""Longest rest that is passed on; an endpoint may name any time."""
Rest = Annotated[float, Meta(ge=0.0, le=MOST_REST_S)]


class RequestDemand(Part, kw_only=True):
    """The requests to its target's endpoint that a scorer would make, and the rest that the endpoint wants."""

    received: Count = 0
    """Permits that it got so far."""
    lacking: Count = 0
    """Further permits that it could use before the next answer."""
    rest_s: Rest = 0.0
    """Time until which the endpoint wants no request, by the Retry-After of an answer to this scorer."""


class RequestGrant(Part, kw_only=True):
    """The requests that a scorer may make, and the rest that all scorers keep."""

    permits: Count = 0
    """Requests that it may have made so far, in all."""
    rest_s: Rest = 0.0
    """Time until which no scorer of the run makes a request."""


class MemoryUse(Part, kw_only=True):
    """The memory of a process, as Linux counts it."""

    resident_bytes: Count
    own_bytes: Count
    """The part that no other process has."""
    share_bytes: Count
    """Its own pages, and an equal part of pages that several processes share."""


class Hello(Message, kw_only=True):
    """The first message of every connection, sent again when the broker answers Unknown."""

    protocol: int
    role: Role
    incarnation: Name
    """Random per process: a restarted worker is another worker."""
    host: Name
    pid: Count
    number: Count | None = None
    """The number that a worker wants in its name: that of its starter, or of an earlier Welcome. None: any."""


class Ready(Message, kw_only=True):
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


Activity = Literal["loading", "waiting", "failing", "working"]
"""The work of a worker. waiting: for the endpoint of its model; failing: the user's reward function hangs or fails."""


class Heartbeat(Message, kw_only=True):
    """A sign of life, sent on a clock, with figures of the work loop: a hung loop shows."""

    progress: Count
    """Grows with every token, verification and loading step; for a limited time also while an endpoint is out."""
    busy_row_s: Seconds
    """Row-seconds in a seat since its start."""
    leases: Annotated[tuple[Name, ...], Meta(max_length=MOST_LEASES_LISTED)]
    state: Text
    """Details of the activity, for people."""
    activity: Activity = "working"
    usage: Usage | None = None
    """None unless the engine uses an endpoint."""
    waiting_rows: Count = 0
    """Rows at the engine that wait for a seat."""
    tokens: Count = 0
    """Tokens that the engine has written."""
    memory: MemoryUse | None = None
    """None where the system does not tell."""
    demand: RequestDemand | None = None
    """None unless the engine uses an endpoint."""


class RowsLeft(Message):
    """The rows of open tasks that have not ended at the engine."""

    tasks: Annotated[tuple[tuple[Name, Count], ...], Meta(max_length=MOST_LEASES_LISTED)]
    """Name and remaining rows of every task with rows that ended since the message before."""


class Prefixes(Leased, kw_only=True):
    """The result of a PrefixTask."""

    kind: TaskKind
    version: Version
    """Version of the oldest token; the task's version where no group could be sampled."""
    weights_digest: Name
    groups: tuple[GroupPrefixes, ...]
    elapsed_s: Seconds


class Scores(Leased):
    """The result of a ScoreTask."""

    kind: TaskKind
    groups: tuple[ScoredGroup, ...]
    prompt_tokens: Count = 0
    """Tokens of the prompts of drafts, as the endpoint counts them if there is one; 0 for other tasks."""


class Refused(Leased):
    """A lease that the worker hands back without a result (revoked, leaving, wrong version)."""

    reason: Text


class Staged(Message):
    """A rollout holds verified weights of this version in memory and asks to swap."""

    version: Version


class Installed(Message):
    """A rollout installed a version and scored the probe with its engine."""

    version: Version
    digest: Name
    probe_logprobs: bytes
    """float32, one per scored token of the probe."""
    before: PreviousProof | None = None
    """None where no version was proved with this probe."""
    checksum: EngineChecksum | None = None


class Leaving(Message):
    """The worker takes no new task, finishes what it can of the open ones, then says Goodbye."""


class Goodbye(Message):
    """The peer leaves on purpose; its leases go back at once."""

    reason: Text


class Welcome(Message, kw_only=True):
    """The answer to a Hello; ranks and operators get it too."""

    protocol: int
    run_id: str
    worker: str
    """Name the broker gives this process in logs and messages, for example rollout-3."""
    config_json: str
    weights_endpoint: str
    local_weights_endpoint: str = ""
    """Endpoint of the same server for workers of this user on its host, without encryption."""


class Reject(Message):
    """The peer must not work in this run; its process ends with this reason."""

    reason: str


class Unknown(Message):
    """The broker does not know the sender, after a restart or a long silence: send Hello again."""


class Beat(Message):
    """The answer to a Heartbeat. It repeats the current state, so a lost one costs nothing."""

    latest: WeightsNote | None
    """Newest published version; None before the first publication."""
    grant: RequestGrant | None = None
    """The answer to the demand of a scorer; None without one."""


class PrefixTask(Leased, kw_only=True):
    """A lease on groups to sample."""

    kind: TaskKind
    version: int
    """Version the worker must have installed; it refuses any other."""
    groups: tuple[GroupTask, ...]
    rows_per_group: Annotated[int, Meta(ge=1, le=MOST_SAMPLES)]
    sampling: Sampling


class ScoreTask(Leased, kw_only=True):
    """A lease on sampled groups to judge."""

    kind: TaskKind
    version: int
    weights_digest: str
    groups: tuple[GroupPrefixes, ...]
    sampling: Sampling
    sampled_s: float
    answers: tuple[TargetText | None, ...] = ()
    """Greedy answers that the target has given before, per row over all groups; the others are None. Empty: none."""


class Revoke(Leased):
    """A request to hand this lease back if it has not started."""


class Ack(Leased):
    """The broker holds the result; the worker need not send it again."""


class Swap(Message):
    """The worker may install, and no lease (`in_flight`: of an evaluation) is open until it has."""

    version: int


class Probed(Message, kw_only=True):
    """The broker's judgement of an `Installed`.

    proved: deliver. unclear: send the checksum of the weights. refused: fetch and install again.
    """

    version: int
    outcome: Literal["proved", "unclear", "refused"]
    by: Proof = "change"
    """Evidence, where the outcome is "proved"."""
    difference: float = 0.0
    """Difference from the learner's logprobs, where the outcome is "refused"."""
    failures: int = 0


class Leave(Message):
    """The operator wants this worker to leave; sent again until it says Leaving."""


class Done(Message):
    """The run is over (or the operator ended it): the worker leaves with exit code 0."""

    reason: str


_OfTask = RowsLeft | Prefixes | Scores | Refused
FromWorker = Hello | Ready | Heartbeat | _OfTask | Staged | Installed | Leaving | Goodbye
ToWorker = Welcome | Reject | Unknown | Beat | PrefixTask | ScoreTask | Revoke | Ack | Leave | Done
ToRollout = Swap | Probed
