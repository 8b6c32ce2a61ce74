"""Prompts, sampled rows and their verdicts."""

from collections import Counter
from collections.abc import Iterator
from statistics import fmean
from typing import Annotated, Literal

from msgspec import Meta, field

from prefixrl.common.wire.messages.fields import (
    Count,
    Name,
    Part,
    RowFigure,
    Seconds,
    Text,
    Version,
)

Finish = Literal["eos", "length", "error"]
VerdictStatus = Literal["ok", "no_answer", "parse_fail", "timeout", "truncated", "no_gold", "error"]
UNJUDGED: frozenset[VerdictStatus] = frozenset({"error", "truncated", "no_gold"})
"""Statuses without a reward: the verifier failed, a cut text is masked, there is no gold answer."""
_VerifierFault = Literal[
    "too long for a child", "gold answer unreadable", "verifier raised", "process died"
]
_SandboxFault = Literal["sandbox refused", "sandbox failed", "sandbox overran"]
_FunctionFault = Literal[
    "function raised", "function overran", "function returned no reward", "server refused"
]
_StepFault = Literal["too long for the process reward model", "steps without a score"]
Fault = Literal[
    "",
    "question not rendered",
    _VerifierFault,
    _SandboxFault,
    _FunctionFault,
    _StepFault,
    "no completion",
]
"""Cause of a missing verdict, "" where there is one. A closed list, so that counts by cause stay few."""
TaskKind = Literal["train", "eval", "draft"]
"""draft: the target answers without advice, for the adapter to read; nothing is judged."""
CodeMode = Name
"""Name of the verifier that judges a row's answers; `data.code` explains the values."""
Turn = tuple[str, str]
"""Role and text of a turn of a conversation."""
MOST_STEPS = 4096
"""Most steps of an answer that a process reward model scores."""
MOST_PARTS = 16
"""Most numbers that a reward function may give besides the reward."""


class Sampling(Part, kw_only=True):
    """All settings of an engine's draws; a model's generation_config never leaks in."""

    temperature: Annotated[float, Meta(ge=0.0, le=1e3)]
    """0 decodes greedily."""
    max_new_tokens: Annotated[int, Meta(ge=1, le=2**24)]
    top_k: Count = 0
    """0 for all tokens."""
    top_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 1.0
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0


class Prompt(Part):
    """One problem as the broker hands it to workers; each renders it with its own tokenizer."""

    prompt_id: str
    question: str
    gold: str
    """Gold answer; empty only in evaluations of problems without one, whose answers get no verdict."""
    code: CodeMode = "none"
    """The verifier of its answers."""
    system: str = ""
    """The row's own system turn; "" where it has none, or none is asked."""
    source: str = ""
    """Name that its figures are listed under: its source, and `/FAMILY` where these are few."""
    earlier: tuple[Turn, ...] = ()
    """Turns between the system turn and the question."""
    draft: str = ""
    """With `adapter.sees = "draft"` the target's answer without advice; empty also where it gave none."""


class GroupTask(Part):
    """One group to sample, and the seed from which the seed of every row is derived."""

    seq: Count
    prompt: Prompt
    seed: int


class VersionSpan(Part):
    """Consecutive tokens of a row that one version of the adapter sampled."""

    version: Version
    weights_digest: Name
    tokens: Count
    """Number of these tokens, at least one."""


class Row(Part, kw_only=True):
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
    A target whose tokenizer reads another text in the tokens continues this text instead. With `target.placement =
    "advice"` the text in the target's question, without special tokens."""
    has_control: Annotated[bool, RowFigure("control_tokens_fraction")] = False
    """True if a special token that is no stop is among the tokens; never where these are masked."""


class GroupPrefixes(Part, kw_only=True):
    """All rows of one group, the result of one engine call."""

    seq: Count
    prompt: Prompt
    seed: int
    prompt_tokens: bytes
    """int32 ids of the rendered prompt the adapter saw; empty for rows that no adapter wrote."""
    rows: tuple[Row, ...]
    error: Text = ""
    """Reason why the group could not be sampled (an over-long prompt, say); `rows` is then empty."""


class TargetText(Part):
    """A whole answer that the target has written."""

    text: str
    finish: Finish


_Score = Annotated[float, Meta(ge=0.0, le=1.0)]


class StepScores(Part):
    """The scores of a process reward model for one text, and the verdict of the verifier."""

    outcome: _Score
    """The verifier's reward; the reward of the text includes the scores."""
    scores: Annotated[tuple[_Score, ...], Meta(max_length=MOST_STEPS)]
    """Probability that each step is good, given the steps before it; empty without steps."""
    ends: Annotated[tuple[Count, ...], Meta(max_length=MOST_STEPS)]
    """Tokens of the answer up to the end of each step: in direct mode of the row, else of prefix and completion in the
    target's tokens. Empty where the text alone is known: an endpoint returned no ids, or a cache."""


