"""The rollout's loop: prompts in, prefixes with logprobs out, weights swapped in between.

    broker ── PrefixTask ──▶ render ──▶ engine ──▶ Prefixes ──▶ broker
    weight server ◀── pulled in the background (`weights.py`); the steps of a swap are in `swap.py`

It waits for nothing but the next message or decoding step. With `rollout.swap = "drain"` the broker grants a swap when
no lease is open, so every sample is of one version. With "in_flight" running tasks go on with the new weights, and
what these sample is delivered once the broker has found them proved.
"""

import logging
import time
from collections.abc import Iterable, Mapping
from itertools import islice

import numpy as np

from prefixrl.common.config.run import RunConfig
from prefixrl.common.engines.interface.base import (
    AdapterEngine,
    Continuation,
    Job,
    JobResult,
    TokenIds,
    ready_of,
)
from prefixrl.common.journal.crash_points import crash_point
from prefixrl.common.prompts.rendering import ByteRenderer, Renderer, sent_text
from prefixrl.common.run.digests import model_digests
from prefixrl.common.seeds import row_uniforms
from prefixrl.common.weights.snapshot import Snapshot
from prefixrl.common.wire.messages.fields import cut_text
from prefixrl.common.wire.messages.groups import GroupPrefixes, GroupTask, Row, VersionSpan
from prefixrl.common.wire.messages.learner import FromBroker
from prefixrl.common.wire.messages.worker import (
    Beat,
    Prefixes,
    PrefixTask,
    Probed,
    Refused,
    Swap,
    Welcome,
)
from prefixrl.common.wire.packing import pack_logprobs, pack_tokens
from prefixrl.common.worker.link import Link
from prefixrl.common.worker.open_tasks import RowsLeftReport
from prefixrl.common.worker.work_loop import IDLE_S, WorkLoop
from prefixrl.rollout.swap import WeightSwap
from prefixrl.rollout.weights import Fetcher, WeightsSource

log = logging.getLogger(__name__)


