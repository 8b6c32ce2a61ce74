"""Open tasks, their verdicts and Scores, and the loop around them, for both kinds of scorer.

Every text of a task gets one verdict, from the verifier (`take_text`) or without it (`settle`).
With several continuations per prefix, the row's verdict follows from theirs. The last verdict of a
task sends its Scores. A text whose verdict is `error` keeps that status: it never counts as a wrong
answer. With a process reward model the texts of a training task are scored, group by group, after
their verdicts; in an evaluation those of problems with several answers, which keep the verdict as
their reward: the scores are for choosing among them.
"""

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from prefixrl.common.config.run import RunConfig
from prefixrl.common.journal.crash_points import crash_point
from prefixrl.common.prompts.extract import extract_answer
from prefixrl.common.wire.messages.fields import common_fields, cut_text, encodable
from prefixrl.common.wire.messages.groups import (
    UNJUDGED,
    Fault,
    Finish,
    GroupPrefixes,
    ScoredGroup,
    TextVerdict,
)
from prefixrl.common.wire.messages.worker import Activity, Ready, Scores, ScoreTask
from prefixrl.common.wire.verdicts import row_verdict
from prefixrl.common.worker.link import Link
from prefixrl.common.worker.open_tasks import RowsLeftReport
from prefixrl.common.worker.work_loop import IDLE_S, WorkLoop
from prefixrl.scorer.process.step_scoring import JudgedText, StepScoring
from prefixrl.scorer.verifier.exchange import AnswerFacts
from prefixrl.scorer.verifier.pool_thread import JudgeThread
from prefixrl.scorer.verifier.rules.verify import Judgement

POLL_S = 0.005

Cut = Literal["judge", "zero", "mask", "ask"]
"""Treatment of a text that its length limit cut; `scorer.truncated` explains the values. ask: the reward is 0, unless
the user's function takes `finish`."""


def cut_treatment(config: RunConfig) -> Cut:
    """Return what becomes of a text that the length limit cut, once it is extended where the run extends it."""
    setting = config.scorer.truncated
    if setting is not None:
        return "judge" if setting == "extend" else setting
    if config.mode == "prefix":
        return "judge"
    return "ask" if config.reward.function is not None else "zero"


@dataclass
class _Open:
    task: ScoreTask
    received_s: float
    continuations: int
    """Texts per row."""
    groups: list[GroupPrefixes]
    """The group of each text, by text index."""
    verdicts: dict[int, TextVerdict] = field(default_factory=dict)
    """Verdicts so far by `text_index`."""
    answers: dict[int, "Answered"] = field(default_factory=dict)
    """With a process reward model: the judged texts that have no scores yet."""
    prompt_tokens: int = 0
    """Tokens of the prompts of drafts so far."""


@dataclass(frozen=True)
class Answered:
    """A text that can be judged."""

    task: str
    text_index: int
    """Index in the task, over all its groups: a row's continuations follow each other."""
    text: str
    """The whole answer."""
    finish: Finish
    completion_tokens: int
    was_text: bool = False
    """True if the prefix reached the target as text."""
    was_cached: bool = False
    """True if no token of it was written for this row."""
    written_tokens: int = 0
    """Tokens of the completion, in direct mode of the answer; also where they come from a cache or an endpoint."""
    prefix: str = ""
    """Text of the prefix, or of the advice."""
    is_answered: bool = False
    """True if the prefix alone has an answer already."""
    is_leak: bool = False
    """True if the gold answer stands in the prefix."""
    stopped_share: float = 0.0
    """1 if it was ended because its answer was complete."""
    tokens: NDArray[np.int32] | None = None
    """The answer's tokens; None where some are not known."""


def up_to(answered: Answered, stop_texts: Sequence[str]) -> Answered:
    """Return the answer up to the first stop text; an answer with a stop text counts as ended, not as cut."""
    ends = [at for text in stop_texts if (at := answered.text.find(text)) >= 0]
    return replace(answered, text=answered.text[: min(ends)], finish="eos") if ends else answered


def failure(reason: str, fault: Fault) -> TextVerdict:
    """Return the verdict `error` on a text that could not be produced."""
    short = cut_text(reason)
    return TextVerdict(
        reward=0.0,
        status="error",
        extracted=short,
        finish="error",
        completion_tokens=0,
        elapsed_ms=0,
        fault=fault,
    )


