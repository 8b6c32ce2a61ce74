"""The scorer's loop: prefixes in, the frozen target's completions judged, scores out. It never receives weights.

    broker ── ScoreTask ──▶ render + prefix ──▶ engine ──▶ verifier children ──▶ Scores ──▶ broker
                                     └─ known already ─▶ ┘

It waits for nothing but the next message, decoding step or verdict; verification of one task overlaps decoding of the next.
A row may be completed several times (`scorer.continuations`). A text whose verdict is `error` keeps that status: it is never
read as a wrong answer.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from prefixrl.common.config import RunConfig
from prefixrl.common.engine import Engine, Job, TokenIds
from prefixrl.common.link import Link
from prefixrl.common.messages import (
    Done,
    Finish,
    FromBroker,
    GroupPrefixes,
    ModelDigests,
    Ready,
    Refused,
    Revoke,
    Row,
    Sampling,
    ScoreTask,
    TextVerdict,
    Welcome,
)
from prefixrl.common.packing import token_ids
from prefixrl.common.rendering import ByteRenderer, Renderer
from prefixrl.common.seeds import row_uniforms
from prefixrl.scorer.completions import Completion, Completions
from prefixrl.scorer.judging import Answered, Judging
from prefixrl.scorer.verifier_pool import VerifierPool

log = logging.getLogger(__name__)

IDLE_S = 0.05
POLL_S = 0.005
EXTENSION = "+"
"""Ends the name of the job that goes on with a task's cut rows."""


@dataclass(frozen=True)
class _Decoding:
    """A text at the engine."""

    place: int
    """In its task, over all groups, rows and continuations."""
    seed: int
    """Of its group."""
    in_group: int
    """The row it continues."""
    continuation: int
    prompt: TokenIds
    answer: TokenIds
    """What stands of the answer: the prefix, and what was completed before the text was cut."""
    was_text: bool
    completed_tokens: int = 0
    """Those that the engine wrote for it."""
    was_cached: bool = True
    """It wrote none so far."""

    @property
    def tokens(self) -> TokenIds:
        """What the engine goes on from."""
        return np.concatenate([self.prompt, self.answer])

    def with_more(self, done: Completion) -> "_Decoding":
        """After another piece of the answer."""
        written = 0 if done.was_cached else int(done.tokens.size)
        return replace(
            self,
            answer=np.concatenate([self.answer, done.tokens]),
            completed_tokens=self.completed_tokens + written,
            was_cached=self.was_cached and done.was_cached,
        )


