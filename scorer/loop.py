"""The scorer's loop: prefixes in, the frozen target's completions judged, scores out. It never receives weights.

    broker ── ScoreTask ──▶ render + prefix ──▶ engine ──▶ verifier children ──▶ Scores ──▶ broker

It waits for nothing but the next message, decoding step or verdict; verification of one task overlaps decoding of the next.
A row whose verdict is `error` keeps that status: it is never read as a wrong answer.
"""

import logging
from collections.abc import Callable

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
        self._judging = Judging(link, verifier, config.scorer.keep_completions)
        self._decoding: dict[str, list[tuple[int, TokenIds]]] = {}
        """Per task at the engine: the rows it completes in the order of its job, with their prefixes; the others have their
        verdict already."""

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
            for result in self._engine.step(IDLE_S):
                self._judge(result)
            self._judging.collect()
            self._report()
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
        decoding: list[tuple[int, TokenIds]] = []
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
            for row, row_draws in zip(group.rows, draws, strict=True):
                prefix = self._renderer.without_stop(token_ids(row.tokens))
                rows.append(np.concatenate([prompt, prefix]))
                scripts.append(self._script(group, float(row_draws[-1])))
                decoding.append((index, prefix))
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

    def _script(self, group: GroupPrefixes, draw: float) -> TokenIds:
        """What a simulated target answers: right with the declared accuracy."""
        answer = group.prompt.gold if draw < self._config.simulated.accuracy else "none"
        return ByteRenderer().encode(f"\\boxed{{{answer}}}")

    def _judge(self, result: JobResult) -> None:
        for (row, prefix), done in zip(self._decoding.pop(result.key), result.rows, strict=True):
            text = self._renderer.text(np.concatenate([prefix, done.tokens]))
            self._judging.submit(
                Answered(result.key, row, text, done.finish, int(done.tokens.size))
            )

    def _report(self) -> None:
        vitals = self._link.vitals
        vitals.progress = self._engine.progress + self._judging.verified
        vitals.busy_slot_s = self._engine.busy_slot_s
        vitals.leases = tuple(self._judging.open)
        pending = self._judging.pending
        vitals.state = f"verifying {pending}" if pending else "scoring"