Parts = Annotated[dict[Name, float], Meta(max_length=MOST_PARTS)]


class TextVerdict(Part, kw_only=True):
    """The verdict on one text: the target's completion, in direct mode the adapter's answer."""

    reward: float
    """In [0, 1]; meaningless where the text is not judged, which is never trained."""
    status: VerdictStatus
    extracted: Text
    """The answer found in the text; with status `error` the reason, where one is known."""
    finish: Finish
    """End of the text that was judged; `length`: it was cut."""
    completion_tokens: Count
    """Tokens the scorer's engine wrote: 0 in direct mode, and where the completion was in its cache."""
    elapsed_ms: Count
    rule: Name = ""
    """The rule that decided, for example `number`, `math-verify`, `code` or `function` (`docs/verification.md`); "" if
    nothing was compared."""
    completion: str = ""
    """The whole text judged, in evaluations and with `scorer.keep_completions`; else empty."""
    fault: Fault = ""
    """Kind of failure where the status is `error`."""
    was_text: Annotated[bool, RowFigure("prefix_as_text_fraction")] = False
    """True if the prefix reached the target as text: its tokenizer is of another family than the adapter's."""
    was_cached: bool = False
    """True if scorer or broker had this greedy completion already."""
    is_answered: Annotated[bool, RowFigure("answer_in_prefix_fraction")] = False
    """True if the prefix alone has an answer in a box already."""
    is_leak: Annotated[bool, RowFigure("leak_fraction")] = False
    """True if the gold answer stands in the prefix."""
    stopped_share: Annotated[
        float, Meta(ge=0, le=1), RowFigure("stopped_when_answered_fraction")
    ] = 0.0
    """1 if the scorer ended the text because its answer was complete; of several texts the mean."""
    parts: Parts = field(default_factory=dict)
    """Other numbers that a reward function gave, by name."""
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


class Verdict(TextVerdict, kw_only=True):
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


class ScoredGroup(Part, kw_only=True):
    """A group with a verdict per row, and the prefixes judged, so that nothing is joined by id."""

    prefixes: GroupPrefixes
    version: Version
    """Version that wrote the oldest token of the task; -1 without an adapter."""
    weights_digest: Name
    verdicts: tuple[Verdict, ...]
    scorer: Name
    sampled_s: Seconds = 0.0
    scoring_s: Seconds = 0.0
    """Seconds that the rollout (`sampled_s`) and the scorer spent on the tasks that held the group."""

    @property
    def judged_rows(self) -> Iterator[tuple[Row, Verdict]]:
        """Every row with its verdict."""
        return zip(self.prefixes.rows, self.verdicts, strict=True)

    @property
    def outcomes(self) -> list[float]:
        """The verifier's reward of each judged row."""
        return [verdict.outcome for verdict in self.verdicts if verdict.is_judged]

    @property
    def texts(self) -> tuple[TextVerdict, ...]:
        """A verdict per text: one per row, or `scorer.continuations` of them."""
        if not any([row.continuations for row in self.verdicts]):
            return self.verdicts
        return tuple(text for row in self.verdicts for text in row.texts)

    @property
    def faults(self) -> dict[str, int]:
        """Number of texts without a verdict, by the kind of failure."""
        faults = [each.fault for each in self.texts if each.status == "error"]
        return dict(Counter(faults)) if faults else {}


class StageTimes(Part):
    """Seconds a group spent in each stage, from its first token to the iteration that trains it."""

    sampling_s: float
    queued_s: float
    """Sampled, and at no scorer."""
    scoring_s: float
    waiting_s: float
    """Scored, and in no iteration."""


class BatchGroup(Part, kw_only=True):
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
    """Tokens of the target over the trainable rows."""
    truncated: int = 0
    """Judged texts of trainable rows that a length limit cut."""
    cached: int = 0
    """Judged texts of trainable rows that a scorer had in its cache."""
    figure_sums: dict[str, float] = field(default_factory=dict)
    """Over the trainable rows, by figure: the sum of each field of row and verdict that is marked `RowFigure`."""
    outcomes: tuple[float, ...] = ()
    """With `scorer.prm` the verifier's reward of each trainable row; else empty."""
    steps: int = 0
    """Scored steps of the judged texts."""
    step_score_sum: float = 0.0
    texts: tuple[int, ...] = ()
    """A hash of each row's tokens, of 63 bits: equal where the adapter wrote the same."""
    source: str = ""
    """`Prompt.source` of its prompt."""
    parts: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """By name what a reward function gave besides the rewards of its judged texts."""
    row_parts: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """The same by trainable row: means over its judged texts. A text with reward 0 by a rule has 0 in every part."""

    @property
    def judged(self) -> int:
        """Number of texts with a reward."""
        return sum(count for status, count in self.statuses.items() if status not in UNJUDGED)
