"""The scorer with a target: prefixes in, completions judged, Scores out; never any weights.

    broker ── ScoreTask ──▶ render + prefix ──▶ engine ──▶ verifier children ──▶ Scores ──▶ broker
                                     └─ cached, or kept by the broker ─▶ ┘

It waits only for the next message, decoding step or verdict: verification of one task overlaps
decoding of the next. A row may be completed several times (`scorer.continuations`).
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import msgspec
import numpy as np
from numpy.typing import NDArray

from prefixrl.common.config.foreign.verifier import MATHEMATICS
from prefixrl.common.config.run import RunConfig
from prefixrl.common.engines.interface.base import Engine, Job, TokenIds, Watch, ready_of
from prefixrl.common.prompts.rendering import ByteRenderer, Renderer
from prefixrl.common.seeds import row_uniforms
from prefixrl.common.wire.messages.groups import Finish, GroupPrefixes, Row, Sampling, TextVerdict
from prefixrl.common.wire.messages.worker import ModelDigests, ScoreTask
from prefixrl.common.worker.link import Link
from prefixrl.common.worker.work_loop import IDLE_S
from prefixrl.scorer.asked_row import LEAKED, AskedRow, GroupAsking, watch_of
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
    asked_row: AskedRow
    """The prompt and the beginning of the answer, as the target reads them."""
    answer: TokenIds
    """The answer so far: the prefix that it continues, and the completion up to the cut if the text is extended."""
    completed_tokens: int = 0
    """Tokens that the engine wrote for this text."""
    was_cached: bool = True
    """True while the engine has written no token of it."""
    was_stopped: bool = False
    """True if it ended because its answer was complete."""

    @property
    def tokens(self) -> TokenIds:
        """The row that the engine continues."""
        return np.concatenate([self.asked_row.prompt, self.answer])

    def with_piece(self, piece: Completion) -> "_Decoding":
        """Append another piece of the answer."""
        written = 0 if piece.was_cached else int(piece.tokens.size)
        return replace(
            self,
            answer=np.concatenate([self.answer, piece.tokens]),
            completed_tokens=self.completed_tokens + written,
            was_cached=self.was_cached and piece.was_cached,
            was_stopped=piece.was_stopped,
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
            config,
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
        """Texts of each job at the engine, in the order of its rows. Other texts of its task have a
        verdict already, or belong to the task's other job."""

    def _patience_s(self) -> float:
        return 0.0 if self._decoding and self._judging.open else super()._patience_s()

    def _step(self) -> None:
        results = self._engine.step(IDLE_S)
        self._report()  # before the results are sent: their cost must be known when they arrive
        for result in results:
            self._completions.add_written(result.key, result.rows)
        self._judge_complete()
        self._judging.collect()

    def _judge_complete(self) -> None:
        """Have the texts of every job judged of which all completions are there."""
        for key, completions in self._completions.complete_jobs():
            self._judge(key, completions)

    def _unended(self) -> dict[str, int]:
        rows_left = self._engine.rows_left
        return {task: rows_left(task) + rows_left(task + EXTENSION) for task in self._judging.open}

    def _take_back(self, task: str) -> bool:
        # Kept answers of the task are with the verifier already.
        if task in self._judging.open and self._judging.open[task].task.answers:
            return False
        if self._completions.is_awaited(task):
            return False
        if task not in self._decoding or not self._engine.cancel(task):
            return False
        del self._decoding[task]
        self._completions.forget_job(task)
        self._judging.drop(task)
        return True

    def _start(self, task: ScoreTask) -> None:
        """Submit every text that is to be completed; the others get their verdict at once."""
        times = self._config.scorer.texts_per_row(task.kind)
        self._begin(task, times)
        texts: list[_Decoding] = []
        uniforms: list[Draws] = []
        scripts: list[TokenIds] = []
        settled: dict[int, TextVerdict] = {}
        written: list[_Decoding] = []
        first = 0
        for group in task.groups:
            of_group, of_none = self._texts_of(group, first, times)
            settled |= of_none
            # A kept answer takes the place of a completion: the target is not asked.
            if task.answers:
                written += [text for text in of_group if task.answers[text.text_index]]
                of_group = [text for text in of_group if not task.answers[text.text_index]]
            if of_group:
                # Drawn for the whole group, then picked: draws must not depend on kept answers.
                draws = _draws(group, times, task.sampling.max_new_tokens)
                draws = draws[[text.text_index - first for text in of_group]]
                texts += of_group
                uniforms.append(draws)
                scripts += [self._script(group, float(row[-1])) for row in draws]
            first += len(group.rows) * times
        if texts:
            self._submit(task.task, texts, np.concatenate(uniforms), task.sampling, scripts)
        for index, verdict in settled.items():
            self._judging.settle(task.task, index, verdict)
        for text in written:
            if answer := task.answers[text.text_index]:
                whole = replace(text, answer=self._renderer.encode(answer.text))
                self._judge_text(task.task, whole, answer.text, answer.finish)

    def _texts_of(
        self, group: GroupPrefixes, first: int, times: int
    ) -> tuple[list[_Decoding], dict[int, TextVerdict]]:
        """Return a group's texts to complete, and verdicts on the others, by index from `first` on."""
        texts: list[_Decoding] = []
        settled: dict[int, TextVerdict] = {}
        asking = GroupAsking(self._renderer, group, self._config.has_advice)
        for row_index, row in enumerate(group.rows):
            indexes = range(first + row_index * times, first + (row_index + 1) * times)
            try:
                asked_row = asking.row(row)
            # A question that cannot be rendered costs its own row, not the task.
            except ValueError as error:
                settled |= dict.fromkeys(indexes, failure(str(error), "question not rendered"))
                continue
            # The gold answer stands in the prefix, so what the target makes of it says nothing.
            if asked_row.is_leak and self._config.reward.no_leak:
                settled |= dict.fromkeys(indexes, LEAKED)
                continue
            self._warn_of_text(asked_row.was_text, row)
            for continuation, text_index in enumerate(indexes):
                text = _Decoding(
                    text_index=text_index,
                    seed=group.seed,
                    row=row_index,
                    continuation=continuation,
                    asked_row=asked_row,
                    answer=asked_row.prefix,
                )
                texts.append(text)
        return texts, settled

    def _submit(
        self,
        key: str,
        texts: list[_Decoding],
        uniforms: Draws,
        sampling: Sampling,
        scripts: list[TokenIds],
    ) -> None:
        """Have texts completed; what is cached whole is judged at once."""
        self._decoding[key] = texts
        rows = tuple(text.tokens for text in texts)
        stop_tokens = self._renderer.stop_tokens
        watches = tuple(self._watch_maker(key, text) for text in texts)
        job = Job(
            key,
            rows,
            uniforms,
            sampling,
            stop_tokens,
            tuple(scripts),
            watches=watches if any(watches) else (),
        )
        missing = self._completions.missing_part(job)
        if missing is not None:
            self._engine.submit(missing)
        self._judge_complete()

    def _watch_maker(self, key: str, text: _Decoding) -> Callable[[], Watch] | None:
        """Return the maker of a text's watch; None where the text is not to be ended by its answer."""
        group = self._judging.open[key.removesuffix(EXTENSION)].groups[text.text_index]
        if not self._config.scorer.stop_when_answered or group.prompt.code != MATHEMATICS:
            return None
        row = text.asked_row
        return partial(watch_of, self._renderer, row.prompt, row.prefix, text.answer)

    def _warn_of_text(self, was_text: bool, row: Row) -> None:
        """Log once that prefixes reach the target as text."""
        if was_text and not self._is_warned:
            self._is_warned = True
            log.warning(
                "adapter and target have tokenizers of different families: prefixes reach the target as text (the "
                "first: %r); metrics.jsonl has their share in prefix_as_text_fraction",
                row.text,
            )

    def _script(self, group: GroupPrefixes, draw: float) -> TokenIds:
        """Return the answer of a simulated target: right with the declared accuracy."""
        answer = group.prompt.gold if draw < self._config.simulated.accuracy else "none"
        return ByteRenderer().encode(f"\\boxed{{{answer}}}")

    def _judge(self, key: str, completions: list[Completion]) -> None:
        """Have texts judged, cut ones extended first if asked for (and if possible, else as cut)."""
        task = key.removesuffix(EXTENSION)
        may_extend = self._config.scorer.truncated == "extend" and task == key
        cut: list[_Decoding] = []
        entry = self._judging.open[task]
        for text, completion in zip(self._decoding.pop(key), completions, strict=True):
            if entry.task.kind == "draft" and not completion.was_cached:
                counted = completion.prompt_tokens
                entry.prompt_tokens += text.tokens.size if counted is None else counted
            whole = text.with_piece(completion)
            finish = completion.finish
            if finish == "error" and task != key:
                # The extension failed: the text is judged as it was cut.
                self._judge_text(task, text, text.answer, "length")
            elif finish == "error":
                verdict = failure(completion.error, "no completion")
                self._judging.settle(task, text.text_index, verdict)
            elif finish == "length" and may_extend:
                cut.append(whole)
            elif completion.text is not None:
                # An endpoint may return a text whose tokens are not known.
                answer = self._renderer.text(text.answer) + completion.text
                self._judge_text(task, whole, answer, finish)
            elif finish == "eos":
                # A stop may be no special token, so that decoding would not leave it out.
                self._judge_text(task, whole, self._renderer.without_stop(whole.answer), finish)
            else:
                self._judge_text(task, whole, whole.answer, finish)
        if cut:
            self._extend(task, cut)

    def _judge_text(
        self, task: str, decoding: _Decoding, answer: TokenIds | str, finish: Finish
    ) -> None:
        """Have an answer judged; it is a text where its tokens are not known."""
        prefix_tokens = decoding.asked_row.prefix.size
        ids = None if isinstance(answer, str) else answer
        text = answer if isinstance(answer, str) else self._renderer.text(answer)
        self._judging.take_text(
            Answered(
                task=task,
                text_index=decoding.text_index,
                text=text,
                finish=finish,
                completion_tokens=decoding.completed_tokens,
                was_text=decoding.asked_row.was_text,
                was_cached=decoding.was_cached,
                written_tokens=max(0, int(decoding.answer.size - prefix_tokens)),
                prefix=decoding.asked_row.text,
                is_answered=decoding.asked_row.is_answered,
                is_leak=decoding.asked_row.is_leak,
                stopped_share=float(decoding.was_stopped),
                tokens=ids,
            )
        )

    def _extend(self, task: str, cut: list[_Decoding]) -> None:
        """Continue texts that the limit cut, once, with draws of their own."""
        limit = self._config.scorer.most_extension_tokens
        draws = []
        for text in cut:
            purpose = _purpose("extension", text.continuation)
            draws.append(row_uniforms(text.seed, purpose, text.row + 1, limit)[-1])
        sampling = msgspec.structs.replace(
            self._judging.open[task].task.sampling, max_new_tokens=limit
        )
        scripts = [ByteRenderer().encode("")] * len(cut)
        self._submit(task + EXTENSION, cut, np.stack(draws), sampling, scripts)

    def _report(self) -> None:
        vitals = self._link.vitals
        vitals.progress = self._engine.progress + self._judging.verified
        vitals.busy_row_s = self._engine.busy_row_s
        vitals.waiting_rows = self._engine.waiting_rows
        vitals.tokens = self._engine.tokens
        vitals.usage = self._engine.usage
        waits_for = self._engine.waits_for
        vitals.activity = "waiting" if waits_for else self._judging.activity
        vitals.state = f"waiting for {waits_for}" if waits_for else self._judging.state or "scoring"


def _draws(group: GroupPrefixes, times: int, tokens: int) -> Draws:
    """Return a group's draws, shape (rows x times, tokens); continuations of a row are adjacent."""
    purposes = [_purpose("completion", continuation) for continuation in range(times)]
    by_purpose = [
        row_uniforms(group.seed, purpose, len(group.rows), tokens) for purpose in purposes
    ]
    return np.stack(by_purpose, axis=1).reshape(-1, tokens)


def _purpose(name: str, continuation: int) -> str:
    """Name the purpose of draws. The first continuation draws as a row with one continuation does."""
    return f"{name} {continuation}" if continuation else name
