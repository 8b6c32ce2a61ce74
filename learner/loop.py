"""The learner's loop: one iteration per turn.

    broker ── Batch ─▶ plan ─▶ Groups ─▶ advantages ─▶ minibatches ─▶ version v+1 ──▶ publisher thread ─▶ weight
       ▲ IterationDone ──────────────────────────────────────┘                └──▶ checkpoint             server, broker

A turn waits for one thing only: the next batch, with a deadline and the names of what it waits for; a shard of it is
one answer away. No rank trains before every one is given the batch: each asks the broker, which answers all or none.
"""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec
from torch import Tensor

from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import NothingToTrain, NotSaved
from prefixrl.common.host.service import Service
from prefixrl.common.journal.crash_points import crash_point
from prefixrl.common.run.disk import when_there_is_room
from prefixrl.common.run.status import StatusDocument
from prefixrl.common.weights.low_rank import published_name
from prefixrl.common.wire.messages.groups import ScoredGroup
from prefixrl.common.wire.messages.learner import Batch, GetBatch, Halt, RunOver
from prefixrl.common.wire.packing import ProbeRow
from prefixrl.learner.evaluation.arms import Arms
from prefixrl.learner.models import lora
from prefixrl.learner.models.batch import iteration_data
from prefixrl.learner.models.model import Models
from prefixrl.learner.processes.servers import Servers
from prefixrl.learner.run import summary
from prefixrl.learner.run.collapse_answers import CollapseAnswers
from prefixrl.learner.run.metrics import MetricsLog, Times
from prefixrl.learner.run.retention import is_milestone, prune
from prefixrl.learner.run.spending import cost_end, cost_sentence, is_affordable
from prefixrl.learner.run.stop import StopSignal, halted
from prefixrl.learner.run.tracking import FLUSH_S as TRACKING_FLUSH_S
from prefixrl.learner.run.tracking import Tracking
from prefixrl.learner.run.uploads import Uploads, counts
from prefixrl.learner.training import checkpoint
from prefixrl.learner.training.checkpoint import TrainerState
from prefixrl.learner.training.figures import IterationMetrics
from prefixrl.learner.training.iteration import plan_for, train_iteration
from prefixrl.learner.training.plan import Plan, groups_of_rank
from prefixrl.learner.training.speed import rank_figures
from prefixrl.learner.weights.publish import FLUSH_S, Publisher

log = logging.getLogger(__name__)

WRITE_S = 3600.0
"""Longest time that a watchdog, or a stop, waits for a checkpoint or a publication: as long as for loading."""


@dataclass
class WorkTimes:
    """Times of a rank's work since its start."""

    started_s: float = field(default_factory=time.monotonic)
    first_batch_s: float | None = None
    """Time at which the first batch came."""
    busy_s: float = 0.0
    """Time spent training, in all."""
    waited_s: float = 0.0
    """Wait for the newest batch."""
    fetched_s: float = 0.0
    """Time in which this rank planned the newest batch and fetched its shard: a part of training."""
    publish_s: float = 0.0
    """Time in which this thread published the newest version, training nothing."""

    def of_iteration(self, trained_s: float, ranks: Mapping[str, float]) -> Times:
        """Return the times of an iteration that ends now."""
        now_s = time.monotonic()
        passed_s = now_s - (self.first_batch_s or now_s)
        return Times(
            waited_s=self.waited_s,
            trained_s=trained_s,
            since_start_s=now_s - self.started_s,
            busy_fraction=min(1.0, self.busy_s / passed_s) if passed_s else 0.0,
            publish_s=self.publish_s,
            ranks=ranks,
        )


@dataclass
class RankZeroParts:
    """Parts of rank 0 alone: child processes, publisher, evaluations, metrics, uploads."""

    servers: Servers
    publisher: Publisher
    arms: Arms
    metrics: MetricsLog
    service: Service
    uploads: Uploads
    tracking: Tracking | None = None
    fresh_ess: float = 1.0
    """Newest known effective sample size of samples of age 0: 1, less what engine and learner differ by."""

    def close(self) -> None:
        """End the parts that write in the background."""
        with self.service.patience(FLUSH_S + TRACKING_FLUSH_S):
            self.uploads.close()
            self.publisher.close()
            if self.tracking:
                self.tracking.close()


