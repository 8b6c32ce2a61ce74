"""The scorer with a target: prefixes in, completions judged, Scores out; never any weights.

    broker ── ScoreTask ──▶ render + prefix ──▶ engine ──▶ verifier children ──▶ Scores ──▶ broker
                                     └─ cached ────────▶ ┘

It waits only for the next message, decoding step or verdict: verification of one task overlaps decoding of the next. A
row may be completed several times (`scorer.continuations`).
"""

import logging
from dataclasses import dataclass, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from prefixrl.common.config.run import RunConfig
from prefixrl.common.engines.interface.base import Engine, Job, TokenIds, ready_of
from prefixrl.common.prompts.extract import extract_answer
from prefixrl.common.prompts.rendering import ByteRenderer, Renderer, continued_prefix
from prefixrl.common.seeds import row_uniforms
from prefixrl.common.wire.messages.groups import Finish, GroupPrefixes, Row, Sampling, TextVerdict
from prefixrl.common.wire.messages.worker import ModelDigests, ScoreTask
from prefixrl.common.wire.packing import token_ids
from prefixrl.common.worker.link import Link
from prefixrl.common.worker.work_loop import IDLE_S
from prefixrl.scorer.cache import Completion, Completions
from prefixrl.scorer.judging import Answered, Judging, ProcessReward, ScorerLoop, failure
from prefixrl.scorer.process.step_scoring import StepScoring
from prefixrl.scorer.verifier.pool_thread import JudgeThread

log = logging.getLogger(__name__)

Draws = NDArray[np.float64]
EXTENSION = "+"
"""Suffix of the key of the job that extends a task's cut texts."""


@dataclass(frozen=True)
class _Decoding:
    """A text at the engine."""

    text_index: int
    """Index in its task, over all groups, rows and continuations."""
    seed: int
    """Seed of its group."""
    row: int
    """Index of its row in the group."""
    continuation: int
    prompt: TokenIds
    answer: TokenIds
    """The answer so far: the prefix, and the completion up to the cut if the text is extended."""
    was_text: bool
    is_answered: bool
    """True if the prefix alone has an answer already."""
    completed_tokens: int = 0
    """Tokens that the engine wrote for this text."""
    was_cached: bool = True
    """True while the engine has written none."""

    @property
    def tokens(self) -> TokenIds:
        """The row that the engine continues."""
        return np.concatenate([self.prompt, self.answer])

    def with_more(self, done: Completion) -> "_Decoding":
        """Append another piece of the answer."""
        written = 0 if done.was_cached else int(done.tokens.size)
        return replace(
            self,
            answer=np.concatenate([self.answer, done.tokens]),
            completed_tokens=self.completed_tokens + written,
            was_cached=self.was_cached and done.was_cached,
        )


