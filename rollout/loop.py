"""The rollout's loop: a group of prompts in, k-token prefixes with their logprobs out, weights swapped in between.

    broker ── PrefixTask ──▶ render ──▶ engine ──▶ Prefixes ──▶ broker
    weight server ◀── pulled in the background ── Beat(latest)       Staged ─▶ broker ─▶ Swap ─▶ install, probe ─▶ Installed

It waits for nothing but the next message or decoding step. A swap happens when the broker says so: with `rollout.swap =
"drain"` it has taken care that no lease is open then, so every sample is of one version. With "in_flight" running tasks go on
with the new weights, and what they sample is delivered once the broker has found these proved.
"""

import logging
import time
from collections.abc import Callable, Mapping

import numpy as np
import torch

from prefixrl.common.config import RunConfig
from prefixrl.common.digests import model_digests
from prefixrl.common.engine import Engine, Finished, Job, JobResult, TokenIds
from prefixrl.common.errors import Refusal
from prefixrl.common.link import Link
from prefixrl.common.messages import (
    UNPROVED,
    Beat,
    Done,
    FromBroker,
    GroupPrefixes,
    GroupTask,
    Installed,
    Manifest,
    Prefixes,
    PrefixTask,
    ProbeFailed,
    Proved,
    Ready,
    Refused,
    Revoke,
    Row,
    Staged,
    Swap,
    VersionSpan,
    WeightsNote,
    Welcome,
)
from prefixrl.common.packing import pack_logprobs, pack_tokens, token_ids
from prefixrl.common.rendering import ByteRenderer, Renderer
from prefixrl.common.seeds import row_uniforms
from prefixrl.common.weights import describe
from prefixrl.rollout.weights import Fetcher

log = logging.getLogger(__name__)

IDLE_S = 0.05
OFFER_AGAIN_S = 1.0
REFUSALS_ALLOWED = 3