class BatchSource(Protocol):
    """The answers to the questions of a rank: a broker's, or those of a journal."""

    def next_batch(self, request: GetBatch, timeout_s: float) -> Batch | RunOver | Halt:
        """Return a batch, or what every rank gets instead."""

    def groups(self, iteration: int, indices: Sequence[int]) -> dict[int, ScoredGroup]:
        """Return groups of the batch of an iteration, by index in the batch."""

    def iteration_done(
        self, iteration: int, optimizer_steps: int, relative_ess: float | None = None
    ) -> None:
        """Take note of a finished iteration."""

    def status(self) -> StatusDocument:
        """Return the status document of the run."""

    def stop(self, reason: str) -> None:
        """End the run."""

    def close(self) -> None:
        """Close what is open."""


@dataclass
class Learner:
    """One rank of the learner, its models loaded at iteration `iteration`."""

    config: RunConfig
    directory: Path
    client: BatchSource
    models: Models
    rank_zero: RankZeroParts | None
    problems: int
    stop: StopSignal
    probe: Sequence[ProbeRow]
    answers: CollapseAnswers
    iteration: int = 0
    times: WorkTimes = field(default_factory=WorkTimes)
    is_stopping: bool = False
    ending: str = ""
    """The reason why the run ends in order before its last iteration; "" without one."""
    saved: int = -1
    """Iteration of the newest checkpoint."""
    unsaved: int = 0
    """Checkpoints in a row that could not be written."""
    save_next: int = 0
    """Iteration before which no checkpoint is tried again."""

    def run(self) -> None:
        """Train until the data is used up, then evaluate and write the summary.

        Raises:
            Halted: asked to stop before that; what is trained is saved.
            NothingToTrain: too little passes, or too much fails; what is trained is saved.
        """
        self.publish()
        try:
            while (work := self.next_batch()) is not None:
                self.train(*work)
                self.publish()
                self.save_if_due()
                self.check_background()
        except NothingToTrain as fault:
            self.give_up_run(fault)
            raise
        self.save()
        if self.is_stopping:
            raise halted(self.iteration)
        self.finish()

    def next_batch(self) -> tuple[Batch, Plan, dict[int, ScoredGroup]] | None:
        """Wait for a batch, plan it, and fetch the groups of which this rank has rows, by index in the batch.

        The plan says, before the rows come, which of them this rank trains. None: there is nothing more to train.
        """
        if self.rank_zero:
            # Later it would wait for the disk inside a collective, whose limit is shorter.
            with self.patience():
                self.rank_zero.publisher.copies.wait_for_room()
        waited_from_s = time.monotonic()
        rank, ranks = self.models.rank, self.models.world_size
        batch = self.client.next_batch(
            GetBatch(self.iteration, rank, ranks), self.config.learner.batch_timeout_s
        )
        self.times.first_batch_s = self.times.first_batch_s or time.monotonic()
        self.is_stopping = isinstance(batch, Halt)
        if isinstance(batch, RunOver):
            self.ending = batch.reason
        if isinstance(batch, Halt | RunOver):
            return None
        now_s = time.monotonic()
        self.times.waited_s = now_s - waited_from_s
        data = iteration_data(batch, {})
        plan = plan_for(self.models, data, self.config)
        shard = self.client.groups(self.iteration, groups_of_rank(plan, data.groups, rank))
        self.times.fetched_s = time.monotonic() - now_s
        if self.rank_zero and self.iteration == 0:
            # All groups, so that the prefixes written most often are the same for any number of ranks.
            every = range(len(batch.groups))
            whole = shard if len(shard) == len(every) else self.client.groups(0, every)
            self.rank_zero.arms.ask_candidates([whole[index] for index in every])
        return batch, plan, shard

    def train(self, batch: Batch, plan: Plan, shard: Mapping[int, ScoredGroup]) -> None:
        """Take the optimiser steps of one iteration; the version is one higher afterwards."""
        started_s = time.monotonic()
        data = iteration_data(batch, shard)
        total_steps = self.config.steps_in_all(self.problems)
        metrics = train_iteration(self.models, data, self.answers.config, total_steps, plan)
        trained_s = self.times.fetched_s + time.monotonic() - started_s
        ranks = rank_figures(self.models, plan, data.lengths, trained_s)
        self.times.busy_s += trained_s
        self.iteration += 1
        self.finish_iteration(batch, metrics, self.times.of_iteration(trained_s, ranks))
        if self.answers.is_on:
            with self.patience():
                self.answers.answer_iteration(batch, metrics, self.iteration)

    def finish_iteration(self, batch: Batch, metrics: IterationMetrics, times: Times) -> None:
        """Report a trained iteration to the broker first, then write it to the files."""
        if (zero := self.rank_zero) is None:
            return
        # A broker that is restarted from now on begins with the next iteration.
        zero.servers.completed = self.iteration
        zero.arms.advance(self.iteration)
        zero.fresh_ess = metrics.means.get("fresh_ess_fraction", zero.fresh_ess)
        old_ess = metrics.means.get("old_ess_fraction", math.nan)
        # None without old samples.
        relative_ess = old_ess / max(zero.fresh_ess, 1e-9) if math.isfinite(old_ess) else None
        optimizer_steps = self.models.optimizer_steps
        crash_point("iteration.trained")
        self.client.iteration_done(batch.iteration, optimizer_steps, relative_ess)
        crash_point("iteration.told")
        zero.service.status(f"iteration {self.iteration}")
        zero.metrics.write(batch, metrics, optimizer_steps, times, self.client.status())

    def publish(self) -> None:
        """Hand the current version to the publisher; a collective, so every rank calls it."""
        started_s = time.monotonic()
        logprobs = self.models.probe_logprobs(
            self.probe, most_tokens=self.config.learner.micro_batch_tokens
        )
        parameters = self.models.actor.full_tensors(self.sends)
        weights = ((name.removeprefix("model."), tensor) for name, tensor in parameters)
        if not self.rank_zero:
            for _ in weights:  # each is gathered from all ranks
                pass
            return
        arms, publisher = self.rank_zero.arms, self.rank_zero.publisher
        # Asked first: rollouts must still be able to fetch the version, so it is pinned.
        arms.ask_version(self.iteration)
        publisher.pinned = arms.pinned
        with self.patience():
            publisher.publish(self.iteration, weights, logprobs, self.published)
        self.times.publish_s = time.monotonic() - started_s

    def sends(self, name: str) -> bool:
        """Return True if a parameter of the actor is a part of the current version: of version 0 all are."""
        lora = self.models.lora
        return (
            published_name(name) is not None
            or self.iteration == 0
            or lora is None
            or lora.publish != "matrices"
        )

    def published(self, copied: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return what rollouts get of a copy of the weights: low-rank matrices, or whole weights."""
        if all(published_name(name) for name in copied):
            return {published_name(name) or name: tensor for name, tensor in copied.items()}
        return lora.merged(copied, self.models.lora) if self.models.lora else copied

    def save_if_due(self) -> None:
        """Checkpoint on the configured iterations; one that failed is tried after 1, 2, 4, ... more."""
        section = self.config.checkpointing
        every = section.every
        is_regular = every and self.iteration % every == 0
        is_judged = section.keep_best and self.iteration % self.config.evaluation.every == 0
        # A checkpoint that failed stays due until one is written.
        is_due = (
            is_regular or is_judged or self.unsaved or is_milestone(self.iteration, section.growth)
        )
        if not is_due or self.iteration < self.save_next:
            return
        try:
            self.save()
        except NotSaved as fault:
            if section.on_failure == "stop":
                raise
            # Never longer than the regular distance: a regular checkpoint is not put off.
            pause = 2**self.unsaved
            self.save_next = self.iteration + (min(every, pause) if every else pause)
            self.unsaved += 1
            log.error(
                "%s; the run goes on and tries again after iteration %d", fault, self.save_next
            )
        else:
            self.unsaved = 0

    def save(self) -> None:
        """Write a checkpoint of this iteration unless it is there already; a collective."""
        if self.saved == self.iteration:
            return
        state = TrainerState(
            iteration=self.iteration,
            optimizer_steps=self.models.optimizer_steps,
            world_size=self.models.world_size,
        )
        with self.patience():
            checkpoint.save(self.directory / "checkpoints", self.models, state)
        self.saved = self.iteration
        self.remove_old()
        if self.rank_zero:
            self.rank_zero.uploads.upload_new()

    def remove_old(self) -> None:
        """Remove the checkpoints that nothing keeps."""
        if (zero := self.rank_zero) is None:
            return
        section = self.config.checkpointing
        awaited = zero.arms.awaited if section.keep_best else frozenset[int]()
        curve = zero.arms.curve() if section.keep_best else []
        awaited |= self.answers.way_back
        with zero.uploads.paused() as uploading:
            removed = prune(self.directory / "checkpoints", section, curve, awaited | uploading)
        zero.uploads.warn_of_removed(removed)

    def patience(self) -> AbstractContextManager[None]:
        """Return the time in which rank 0 writes, and shows no sign of life."""
        return self.rank_zero.service.patience(WRITE_S) if self.rank_zero else nullcontext()

    def check_background(self) -> None:
        """Collect finished evaluations; raise if a child process cannot be restarted."""
        if zero := self.rank_zero:
            zero.publisher.check()
            awaited = zero.arms.awaited
            zero.arms.gather(dict(zero.publisher.digests))
            if self.config.checkpointing.keep_best and zero.arms.awaited != awaited:
                self.remove_old()
            zero.servers.check()
            if zero.tracking:
                zero.tracking.check()

    def give_up_run(self, fault: NothingToTrain) -> None:
        """Save, then stop broker and workers: a restart would fail as well. Every rank calls it."""
        self.save()
        if self.rank_zero:
            self.rank_zero.servers.expect_end()
            self.client.stop(str(fault))

    def finish(self) -> None:
        """Evaluate the last version, write the summary, end the run.

        Raises:
            Halted: asked to stop while the last version was judged; what is judged stands in files.
            PeerLost: broker or weight server ended and cannot be restarted.
        """
        if (zero := self.rank_zero) is None:
            return
        # Rollouts can only judge the last version once it is announced.
        with self.patience():
            zero.publisher.flush(self.iteration)
        if self.ending:
            log.warning("%s", cost_sentence(self.ending, self.iteration, self.directory))
        zero.arms.finish(is_affordable(self.client.status(), zero.arms.last_answers, self.config))
        # The best checkpoint is known only after the last evaluation.
        self.remove_old()
        zero.uploads.wait(self.stop, self.iteration)
        result = summary.summarise(
            self.client.status(),
            zero.arms.outcome(),
            zero.metrics.lines(),
            self.models.optimizer_steps,
            zero.metrics.since_run_began_s(time.monotonic() - self.times.started_s),
        )
        merged = summary.merged(
            msgspec.structs.replace(
                result,
                uploads=counts(self.directory),
                ended_by_cost=cost_end(self.ending, self.iteration, self.config),
            ),
            self.directory,
        )
        write = partial(summary.write, merged, self.directory)
        end_judging = partial(self.stop.end_judging, self.iteration)
        when_there_is_room(write, self.directory, "the summary", end_judging)
        log.info("finished after %d iterations", self.iteration)
        # From here on the end of the broker is no fault: it must not be restarted.
        zero.servers.expect_end()
        self.client.stop("the run is finished")