class Scorer(ScorerLoop):
    """A target engine and its verifier."""

    def __init__(
        self,
        config: RunConfig,
        link: Link,
        engine: Engine,
        renderer: Renderer | ByteRenderer,
        verifier: JudgeThread,
        digests: ModelDigests,
        scoring: StepScoring | None = None,
    ) -> None:
        judging = Judging(
            link,
            verifier,
            config.scorer,
            "judge",
            ProcessReward(scoring, renderer.pieces) if scoring else None,
        )
        ready = ready_of(engine, digests, version=-1, weights_digest="")
        super().__init__(link, judging, ready)
        self._config = config
        self._engine = engine
        self._renderer = renderer
        self._is_warned = False
        self._completions = Completions(config.scorer.cache_bytes)
        self._decoding: dict[str, list[_Decoding]] = {}
        """Texts of each job at the engine, in the order of its rows. Other texts of its task have a verdict already, or
        belong to the task's other job."""

    def _patience_s(self) -> float:
        return 0.0 if self._decoding and self._judging.open else super()._patience_s()

    def _step(self) -> None:
        results = self._engine.step(IDLE_S)
        self._report()  # before the results are sent: their cost must be known when they arrive
        for result in results:
            self._judge(result.key, self._completions.answer(result.key, result.rows))
        self._judging.collect()

    def _unended(self) -> dict[str, int]:
        left = self._engine.rows_left
        return {task: left(task) + left(task + EXTENSION) for task in self._judging.open}

    def _take_back(self, task: str) -> bool:
        if task not in self._decoding or not self._engine.cancel(task):
            return False
        del self._decoding[task]
        self._completions.forget(task)
        self._judging.drop(task)
        return True

    def _start(self, task: ScoreTask) -> None:
        """Submit every text whose question can be rendered; the others get the verdict `error`."""
        times = self._config.scorer.texts_per_row(task.kind)
        self._judging.begin(task, times)
        self._rows_left.begin(task.task, len(self._judging.open[task.task].groups))
        begun: list[_Decoding] = []
        uniforms, scripts, first = [], [], 0
        refused: dict[int, TextVerdict] = {}
        for group in task.groups:
            after = first + len(group.rows) * times
            try:
                begun += self._begun(group, first, times)
            except ValueError as error:
                refused |= dict.fromkeys(
                    range(first, after), failure(str(error), "question not rendered")
                )
            else:
                draws = _draws(group, times, task.sampling.max_new_tokens)
                uniforms.append(draws)
                scripts += [self._script(group, float(each[-1])) for each in draws]
            first = after
        if begun:
            self._submit(task.task, begun, np.concatenate(uniforms), task.sampling, scripts)
        for index, verdict in refused.items():
            self._judging.settle(task.task, index, verdict)

    def _begun(self, group: GroupPrefixes, first: int, times: int) -> list[_Decoding]:
        """Return a group's texts, from index `first` on; raises ValueError if it cannot be rendered."""
        prompt = self._renderer.prompt(
            group.prompt.question, group.prompt.system, group.prompt.earlier
        )
        begun: list[_Decoding] = []
        for number, row in enumerate(group.rows):
            prefix, was_text = self._prefix(row)
            is_answered = extract_answer(self._renderer.text(prefix)) is not None
            for each in range(times):
                index = first + len(begun)
                begun.append(
                    _Decoding(
                        index, group.seed, number, each, prompt, prefix, was_text, is_answered
                    )
                )
        return begun

    def _submit(
        self,
        key: str,
        texts: list[_Decoding],
        uniforms: Draws,
        sampling: Sampling,
        scripts: list[TokenIds],
    ) -> None:
        """Have texts completed; if all completions are cached, judge them at once."""
        self._decoding[key] = texts
        rows, stops = tuple(each.tokens for each in texts), self._renderer.stop_tokens
        left = self._completions.ask(Job(key, rows, uniforms, sampling, stops, tuple(scripts)))
        if left is None:
            self._judge(key, self._completions.answer(key, ()))
        else:
            self._engine.submit(left)

    def _prefix(self, row: Row) -> tuple[TokenIds, bool]:
        """Return a prefix as the target continues it, and True if it was encoded from its text."""
        prefix, was_text = continued_prefix(self._renderer, token_ids(row.tokens), row.text)
        if was_text and not self._is_warned:
            self._is_warned = True
            log.warning(
                "adapter and target have tokenizers of different families: prefixes reach the target as text (the "
                "first: %r); metrics.jsonl has their share in prefix_as_text_fraction",
                row.text,
            )
        return prefix, was_text

    def _script(self, group: GroupPrefixes, draw: float) -> TokenIds:
        """Return the answer of a simulated target: right with the declared accuracy."""
        answer = group.prompt.gold if draw < self._config.simulated.accuracy else "none"
        return ByteRenderer().encode(f"\\boxed{{{answer}}}")

    def _judge(self, key: str, completions: list[Completion]) -> None:
        """Have texts judged, cut ones extended first if asked for (and if possible, else as cut)."""
        task = key.removesuffix(EXTENSION)
        may_extend = self._config.scorer.truncated == "extend" and task == key
        cut: list[_Decoding] = []
        for begun, done in zip(self._decoding.pop(key), completions, strict=True):
            whole = begun.with_more(done)
            if done.finish == "error" and task != key:
                self._judge_text(task, begun, begun.answer, "length")
            elif done.finish == "error":
                self._judging.settle(task, begun.text_index, failure(done.error, "no completion"))
            elif done.finish == "length" and may_extend:
                cut.append(whole)
            elif done.text is None:
                # A stop may be no special token.
                answer = (
                    self._renderer.without_stop(whole.answer)
                    if done.finish == "eos"
                    else whole.answer
                )
                self._judge_text(task, whole, answer, done.finish)
            else:
                self._judge_text(
                    task, whole, self._renderer.text(begun.answer) + done.text, done.finish
                )
        if cut:
            self._extend(task, cut)

    def _judge_text(
        self, task: str, done: _Decoding, answer: TokenIds | str, finish: Finish
    ) -> None:
        """Have an answer judged; it is a text where its tokens are not known."""
        ids = None if isinstance(answer, str) else answer
        text = answer if isinstance(answer, str) else self._renderer.text(answer)
        written, was_text, was_cached = done.completed_tokens, done.was_text, done.was_cached
        self._judging.take(
            Answered(
                task,
                done.text_index,
                text,
                finish,
                written,
                was_text,
                was_cached,
                done.is_answered,
                ids,
            )
        )

    def _extend(self, task: str, cut: list[_Decoding]) -> None:
        """Continue texts that the limit cut, once, with draws of their own."""
        limit = self._config.scorer.most_extension_tokens
        names = [_purpose("extension", each.continuation) for each in cut]
        draws = [
            row_uniforms(each.seed, name, each.row + 1, limit)[-1]
            for each, name in zip(cut, names, strict=True)
        ]
        sampling = msgspec.structs.replace(
            self._judging.open[task].task.sampling, max_new_tokens=limit
        )
        scripts = [ByteRenderer().encode("")] * len(cut)
        self._submit(task + EXTENSION, cut, np.stack(draws), sampling, scripts)

    def _report(self) -> None:
        vitals = self._link.vitals
        vitals.progress = self._engine.progress + self._judging.verified
        vitals.busy_row_s, vitals.waiting_rows = self._engine.busy_row_s, self._engine.waiting_rows
        vitals.tokens = self._engine.tokens
        vitals.usage = self._engine.usage
        waits_for = self._engine.waits_for
        vitals.activity = "waiting" if waits_for else self._judging.activity
        vitals.state = f"waiting for {waits_for}" if waits_for else self._judging.state or "scoring"


def _draws(group: GroupPrefixes, times: int, tokens: int) -> Draws:
    """Return a group's draws, shape (rows x times, tokens); continuations of a row are adjacent."""
    purposes = [_purpose("completion", continuation) for continuation in range(times)]
    each = [row_uniforms(group.seed, purpose, len(group.rows), tokens) for purpose in purposes]
    return np.stack(each, axis=1).reshape(-1, tokens)


def _purpose(name: str, continuation: int) -> str:
    """Name the purpose of draws. The first continuation draws as a row with one continuation does."""
    return f"{name} {continuation}" if continuation else name