class Rollout:
    """An adapter engine at one version."""

    def __init__(
        self,
        config: RunConfig,
        link: Link,
        engine: Engine,
        renderer: Renderer | ByteRenderer,
        fetcher: Fetcher,
        model: str,
    ) -> None:
        self._config = config
        self._link = link
        self._engine = engine
        self._renderer = renderer
        self._fetcher = fetcher
        self._open: dict[str, tuple[PrefixTask, tuple[TokenIds | str, ...]]] = {}
        self._held: list[JobResult] = []
        """Done, with tokens of weights that are not proved yet."""
        self._spoilt: set[str] = set()
        """Open tasks with tokens of weights that were not proved and never will be."""
        self._staged: tuple[Manifest, dict[str, torch.Tensor]] | None = None
        self._latest: WeightsNote | None = None
        self._offer_s = 0.0
        self._swap_due = False
        self._refused = 0
        self._digests = model_digests(model)
        self.version = 0
        self.weights_digest = installed_digest(engine)
        self._digest_of = {0: self.weights_digest}
        """Of every version that open tasks may have tokens of."""
        self._is_proved = True
        self._proof: Installed | None = None
        self._proof_s = 0.0

    def say_ready(self) -> None:
        """Tell the broker what is loaded and installed now; tasks of an earlier acquaintance are delivered as usual.

        Weights that the broker has not yet found proved are offered for proof again: no version is claimed for them.
        """
        version = self.version if self._is_proved else UNPROVED
        self._link.send(
            Ready(
                self._engine.slots,
                self._digests,
                version,
                self.weights_digest,
                self._engine.name,
            )
        )
        self._proof_s = 0.0

    def run(self, stopping: Callable[[], bool]) -> str:
        """Work until the run is over or the process is asked to stop; returns why it ended."""
        while not stopping():
            is_busy = len(self._open) > len(self._held)
            message = self._link.receive(0.0 if is_busy else IDLE_S)
            while message is not None:
                if isinstance(message, Done):
                    return message.reason
                self._handle(message)
                message = self._link.receive(0.0)
            for result in self._engine.step(IDLE_S):
                self._take(result)
            self._offer_weights()
            self._offer_proof()
            self._report()
        return "asked to stop"

    def _handle(self, message: FromBroker) -> None:
        match message:
            case PrefixTask():
                self._start(message)
            case Revoke(task, attempt):
                if task in self._open and self._engine.cancel(task):
                    del self._open[task]
                    self._link.send(Refused(task, attempt, "revoked before it started"))
            case Beat(latest) if latest is not None and self._is_news(latest):
                self._latest = latest
                self._fetcher.want(latest.version, latest.digest)
            case Swap():
                self._swap_due = True
            case Proved(version) if version == self.version:
                self._prove()
            case Welcome(weights_endpoint=endpoint):
                self._fetcher.use(endpoint)
                self.say_ready()
            case ProbeFailed():
                log.warning(
                    "probe of version %d differs by %.3g: fetching again",
                    message.version,
                    message.difference,
                )
                self._staged = self._proof = None
                self._throw_away()
                self._fetcher.again()
            case _:
                pass

    def _is_news(self, note: WeightsNote) -> bool:
        """A newer version, or this one made anew by a learner that went back to its checkpoint."""
        is_another = note.version == self.version and note.digest != self.weights_digest
        return note.version > self.version or is_another

    def _prove(self) -> None:
        """The installed weights are proved: what they wrote may go."""
        self._is_proved = True
        held, self._held = self._held, []
        for result in held:
            self._deliver(result)

    def _start(self, task: PrefixTask) -> None:
        if task.version != self.version:
            reason = f"version {self.version} is installed, the task wants {task.version}"
            self._link.send(Refused(task.task, task.attempt, reason))
            return
        self._prove()  # or the broker would have given no work
        prompts = tuple(self._render(group) for group in task.groups)
        self._open[task.task] = (task, prompts)
        job = make_job(task, prompts, self._renderer.stop_tokens)
        if job.rows:
            self._engine.submit(job)
        else:
            self._deliver(JobResult(task.task, (), 0.0))

    def _render(self, group: GroupTask) -> TokenIds | str:
        try:
            return self._renderer.prompt(group.prompt.question)
        except ValueError as error:
            return str(error)

    def _take(self, result: JobResult) -> None:
        """A job is done: its rows are delivered, kept until their weights are proved, or thrown away."""
        if result.key in self._spoilt:
            self._hand_back(result.key)
        elif not self._is_proved and self.version in _versions(result):
            self._held.append(result)
        else:
            self._deliver(result)

    def _throw_away(self) -> None:
        """The installed weights are not proved and never will be: nothing they had a part in leaves this rollout."""
        for result in self._held:
            self._hand_back(result.key)
        self._held.clear()
        self._spoilt.update(self._open)

    def _hand_back(self, key: str) -> None:
        task, _ = self._open.pop(key)
        self._spoilt.discard(key)
        reason = "sampled with weights that were not proved"
        self._link.send(Refused(task.task, task.attempt, reason))

    def _deliver(self, result: JobResult) -> None:
        task, prompts = self._open.pop(result.key)
        rows = iter(result.rows)
        groups = []
        for group, prompt in zip(task.groups, prompts, strict=True):
            if isinstance(prompt, str):
                groups.append(
                    GroupPrefixes(group.seq, group.prompt, group.seed, b"", (), error=prompt)
                )
                continue
            finished = [next(rows) for _ in range(task.rows_per_group)]
            packed = tuple(
                pack_row(row, self._digest_of, self._read(row.tokens)) for row in finished
            )
            groups.append(
                GroupPrefixes(group.seq, group.prompt, group.seed, pack_tokens(prompt), packed)
            )
        oldest = min(_versions(result), default=task.version)
        self._link.send(
            Prefixes(
                task.task,
                task.attempt,
                task.kind,
                oldest,
                self._digest_of[oldest],
                tuple(groups),
                result.elapsed_s,
            )
        )

    def _read(self, tokens: TokenIds) -> str | None:
        """What a target of another family is given; whole answers go to none."""
        if self._config.mode == "direct":
            return None
        return self._renderer.raw(self._renderer.without_stop(tokens))

    def _offer_weights(self) -> None:
        self._staged = self._fetcher.take() or self._staged
        # Said again until it is granted: the broker may have been restarted, or its Swap lost, in between.
        if self._staged is not None and time.monotonic() >= self._offer_s:
            self._offer_s = time.monotonic() + OFFER_AGAIN_S
            self._link.send(Staged(self._staged[0].version))
        if self._swap_due and self._may_swap():
            self._swap_due = False
            self._install()

    def _may_swap(self) -> bool:
        """A rollout that rejoined may still finish tasks the broker no longer counts as its own."""
        is_anew = self._staged is not None and self._staged[0].version == self.version
        if self._config.rollout.swap == "drain" or is_anew:
            # Spans tell versions apart, not two of the same number.
            return not self._open
        return all(task.kind == "train" for task, _ in self._open.values())

    def _install(self) -> None:
        if self._staged is None:
            return
        manifest, tensors = self._staged
        self._staged, self._offer_s = None, 0.0
        if not self._is_proved:
            self._throw_away()
        try:
            self._engine.install(tensors, manifest.version)
        except ValueError as error:
            self._refuse(manifest.version, error)
            return
        self._refused = 0
        self.version, self.weights_digest = manifest.version, manifest.digest
        oldest = min((task.version for task, _ in self._open.values()), default=self.version)
        known = {each: digest for each, digest in self._digest_of.items() if each >= oldest}
        self._digest_of = known | {self.version: self.weights_digest}
        assert self._latest is not None
        # The same tokens in every version of a run.
        probe = self._engine.logprobs(
            token_ids(self._latest.probe_tokens), self._config.rollout.temperature
        )
        self._proof = Installed(self.version, self.weights_digest, pack_logprobs(probe))
        self._is_proved, self._proof_s = False, 0.0

    def _refuse(self, version: int, error: ValueError) -> None:
        """Weights that do not fit the engine change nothing in it: they are fetched again, and not for ever."""
        self._refused += 1
        log.warning("version %d cannot be installed: %s; fetching again", version, error)
        if self._refused >= REFUSALS_ALLOWED:
            raise Refusal(
                f"version {version} could not be installed {self._refused} times in a row: {error}"
            )
        self._fetcher.again()

    def _offer_proof(self) -> None:
        """Show the probe until there is work: a broker that was restarted may not know the version yet."""
        if self._is_proved or self._proof is None or time.monotonic() < self._proof_s:
            return
        self._proof_s = time.monotonic() + OFFER_AGAIN_S
        self._link.send(self._proof)

    def _report(self) -> None:
        vitals = self._link.vitals
        vitals.progress, vitals.busy_slot_s = self._engine.progress, self._engine.busy_slot_s
        vitals.leases = tuple(self._open)
        vitals.state = f"version {self.version}"