@dataclass(frozen=True)
class ProcessReward:
    """A process reward model, and the text that each token adds to an answer."""

    scoring: StepScoring
    pieces: Callable[[NDArray[np.int32]], list[str]]


class Judging:
    """The open tasks of a scorer, its verifier, and its process reward model if it has one."""

    def __init__(
        self,
        link: Link,
        verifier: JudgeThread,
        config: RunConfig,
        process: ProcessReward | None,
    ) -> None:
        section = config.scorer
        self._link = link
        self._cut = cut_treatment(config)
        self._process = process
        self._unscored: deque[tuple[str, int, int]] = deque()
        self._verifier = verifier
        self._keeps_text = section.keep_completions
        self._stop_texts = section.stop_texts
        self._verifying: dict[int, tuple[Answered, float]] = {}
        self._keys = itertools.count()
        self.open: dict[str, _Open] = {}
        self.verified = 0

    @property
    def unjudged(self) -> dict[str, int]:
        """Texts without a verdict, of every open task."""
        return {task: len(entry.groups) - len(entry.verdicts) for task, entry in self.open.items()}

    @property
    def activity(self) -> Activity:
        """The work of the verifier: "failing" while a reward function hangs or fails."""
        return "failing" if self._verifier.trouble else "working"

    @property
    def state(self) -> str:
        """The work on answers and the faults of the verifier, in words; "" without either."""
        verifying = f"verifying {len(self._verifying)}" if self._verifying else ""
        scoring = (
            f"scoring steps of {len(self._unscored)} groups"
            if self._unscored and not verifying
            else ""
        )
        return "; ".join(filter(None, [self._verifier.trouble, verifying, scoring]))

    def begin(self, task: ScoreTask, continuations: int = 1) -> None:
        """Open a task; each of its texts, `continuations` per row, must be taken or settled."""
        groups = [group for group in task.groups for _ in range(len(group.rows) * continuations)]
        self.open[task.task] = _Open(task, time.monotonic(), continuations, groups)

    def drop(self, task: str) -> None:
        """Forget a task of which no text was taken."""
        del self.open[task]

    def take_text(self, answered: Answered) -> None:
        """Have a text verified, unless it is cut (and masked or worth 0) or has no gold answer."""
        entry = self.open[answered.task]
        answered = up_to(answered, self._stop_texts)
        prompt = entry.groups[answered.text_index].prompt
        is_training = entry.task.kind == "train"
        is_masked = self._cut == "mask" and is_training
        if not prompt.gold and is_training:
            reason = "the problem has no gold answer"
            self._settle(answered, Judgement(0.0, "error", reason, "gold answer unreadable"))
        elif not prompt.gold:
            self._settle(answered, Judgement(0.0, "no_gold", extract_answer(answered.text)))
        elif answered.finish == "length" and (is_masked or self._cut == "zero"):
            self._settle(answered, Judgement(0.0, "truncated" if is_masked else "no_answer", None))
        else:
            key = next(self._keys)
            self._verifying[key] = answered, time.monotonic()
            facts = AnswerFacts(
                tokens=answered.written_tokens,
                finish="length" if answered.finish == "length" else "stop",
                prefix=encodable(answered.prefix),
                source=prompt.source,
                is_zero_if_cut=self._cut == "ask",
            )
            self._verifier.submit(
                key, answered.text, prompt.gold, prompt.question, prompt.code, facts
            )

    def collect(self) -> None:
        """Settle the texts that the verifier has judged, then score the steps of one group."""
        self.verified += self._verifier.is_patient  # progress
        for key, judged in self._verifier.poll():
            answered, since_s = self._verifying.pop(key)
            self.verified += 1
            # Of a function only a cut answer that it does not take has no answer.
            is_scored = self._cut != "ask" or judged.status != "no_answer"
            elapsed_ms = int((time.monotonic() - since_s) * 1000)
            self._settle(answered, judged, elapsed_ms, is_scored)
        if self._unscored:
            self._score_steps(*self._unscored.popleft())

    def _score_steps(self, task: str, first: int, after: int) -> None:
        """Add scores to a group's verdicts; the last group sends the Scores."""
        entry = self.open[task]
        process = self._process
        assert process is not None
        answers = [entry.answers[index] for index in range(first, after) if index in entry.answers]
        texts = [self._judged_text(process, entry, answer) for answer in answers]
        is_training = entry.task.kind == "train"
        scoring = process.scoring
        score = scoring.rewarded_verdicts if is_training else scoring.scored_verdicts
        for answer, verdict in zip(answers, score(texts), strict=True):
            entry.verdicts[answer.text_index] = verdict
        self.verified += len(texts)  # progress
        if after == len(entry.groups):
            self._deliver(self.open.pop(task))

    @staticmethod
    def _judged_text(process: ProcessReward, entry: _Open, answer: Answered) -> JudgedText:
        question = entry.groups[answer.text_index].prompt.question
        pieces = None if answer.tokens is None else partial(process.pieces, answer.tokens)
        return JudgedText(question, answer.text, pieces, entry.verdicts[answer.text_index])

    def _settle(
        self, answered: Answered, judged: Judgement, elapsed_ms: int = 0, is_scored: bool = False
    ) -> None:
        entry = self.open[answered.task]
        keeps_text = self._keeps_text or entry.task.kind != "train"
        is_chosen_from = (
            entry.task.kind == "train" or len(entry.groups[answered.text_index].rows) > 1
        )
        if self._process and is_scored and judged.status not in UNJUDGED and is_chosen_from:
            entry.answers[answered.text_index] = answered
        fields = {
            "extracted": cut_text(judged.extracted or ""),
            "elapsed_ms": elapsed_ms,
            "completion": encodable(answered.text) if keeps_text else "",
        }
        verdict = TextVerdict(**common_fields(TextVerdict, answered, judged) | fields)
        self.settle(answered.task, answered.text_index, verdict)

    def settle(self, task: str, text_index: int, verdict: TextVerdict) -> None:
        """Set the verdict on a text; the last one of a task sends its Scores."""
        entry = self.open[task]
        entry.verdicts[text_index] = verdict
        if len(entry.verdicts) < len(entry.groups):
            return
        if not entry.answers:
            self._deliver(self.open.pop(task))
            return
        after = 0
        for group in entry.task.groups:
            first, after = after, after + len(group.rows) * entry.continuations
            self._unscored.append((task, first, after))

    def _deliver(self, entry: _Open) -> None:
        task = entry.task
        scoring_s = time.monotonic() - entry.received_s
        texts = [entry.verdicts[index] for index in range(len(entry.groups))]
        per_row = entry.continuations
        # Texts are numbered through rows and groups, so the verdicts of rows come in that order.
        verdicts = (
            row_verdict(texts[first : first + per_row]) for first in range(0, len(texts), per_row)
        )
        groups = tuple(
            ScoredGroup(
                prefixes=group,
                version=task.version,
                weights_digest=task.weights_digest,
                scorer=self._link.name,
                verdicts=tuple(next(verdicts) for _ in group.rows),
                sampled_s=task.sampled_s,
                scoring_s=scoring_s,
            )
            for group in task.groups
        )
        crash_point("scores.judged")
        self._link.send(Scores(task.task, task.kind, groups, entry.prompt_tokens))


class ScorerLoop(WorkLoop[ScoreTask]):
    """The work loop of a scorer."""

    def __init__(self, link: Link, judging: Judging, ready: Ready) -> None:
        super().__init__(
            link, ScoreTask, RowsLeftReport(link, ready.takes_runs, ready.seats, ready.room)
        )
        self._judging = judging
        self.ready = ready

    def say_ready(self) -> None:
        """Report to the broker what is loaded."""
        self._link.send(self.ready)

    def _begin(self, task: ScoreTask, continuations: int = 1) -> None:
        """Open a task, as `Judging.begin`, and report its rows."""
        self._judging.begin(task, continuations)
        self._rows_left.begin(task.task, len(self._judging.open[task.task].groups))

    def _tasks(self) -> list[ScoreTask]:
        return [entry.task for entry in self._judging.open.values()]

    def _patience_s(self) -> float:
        return POLL_S if self._judging.open else IDLE_S
