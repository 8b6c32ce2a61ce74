"""The scorer's loop: prefixes in, the frozen target's completions judged, scores out. It never receives weights.

    broker ── ScoreTask ──▶ render + prefix ──▶ engine ──▶ verifier children ──▶ Scores ──▶ broker

It waits for nothing but the next message, decoding step or verdict; verification of one task overlaps decoding of the next.
A row whose verdict is `error` keeps that status: it is never read as a wrong answer.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from prefixrl.common.config import RunConfig
from prefixrl.common.engine import Engine, Job, JobResult, TokenIds
from prefixrl.common.link import Link
from prefixrl.common.messages import (
    Done,
    FromBroker,
    GroupPrefixes,
    ModelDigests,
    Ready,
    Refused,
    Revoke,
    Row,
    ScoreTask,
    Verdict,
    Welcome,
)
from prefixrl.common.packing import token_ids
from prefixrl.common.rendering import ByteRenderer, Renderer
from prefixrl.common.seeds import row_uniforms
from prefixrl.scorer.judging import Answered, Judging
from prefixrl.scorer.verifier_pool import VerifierPool

log = logging.getLogger(__name__)

IDLE_S = 0.05
POLL_S = 0.005
EXTENSION = "+"
"""Ends the name of the job that goes on with a task's cut rows."""


@dataclass(frozen=True)
class _Decoding:
    """A row at the engine."""

    row: int
    """Of its task, over all groups."""
    seed: int
    """Of its group."""
    in_group: int
    prompt: TokenIds
    answer: TokenIds
    """What stands of the answer: the prefix, and what was completed before the row was cut."""
    was_text: bool
    completed_tokens: int = 0


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
        self._decoding: dict[str, list[_Decoding]] = {}
        """Per job at the engine: the rows it completes in the order of the job; the others of its task have their verdict
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
                self._judge(result)
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
                    self._judging.drop(task)
                    self._link.send(Refused(task, attempt, "revoked before it started"))
            case Welcome():
                self.say_ready()
            case _:
                pass

    def _start(self, task: ScoreTask) -> None:
        """Submit every row whose question can be rendered; the others are judged `error` with the reason."""
        self._judging.begin(task)
        rows: list[TokenIds] = []
        decoding: list[_Decoding] = []
        uniforms, scripts, refused, index = [], [], {}, 0
        for group in task.groups:
            draws = row_uniforms(
                group.seed, "completion", len(group.rows), task.sampling.max_new_tokens
            )
            try:
                prompt = self._renderer.prompt(group.prompt.question)
            except ValueError as error:
                for _ in group.rows:
                    refused[index] = Verdict(
                        0.0, "error", str(error), "error", 0, 0, fault="question not rendered"
                    )
                    index += 1
                continue
            for number, (row, row_draws) in enumerate(zip(group.rows, draws, strict=True)):
                prefix, was_text = self._prefix(row)
                rows.append(np.concatenate([prompt, prefix]))
                scripts.append(self._script(group, float(row_draws[-1])))
                decoding.append(_Decoding(index, group.seed, number, prompt, prefix, was_text))
                index += 1
            uniforms.append(draws)
        if rows:
            self._decoding[task.task] = decoding
            stops = self._renderer.stop_tokens
            draws = np.concatenate(uniforms)
            job = Job(task.task, tuple(rows), draws, task.sampling, stops, tuple(scripts))
            self._engine.submit(job)
        for row_index, verdict in refused.items():
            self._judging.settle(task.task, row_index, verdict)

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

    def _judge(self, result: JobResult) -> None:
        """Have every row judged that is done; with `truncated = "extend"` those that were cut are completed further first."""
        task = result.key.removesuffix(EXTENSION)
        may_extend = self._config.scorer.truncated == "extend" and task == result.key
        cut: list[_Decoding] = []
        for begun, done in zip(self._decoding.pop(result.key), result.rows, strict=True):
            if done.finish == "error":
                lost = Verdict(0.0, "error", done.error, "error", 0, 0, fault="no completion")
                self._judging.settle(task, begun.row, lost)
                continue
            row = replace(
                begun,
                answer=np.concatenate([begun.answer, done.tokens]),
                completed_tokens=begun.completed_tokens + int(done.tokens.size),
            )
            if done.finish == "length" and may_extend:
                cut.append(row)
            else:
                tokens = row.completed_tokens
                text = (
                    self._renderer.text(row.answer)
                    if done.text is None
                    else self._renderer.text(begun.answer) + done.text
                )
                self._judging.take(Answered(task, row.row, text, done.finish, tokens, row.was_text))
        if cut:
            self._extend(task, cut)

    def _extend(self, task: str, cut: list[_Decoding]) -> None:
        """Go on where the limit cut rows, with draws of their own, once."""
        limit = self._config.scorer.most_extension_tokens
        draws = np.stack(
            [row_uniforms(row.seed, "extension", row.in_group + 1, limit)[-1] for row in cut]
        )
        job = Job(
            task + EXTENSION,
            tuple(np.concatenate([row.prompt, row.answer]) for row in cut),
            draws,
            msgspec.structs.replace(self._judging.open[task].task.sampling, max_new_tokens=limit),
            self._renderer.stop_tokens,
            tuple(ByteRenderer().encode("") for _ in cut),
        )
        self._decoding[job.key] = cut
        self._engine.submit(job)

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