class Scorer:
    """A target engine and its verifier."""

    def __init__(
        self,
        config: RunConfig,
        link: Link,
        engine: Engine,
        renderer: Renderer | ByteRenderer,
        verifier: VerifierPool,
        digests: ModelDigests,
    ) -> None:
        self._config = config
        self._link = link
        self._engine = engine
        self._renderer = renderer
        self._digests = digests
        cut = config.scorer.truncated or "judge"
        self._judging = Judging(
            link, verifier, config.scorer.keep_completions, "judge" if cut == "extend" else cut
        )
        self._is_warned = False
        self._completions = Completions(config.scorer.cache_bytes)
        self._decoding: dict[str, list[_Decoding]] = {}
        """Per job at the engine: the texts it completes in the order of the job; the others of its task have their verdict
        already, or are completed by the task's other job."""

    def say_ready(self) -> None:
        """Tell the broker what is loaded; tasks of an earlier acquaintance are delivered as usual."""
        self._link.send(Ready(self._engine.slots, self._digests, -1, "", self._engine.name))

    def run(self, stopping: Callable[[], bool]) -> str:
        """Work until the run is over or the process is asked to stop; returns why it ended."""
        while not stopping():
            message = self._link.receive(self._patience_s())
            while message is not None:
                if isinstance(message, Done):
                    return message.reason
                self._handle(message)
                message = self._link.receive(0.0)
            results = self._engine.step(IDLE_S)
            self._report()  # before the results go: what they cost is known when they arrive
            for result in results:
                self._judge(result.key, self._completions.answer(result.key, result.rows))
            self._judging.collect()
        return "asked to stop"

    def _patience_s(self) -> float:
        if not self._judging.open:
            return IDLE_S
        return 0.0 if self._decoding else POLL_S

    def _handle(self, message: FromBroker) -> None:
        match message:
            case ScoreTask():
                self._start(message)
            case Revoke(task, attempt):
                if task in self._decoding and self._engine.cancel(task):
                    del self._decoding[task]
                    self._completions.forget(task)
                    self._judging.drop(task)
                    self._link.send(Refused(task, attempt, "revoked before it started"))
            case Welcome():
                self.say_ready()
            case _:
                pass

    def _start(self, task: ScoreTask) -> None:
        """Submit every text whose question can be rendered; the others are judged `error` with the reason."""
        times = self._config.scorer.texts_per_row(task.kind)
        self._judging.begin(task, times)
        begun: list[_Decoding] = []
        uniforms, scripts, refused, place = [], [], {}, 0
        for group in task.groups:
            after = place + len(group.rows) * times
            try:
                begun += self._begun(group, place, times)
            except ValueError as error:
                unrendered = TextVerdict(
                    0.0, "error", str(error), "error", 0, 0, fault="question not rendered"
                )
                refused.update(dict.fromkeys(range(place, after), unrendered))
            else:
                draws = _draws(group, times, task.sampling.max_new_tokens)
                uniforms.append(draws)
                scripts += [self._script(group, float(each[-1])) for each in draws]
            place = after
        if begun:
            self._submit(task.task, begun, np.concatenate(uniforms), task.sampling, scripts)
        for each, verdict in refused.items():
            self._judging.settle(task.task, each, verdict)

    def _begun(self, group: GroupPrefixes, place: int, times: int) -> list[_Decoding]:
        """A group's texts, the first of which has this place; raises ValueError when its question cannot be rendered."""
        prompt, begun = self._renderer.prompt(group.prompt.question), []
        for number, row in enumerate(group.rows):
            prefix, was_text = self._prefix(row)
            for each in range(times):
                at = place + number * times + each
                begun.append(
                    _Decoding(at, group.seed, number, each, prompt, prefix, was_text=was_text)
                )
        return begun

    def _submit(
        self,
        key: str,
        texts: list[_Decoding],
        uniforms: NDArray[np.float64],
        sampling: Sampling,
        scripts: list[TokenIds],
    ) -> None:
        """Have texts completed; those that are all known are judged at once."""
        self._decoding[key] = texts
        rows, stops = tuple(each.tokens for each in texts), self._renderer.stop_tokens
        left = self._completions.ask(Job(key, rows, uniforms, sampling, stops, tuple(scripts)))
        if left is None:
            self._judge(key, self._completions.answer(key, ()))
        else:
            self._engine.submit(left)

    def _prefix(self, row: Row) -> tuple[TokenIds, bool]:
        """A prefix as the target goes on with it, and whether it had to be encoded anew from its text.

        Where the target's tokenizer reads the very text in the ids that the adapter's read, they are the same tokens to both.
        """
        ids = token_ids(row.tokens)
        bare = self._renderer.without_stop(ids)
        if row.text is None or row.text in (self._renderer.raw(bare), self._renderer.raw(ids)):
            return bare, False
        if not self._is_warned:
            self._is_warned = True
            log.warning(
                "adapter and target have tokenizers of different families: prefixes reach the target as text (the first: %r); "
                "metrics.jsonl has their share as prefix_as_text_fraction",
                row.text,
            )
        # A character cut in the middle is no character to another tokenizer.
        return self._renderer.encode_plain(row.text.rstrip("\ufffd")), True

    def _script(self, group: GroupPrefixes, draw: float) -> TokenIds:
        """What a simulated target answers: right with the declared accuracy."""
        answer = group.prompt.gold if draw < self._config.simulated.accuracy else "none"
        return ByteRenderer().encode(f"\\boxed{{{answer}}}")

    def _judge(self, key: str, completions: list[Completion]) -> None:
        """Have every text judged that is done; with `truncated = "extend"` those that were cut are completed further first.

        One that cannot be completed further, for lack of room perhaps, is judged as it was cut.
        """
        task = key.removesuffix(EXTENSION)
        may_extend = self._config.scorer.truncated == "extend" and task == key
        cut: list[_Decoding] = []
        for begun, done in zip(self._decoding.pop(key), completions, strict=True):
            if done.finish == "error" and task != key:
                self._judge_text(task, begun, self._renderer.text(begun.answer), "length")
                continue
            if done.finish == "error":
                lost = TextVerdict(0.0, "error", done.error, "error", 0, 0, fault="no completion")
                self._judging.settle(task, begun.place, lost)
                continue
            text = begun.with_more(done)
            if done.finish == "length" and may_extend:
                cut.append(text)
                continue
            whole = (
                self._renderer.text(text.answer)
                if done.text is None
                else self._renderer.text(begun.answer) + done.text
            )
            self._judge_text(task, text, whole, done.finish)
        if cut:
            self._extend(task, cut)

    def _judge_text(self, task: str, done: _Decoding, text: str, finish: Finish) -> None:
        written, was_text, was_cached = done.completed_tokens, done.was_text, done.was_cached
        self._judging.take(Answered(task, done.place, text, finish, written, was_text, was_cached))

    def _extend(self, task: str, cut: list[_Decoding]) -> None:
        """Go on where the limit cut texts, with draws of their own, once."""
        limit = self._config.scorer.most_extension_tokens
        draws = [
            row_uniforms(
                each.seed, _purpose("extension", each.continuation), each.in_group + 1, limit
            )[-1]
            for each in cut
        ]
        given = self._judging.open[task].task.sampling
        sampling = msgspec.structs.replace(given, max_new_tokens=limit)
        scripts = [ByteRenderer().encode("")] * len(cut)
        self._submit(task + EXTENSION, cut, np.stack(draws), sampling, scripts)

    def _report(self) -> None:
        vitals = self._link.vitals
        vitals.progress = self._engine.progress + self._judging.verified
        vitals.busy_slot_s = self._engine.busy_slot_s
        vitals.leases = tuple(self._judging.open)
        pending = self._judging.pending
        vitals.usage = self._engine.usage
        waits_for = self._engine.waits_for
        idle = f"waiting for {waits_for}" if waits_for else "scoring"
        vitals.state = f"verifying {pending}" if pending and not waits_for else idle


def _draws(group: GroupPrefixes, times: int, tokens: int) -> NDArray[np.float64]:
    """Draws of a group's texts, shape (rows x times, tokens): a row's continuations follow each other."""
    each = [
        row_uniforms(group.seed, _purpose("completion", continuation), len(group.rows), tokens)
        for continuation in range(times)
    ]
    return np.stack(each, axis=1).reshape(-1, tokens)


def _purpose(name: str, continuation: int) -> str:
    """What draws are for. The first continuation's are those of a row that is completed once."""
    return f"{name} {continuation}" if continuation else name
