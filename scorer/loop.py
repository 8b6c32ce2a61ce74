"""The scorer's loop: prefixes in, the frozen target's completions judged, scores out. It never receives weights.

    broker ── ScoreTask ──▶ render + prefix ──▶ engine ──▶ verifier children ──▶ Scores ──▶ broker

It waits for nothing but the next message, decoding step or verdict; verification of one task overlaps decoding of the next.
A row whose verdict is `error` keeps that status: it is never read as a wrong answer.
"""

import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from prefixrl.common.config import RunConfig
from prefixrl.common.digests import model_digests
from prefixrl.common.engine import Engine, Finished, Job, JobResult, TokenIds
from prefixrl.common.link import Link
from prefixrl.common.messages import (
    Done,
    FromBroker,
    GroupPrefixes,
    Ready,
    Refused,
    Revoke,
    ScoredGroup,
    Scores,
    ScoreTask,
    Verdict,
    Welcome,
)
from prefixrl.common.packing import token_ids
from prefixrl.common.rendering import ByteRenderer, Renderer
from prefixrl.common.seeds import row_uniforms
from prefixrl.scorer.verifier_pool import VerifierPool

log = logging.getLogger(__name__)

IDLE_S = 0.05
POLL_S = 0.005


@dataclass
class _Open:
    """A task between its arrival and its Scores."""

    task: ScoreTask
    received_s: float
    rows: int = 0
    submitted: list[int] = field(default_factory=list)
    """Rows the engine completes, in the order of its job; the others have their verdict already."""
    finished: dict[int, Finished] = field(default_factory=dict)
    verdicts: dict[int, Verdict] = field(default_factory=dict)


class Scorer:
    """A target engine and its verifier."""

    def __init__(
        self,
        config: RunConfig,
        link: Link,
        engine: Engine,
        renderer: Renderer | ByteRenderer,
        verifier: VerifierPool,
        model: str,
    ) -> None:
        self._config = config
        self._link = link
        self._engine = engine
        self._renderer = renderer
        self._verifier = verifier
        self._digests = model_digests(model)
        self._open: dict[str, _Open] = {}
        self._verifying: dict[int, tuple[str, int, float, str]] = {}
        self._keys = itertools.count()
        self._verified = 0

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
            self._collect_verdicts()
            self._report()
        return "asked to stop"

    def _patience_s(self) -> float:
        if not self._open:
            return IDLE_S
        return (
            POLL_S
            if len(self._verifying) and all(each.finished for each in self._open.values())
            else 0.0
        )

    def _handle(self, message: FromBroker) -> None:
        match message:
            case ScoreTask():
                self._start(message)
            case Revoke(task, attempt):
                if task in self._open and self._engine.cancel(task):
                    del self._open[task]
                    self._link.send(Refused(task, attempt, "revoked before it started"))
            case Welcome():
                self.say_ready()
            case _:
                pass

    def _start(self, task: ScoreTask) -> None:
        """Submit every row whose question can be rendered; the others are judged `error` with the reason."""
        entry = self._open[task.task] = _Open(task, time.monotonic())
        rows: list[TokenIds] = []
        uniforms, scripts, index = [], [], 0
        for group in task.groups:
            draws = row_uniforms(
                group.seed, "completion", len(group.rows), task.sampling.max_new_tokens
            )
            try:
                prompt = self._renderer.prompt(group.prompt.question)
            except ValueError as error:
                for _ in group.rows:
                    entry.verdicts[index] = Verdict(0.0, "error", str(error), "error", 0, 0)
                    index += 1
                continue
            for row, row_draws in zip(group.rows, draws, strict=True):
                rows.append(
                    np.concatenate([prompt, self._renderer.without_stop(token_ids(row.tokens))])
                )
                scripts.append(self._script(group, float(row_draws[-1])))
                entry.submitted.append(index)
                index += 1
            uniforms.append(draws)
        entry.rows = index
        if rows:
            stops = self._renderer.stop_tokens
            draws = np.concatenate(uniforms)
            job = Job(task.task, tuple(rows), draws, task.sampling, stops, tuple(scripts))
            self._engine.submit(job)
        else:
            self._deliver(self._open.pop(task.task))

    def _script(self, group: GroupPrefixes, draw: float) -> TokenIds:
        """What a simulated target answers: right with the declared accuracy."""
        answer = group.prompt.gold if draw < self._config.simulated.accuracy else "none"
        return ByteRenderer().encode(f"\\boxed{{{answer}}}")

    def _judge(self, result: JobResult) -> None:
        entry = self._open[result.key]
        flat = [(group, row) for group in entry.task.groups for row in group.rows]
        for index, done in zip(entry.submitted, result.rows, strict=True):
            group, row = flat[index]
            entry.finished[index] = done
            prefix = self._renderer.without_stop(token_ids(row.tokens))
            text = self._renderer.text(np.concatenate([prefix, done.tokens]))
            key = next(self._keys)
            self._verifying[key] = (result.key, index, time.monotonic(), text)
            self._verifier.submit(key, text, group.prompt.gold)

    def _collect_verdicts(self) -> None:
        for key, verdict in self._verifier.poll():
            task, index, since_s, text = self._verifying.pop(key)
            entry, self._verified = self._open[task], self._verified + 1
            done = entry.finished[index]
            keep = entry.task.kind == "eval" or self._config.scorer.keep_completions
            entry.verdicts[index] = Verdict(
                reward=verdict.reward,
                status=verdict.status,
                extracted=verdict.extracted or "",
                finish=done.finish,
                completion_tokens=int(done.tokens.size),
                elapsed_ms=int((time.monotonic() - since_s) * 1000),
                completion=text if keep else "",
            )
            if len(entry.verdicts) == entry.rows:
                self._deliver(self._open.pop(task))

    def _deliver(self, entry: _Open) -> None:
        task, scoring_s = entry.task, time.monotonic() - entry.received_s
        verdicts = iter(entry.verdicts[index] for index in range(entry.rows))
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

    def _report(self) -> None:
        vitals = self._link.vitals
        vitals.progress = self._engine.progress + self._verified
        vitals.busy_slot_s = self._engine.busy_slot_s
        vitals.leases = tuple(self._open)
        vitals.state = f"verifying {len(self._verifying)}" if self._verifying else "scoring"
