"""Tasks between their arrival and their Scores: what a scorer with a target and one of direct mode have in common.

A row ends with a verdict, from the verifier or, where its text was cut, perhaps without it (`take`), or before it has a text
(`settle`). With several continuations per prefix that goes for each of them, and the row's verdict is what they amount to. The
last one of a task sends its Scores. A text whose verdict is `error` keeps that status: it is never read as a wrong answer.
"""

import itertools
import time
from dataclasses import dataclass, field
from typing import Literal

from prefixrl.common.continuations import row_verdict
from prefixrl.common.extract import extract_answer
from prefixrl.common.link import Link
from prefixrl.common.messages import (
    Finish,
    Prompt,
    ScoredGroup,
    Scores,
    ScoreTask,
    TextVerdict,
    VerdictStatus,
)
from prefixrl.scorer.verifier_pool import VerifierPool

Cut = Literal["judge", "zero", "mask"]
"""What becomes of a text that its length limit cut; `scorer.truncated` says what each means."""


@dataclass
class _Open:
    task: ScoreTask
    received_s: float
    continuations: int
    """Texts per row."""
    prompts: list[Prompt]
    """Of every text of the task."""
    verdicts: dict[int, TextVerdict] = field(default_factory=dict)


@dataclass(frozen=True)
class Answered:
    """A text that can be judged."""

    task: str
    place: int
    """Of the text in its task, over all its groups: a row's continuations follow each other."""
    text: str
    """The whole answer."""
    finish: Finish
    completion_tokens: int
    was_text: bool = False
    """The prefix reached the target as text."""
    was_cached: bool = False
    """No token of it was written for this row."""


class Judging:
    """The open tasks of a scorer and its verifier."""

    def __init__(self, link: Link, verifier: VerifierPool, keeps_text: bool, cut: Cut) -> None:
        self._link = link
        self._cut = cut
        self._verifier = verifier
        self._keeps_text = keeps_text
        self._verifying: dict[int, tuple[Answered, float]] = {}
        self._keys = itertools.count()
        self.open: dict[str, _Open] = {}
        self.verified = 0

    @property
    def pending(self) -> int:
        """Texts at the verifier."""
        return len(self._verifying)

    def begin(self, task: ScoreTask, continuations: int = 1) -> None:
        """Open a task of so many texts per row, every one of which must be taken or settled."""
        prompts = [
            group.prompt for group in task.groups for _ in range(len(group.rows) * continuations)
        ]
        self.open[task.task] = _Open(task, time.monotonic(), continuations, prompts)

    def drop(self, task: str) -> None:
        """Forget a task of which no text was taken."""
        del self.open[task]

    def take(self, answered: Answered) -> None:
        """Let the verifier judge a text, unless it was cut and is worth nothing, or no training, for that."""
        if not self.open[answered.task].prompts[answered.place].gold:
            self.settle(answered.task, answered.place, self._without_gold(answered))
            return
        is_masked = self._cut == "mask" and self.open[answered.task].task.kind == "train"
        if answered.finish != "length" or not (is_masked or self._cut == "zero"):
            self._verify(answered)
            return
        status: VerdictStatus = "truncated" if is_masked else "no_answer"
        kept = answered.text if self.keeps_text(answered.task) else ""
        tokens = answered.completion_tokens
        cut = TextVerdict(
            0.0, status, "", answered.finish, tokens, 0, kept, "", answered.was_text, answered.was_cached
        )  # fmt: skip
        self.settle(answered.task, answered.place, cut)

    def _without_gold(self, answered: Answered) -> TextVerdict:
        """Of an answer to a problem without a gold one: of an evaluation nothing is judged, in training it is a failure."""
        is_training = self.open[answered.task].task.kind == "train"
        found = extract_answer(answered.text) or ""
        return TextVerdict(
            reward=0.0,
            status="error" if is_training else "no_gold",
            extracted="the problem has no gold answer" if is_training else found,
            finish=answered.finish,
            completion_tokens=answered.completion_tokens,
            elapsed_ms=0,
            fault="gold answer unreadable" if is_training else "",
            completion=answered.text if self.keeps_text(answered.task) else "",
            was_text=answered.was_text,
            was_cached=answered.was_cached,
        )

    def _verify(self, answered: Answered) -> None:
        key, prompt = next(self._keys), self.open[answered.task].prompts[answered.place]
        self._verifying[key] = answered, time.monotonic()
        self._verifier.submit(key, answered.text, prompt.gold, prompt.question, prompt.code)

    def settle(self, task: str, place: int, verdict: TextVerdict) -> None:
        """A text's verdict is known; the last one ends the task."""
        entry = self.open[task]
        entry.verdicts[place] = verdict
        if len(entry.verdicts) == len(entry.prompts):
            self._deliver(self.open.pop(task))

    def keeps_text(self, task: str) -> bool:
        """Whether verdicts of a task carry the text that was judged."""
        return self._keeps_text or self.open[task].task.kind == "eval"

    def collect(self) -> None:
        """Settle what the verifier has judged; never waits."""
        for key, verdict in self._verifier.poll():
            answered, since_s = self._verifying.pop(key)
            self.verified += 1
            made = TextVerdict(
                reward=verdict.reward,
                status=verdict.status,
                extracted=verdict.extracted or "",
                finish=answered.finish,
                completion_tokens=answered.completion_tokens,
                elapsed_ms=int((time.monotonic() - since_s) * 1000),
                fault=verdict.fault,
                completion=answered.text if self.keeps_text(answered.task) else "",
                was_text=answered.was_text,
                was_cached=answered.was_cached,
            )
            self.settle(answered.task, answered.place, made)

    def _deliver(self, entry: _Open) -> None:
        task, scoring_s = entry.task, time.monotonic() - entry.received_s
        of_texts = [entry.verdicts[place] for place in range(len(entry.prompts))]
        each = entry.continuations
        verdicts = (
            row_verdict(of_texts[first : first + each]) for first in range(0, len(of_texts), each)
        )
        groups = tuple(
            ScoredGroup(
                prefixes=group,
                version=task.version,
                weights_digest=task.weights_digest,
                verdicts=tuple(next(verdicts) for _ in group.rows),
                scorer=self._link.name,
                sampled_s=task.sampled_s,
                scoring_s=scoring_s,
            )
            for group in task.groups
        )
        self._link.send(Scores(task.task, task.attempt, task.kind, groups))