def make_job(
    task: PrefixTask, prompts: tuple[TokenIds | str, ...], stop_tokens: frozenset[int]
) -> Job:
    """The engine job of a task: rows_per_group rows per renderable prompt, every row with draws of its own."""
    rows: list[TokenIds] = []
    uniforms = []
    for group, prompt in zip(task.groups, prompts, strict=True):
        if isinstance(prompt, str):
            continue
        rows.extend([prompt] * task.rows_per_group)
        uniforms.append(
            row_uniforms(group.seed, "prefix", task.rows_per_group, task.sampling.max_new_tokens)
        )
    draws = np.concatenate(uniforms) if uniforms else np.zeros((0, task.sampling.max_new_tokens))
    return Job(task.task, tuple(rows), draws, task.sampling, stop_tokens)


def pack_row(row: Finished, digest_of: Mapping[int, str], text: str | None = None) -> Row:
    """A finished row as it travels; `digest_of` the versions that wrote it, `text` what its tokens say."""
    spans = tuple(VersionSpan(version, digest_of[version], size) for version, size in row.spans)
    return Row(pack_tokens(row.tokens), pack_logprobs(row.logprobs), row.finish, spans, text)


def _versions(result: JobResult) -> set[int]:
    return {version for row in result.rows for version, _ in row.spans}


def installed_digest(engine: Engine) -> str:
    """Digest of the weights an engine holds, as the learner would publish them."""
    return describe(0, {name: tensor.cpu() for name, tensor in engine.weights().items()}).digest