class Rollout(WorkLoop[PrefixTask]):
    """A worker with an adapter engine at one version."""

    def __init__(
        self,
        config: RunConfig,
        link: Link,
        engine: AdapterEngine,
        renderer: Renderer | ByteRenderer,
        fetcher: Fetcher,
        model: str,
    ) -> None:
        super().__init__(
            link, PrefixTask, RowsLeftReport(link, engine.takes_runs, engine.seats, engine.room)
        )
        self._config = config
        self._fetcher = fetcher
        self._engine = engine
        self._renderer = renderer
        self._open: dict[str, tuple[PrefixTask, tuple[TokenIds | str, ...]]] = {}
        self._held: list[JobResult] = []
        """Finished jobs with tokens of weights that are not proved yet."""
        self._unusable: set[str] = set()
        """Open tasks with tokens of weights that will never be proved."""
        self._masked = renderer.never_drawn(config.rollout.control_tokens)
        self._digests = model_digests(model)
        self.swap = WeightSwap(engine.digest(), config.rollout.swap)

    def say_ready(self) -> None:
        """Announce the loaded model and the installed version; open tasks are delivered as usual."""
        self._link.send(ready_of(self._engine, self._digests, self.swap.ready(), self.swap.digest))

    @property
    def _is_busy(self) -> bool:
        return len(self._open) > len(self._held)

    def _patience_s(self) -> float:
        return 0.0 if self._is_busy else IDLE_S

    def _take_back(self, task: str) -> bool:
        if task not in self._open or not self._engine.cancel(task):
            return False
        del self._open[task]
        return True

    def _step(self) -> None:
        for result in self._engine.step(IDLE_S):
            self._take_result(result)
        self._swap_weights()
        vitals = self._link.vitals
        vitals.progress = self._engine.progress
        vitals.tokens = self._engine.tokens
        vitals.busy_row_s = self._engine.busy_row_s
        vitals.waiting_rows = self._engine.waiting_rows
        vitals.activity = "working"
        vitals.state = f"version {self.swap.version}"

    def _unended(self) -> dict[str, int]:
        return {task: self._engine.rows_left(task) for task in self._open}

    def _handle(self, message: FromBroker) -> None:
        match message:
            case Beat(latest) if latest is not None and self.swap.news(latest):
                self._fetcher.want_version(latest.version, latest.digest)
            case Swap():
                self.swap.is_granted = True
            case Welcome():
                self._fetcher.use(WeightsSource.from_welcome(message, self._link.address))
                super()._handle(message)
            case Probed(version=version, outcome="refused"):
                log.warning(
                    "probe of version %d differs by %.3g: fetching again",
                    version,
                    message.difference,
                )
                # What these weights wrote goes with them, and their bytes are pulled again.
                self.swap.failed()
                self._throw_away()
                self._fetcher.again()
            case Probed() if message.version != self.swap.version:
                pass  # of weights that were replaced meanwhile
            case Probed(outcome="proved"):
                self.swap.proved(message.by)
                self._deliver_held()
            case Probed():
                self.swap.unclear(self._engine.checksum)
            case _:
                super()._handle(message)

    def _deliver_held(self) -> None:
        """Deliver the results that waited for the proof of the installed weights."""
        self.swap.proved()
        while self._held:
            self._deliver(self._held.pop(0))

    def _start(self, task: PrefixTask) -> None:
        if task.version != self.swap.version:
            reason = f"version {self.swap.version} is installed, the task wants {task.version}"
            self._link.send(Refused(task.task, reason))
            return
        self._deliver_held()  # a task means that the broker accepted the probe
        prompts = tuple(self._render(group) for group in task.groups)
        self._open[task.task] = (task, prompts)
        self._rows_left.begin(task.task, len(task.groups) * task.rows_per_group)
        job = make_job(task, prompts, self._renderer.stop_tokens, self._masked)
        if job.rows:
            self._engine.submit(job)
        else:
            self._deliver(JobResult(task.task, (), 0.0))

    def _render(self, group: GroupTask) -> TokenIds | str:
        prompt = group.prompt
        try:
            return self._renderer.prompt(
                prompt.question, prompt.system, prompt.earlier, draft=prompt.draft
            )
        except ValueError as error:
            return cut_text(str(error))

    def _take_result(self, result: JobResult) -> None:
        """Deliver a finished job, keep it until its weights are proved, or hand it back."""
        if result.key in self._unusable:
            self._hand_back(result.key)
        elif not self.swap.is_proved and self.swap.version in _versions(result):
            self._held.append(result)
        else:
            self._deliver(result)

    def _throw_away(self) -> None:
        """Discard everything that the installed weights wrote: they will never be proved."""
        while self._held:
            self._hand_back(self._held.pop(0).key)
        self._unusable.update(self._open)

    def _hand_back(self, key: str) -> None:
        task, _ = self._open.pop(key)
        self._unusable.discard(key)
        self._link.send(Refused(task.task, "sampled with weights that were not proved"))

    def _deliver(self, result: JobResult) -> None:
        task, prompts = self._open.pop(result.key)
        rows = iter(result.rows)
        # A prompt that could not be rendered is its error: it has no rows in the result.
        groups = tuple(
            GroupPrefixes(
                seq=group.seq,
                prompt=group.prompt,
                seed=group.seed,
                prompt_tokens=b"" if isinstance(prompt, str) else pack_tokens(prompt),
                rows=()
                if isinstance(prompt, str)
                else self._packed(islice(rows, task.rows_per_group)),
                error=prompt if isinstance(prompt, str) else "",
            )
            for group, prompt in zip(task.groups, prompts, strict=True)
        )
        # A group is as old as its oldest token: the broker sets its deadline by this version.
        oldest = min(_versions(result), default=task.version)
        message = Prefixes(
            task=task.task,
            kind=task.kind,
            version=oldest,
            weights_digest=self.swap.digest_of[oldest],
            groups=groups,
            elapsed_s=result.elapsed_s,
        )
        crash_point("prefixes.sampled")
        self._link.send(message)

    def _packed(self, rows: Iterable[Continuation]) -> tuple[Row, ...]:
        return tuple(
            pack_row(
                row,
                self.swap.digest_of,
                sent_text(self._config, self._renderer, row.tokens),
                self._renderer.has_control(row.tokens),
            )
            for row in rows
        )

    def _swap_weights(self) -> None:
        now_s = time.monotonic()
        self.swap.stage(self._fetcher.take_snapshot())
        offer = self.swap.offer(now_s) if self._leaves_s is None else None
        if offer is not None:
            self._link.send(offer)
            self._hand_back_waiting()
        snapshot = self.swap.due(self._tasks())
        if snapshot is not None:
            self._install(snapshot)
            crash_point("swap.installed")
        proof = self.swap.proof(time.monotonic())
        if proof is not None:
            self._link.send(proof)

    def _hand_back_waiting(self) -> None:
        """Hand back training tasks that wait for a seat: the installation would wait for them, too."""
        for task in self._tasks() if self._config.rollout.swap == "drain" else ():
            if task.kind == "train" and self._take_back(task.task):
                self._link.send(
                    Refused(task.task, "not begun, and newer weights are to be installed")
                )

    def _tasks(self) -> list[PrefixTask]:
        return [task for task, _ in self._open.values()]

    def _install(self, snapshot: Snapshot) -> None:
        """Install a version and score the probe; one that does not fit the engine is fetched again."""
        if not self.swap.is_proved:
            self._throw_away()
        if not self.swap.install(self._engine, snapshot, self._tasks()):
            self._fetcher.again()


def make_job(
    task: PrefixTask,
    prompts: tuple[TokenIds | str, ...],
    stop_tokens: frozenset[int],
    masked_tokens: frozenset[int] = frozenset(),
) -> Job:
    """Return the engine job of a task: rows per renderable prompt, every row with its own draws."""
    rows: list[TokenIds] = []
    count = task.rows_per_group
    tokens = task.sampling.max_new_tokens
    uniforms = [np.zeros((0, tokens))]
    for group, prompt in zip(task.groups, prompts, strict=True):
        if not isinstance(prompt, str):
            rows.extend([prompt] * count)
            uniforms.append(row_uniforms(group.seed, "prefix", count, tokens))
    draws = np.concatenate(uniforms)
    return Job(
        task.task, tuple(rows), draws, task.sampling, stop_tokens, masked_tokens=masked_tokens
    )


def pack_row(
    row: Continuation,
    digest_of: Mapping[int, str],
    text: str | None = None,
    has_control: bool = False,
) -> Row:
    """Return a finished row in wire form; `digest_of` maps its versions, `text` is its text."""
    spans = tuple(VersionSpan(version, digest_of[version], size) for version, size in row.spans)
    return Row(
        tokens=pack_tokens(row.tokens),
        logprobs=pack_logprobs(row.logprobs),
        finish=row.finish,
        spans=spans,
        text=text,
        has_control=has_control,
    )


def _versions(result: JobResult) -> set[int]:
    return {version for row in result.rows for version, _ in row.spans}
