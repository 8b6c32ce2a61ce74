"""The learner's loop: one iteration per turn.

    broker ── Batch ──▶ advantages ─▶ minibatches ─▶ version v+1 ──▶ publisher thread ──▶ weight server, broker
       ▲ IterationDone ─────────────────────┘                └──▶ checkpoint

A turn waits for one thing only: this rank's shard of the next batch, with a deadline and the names of what it waits for.
No collective begins before every rank holds its shard: each asks the broker itself, which answers all of them or none.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from prefixrl.common.config import RunConfig
from prefixrl.common.errors import Halted, NothingToTrain
from prefixrl.common.messages import Batch, GetBatch, Halt, RunOver, ScoredGroup
from prefixrl.learner import checkpoint, summary
from prefixrl.learner.client import BrokerClient
from prefixrl.learner.evaluate import Evaluator
from prefixrl.learner.iteration import train_iteration
from prefixrl.learner.metrics import MetricsLog, Times
from prefixrl.learner.model import Models
from prefixrl.learner.publish import Publisher, probe_tokens
from prefixrl.learner.servers import Servers
from prefixrl.learner.shard import iteration_data, steps_in_all

log = logging.getLogger(__name__)


@dataclass
class RankZero:
    """What only rank 0 has: the children, the publisher, evaluations, the log of metrics."""

    servers: Servers
    publisher: Publisher
    evaluator: Evaluator
    metrics: MetricsLog


@dataclass
class Learner:
    """One rank of the learner, its models loaded at iteration `iteration`."""

    config: RunConfig
    directory: Path
    client: BrokerClient
    models: Models
    zero: RankZero | None
    problems: int
    stopped: Callable[[], bool]
    iteration: int = 0
    started_s: float = field(default_factory=time.monotonic)
    busy_s: float = 0.0
    first_batch_s: float | None = None
    waited_s: float = 0.0
    is_stopping: bool = False
    saved: int = -1
    """Iteration of the newest checkpoint."""

    def run(self) -> None:
        """Train until the data is used up, then evaluate and write the summary.

        Raises:
            Halted: asked to stop before that; what is trained is saved.
            NothingToTrain: too little passes, or too much fails; what is trained is saved.
        """
        self.publish()
        try:
            while (batch := self.next_batch()) is not None:
                self.train(*batch)
                self.publish()
                self.save_if_due()
                self.look_around()
        except NothingToTrain as fault:
            self.give_up(fault)
            raise
        self.save()
        if self.is_stopping:
            raise self.halted()
        self.finish()

    def next_batch(self) -> tuple[Batch, list[ScoredGroup]] | None:
        """Wait for this rank's shard."""
        waited_from_s = time.monotonic()
        rank, ranks = self.models.rank, self.models.world_size
        batch = self.client.next_batch(
            GetBatch(self.iteration, rank, ranks), self.config.learner.batch_timeout_s, self.stopped
        )
        self.first_batch_s = self.first_batch_s or time.monotonic()
        self.is_stopping = isinstance(batch, Halt)
        if isinstance(batch, Halt | RunOver):
            return None
        self.waited_s = time.monotonic() - waited_from_s
        if self.zero and self.iteration == 0:
            self.zero.evaluator.ask_candidates(batch[1])
        return batch

    def train(self, batch: Batch, shard: list[ScoredGroup]) -> None:
        """The optimiser steps of one iteration; afterwards this version is one higher."""
        started_s = time.monotonic()
        data = iteration_data(batch, shard)
        metrics = train_iteration(
            self.models, data, self.config, steps_in_all(self.config, self.problems)
        )
        trained_s = time.monotonic() - started_s
        self.busy_s += trained_s
        self.iteration += 1
        if self.zero:
            self.zero.servers.completed = self.zero.evaluator.asked.iteration = self.iteration
            self.client.iteration_done(self.iteration - 1, self.models.optimizer_steps)
            now_s = time.monotonic()
            times = Times(
                self.waited_s, trained_s, now_s - self.started_s, self.busy_fraction(now_s)
            )
            self.zero.metrics.write(
                batch, metrics, self.models.optimizer_steps, times, self.client.status()
            )

    def publish(self) -> None:
        """Hand the current version to the publisher; a collective, so every rank calls it."""
        probe = probe_tokens(self.config.seed, self.models.hf_config.get_text_config().vocab_size)
        logprobs = self.models.probe_logprobs(probe, self.config.rollout.temperature)
        tensors = self.models.state_dict_for_publication()
        if self.zero:
            self.zero.evaluator.ask_version(self.iteration)
            self.zero.publisher.pinned = self.zero.evaluator.asked.pinned
            self.zero.publisher.publish(self.iteration, tensors, logprobs)

    def busy_fraction(self, now_s: float) -> float:
        """Share of the time since the first batch that was spent training."""
        passed_s = now_s - (self.first_batch_s or now_s)
        return min(1.0, self.busy_s / passed_s) if passed_s else 0.0

    def save_if_due(self) -> None:
        """Checkpoint on the configured iterations."""
        every = self.config.checkpoint.every
        if every and self.iteration % every == 0:
            self.save()

    def save(self) -> None:
        """Write a checkpoint of this iteration unless it is there already; a collective."""
        if self.saved == self.iteration:
            return
        state = checkpoint.TrainerState(
            iteration=self.iteration,
            optimizer_steps=self.models.optimizer_steps,
            world_size=self.models.world_size,
        )
        checkpoint.save(
            self.directory / "checkpoints", self.models, state, self.config.checkpoint.keep
        )
        self.saved = self.iteration

    def look_around(self) -> None:
        """Between iterations: finished evaluations, children that cannot be restarted."""
        if self.zero:
            self.zero.publisher.check()
            self.zero.evaluator.asked.gather()
            self.zero.evaluator.check_course(dict(self.zero.publisher.digests))
            self.zero.servers.check()

    def give_up(self, fault: NothingToTrain) -> None:
        """Keep what is trained and send broker and workers home: the run would stand here again; every rank calls it."""
        self.save()
        if self.zero:
            self.zero.servers.expect_end()
            self.client.stop(str(fault))

    def halted(self) -> Halted:
        """What ends every rank that was asked to stop; the newest checkpoint is of this iteration."""
        return Halted(
            f"stopped as asked after {self.iteration} iterations, not finished; all is saved, and the next start goes on there"
        )

    def finish(self) -> None:
        """Evaluate the last version, write the summary, end the run.

        Raises:
            Halted: asked to stop while the last version was judged; what is judged stands in files.
            PeerLost: the servers are beyond help.
        """
        if not self.zero:
            return
        self.zero.publisher.flush(self.iteration)
        self.zero.evaluator.asked.watch = self.watch
        self.zero.evaluator.finish()
        metrics, up_s = self.zero.metrics, time.monotonic() - self.started_s
        result = summary.summarise(
            self.client.status(), self.zero.evaluator, metrics.lines(), self.models.optimizer_steps,
            metrics.since_run_began_s(up_s),
        )  # fmt: skip
        summary.write(summary.merged(result, self.directory), self.directory)
        log.info("finished after %d iterations", self.iteration)
        self.zero.servers.expect_end()
        self.client.stop("the run is finished")

    def watch(self) -> None:
        """Called while the last version is judged; raises what makes waiting useless."""
        if self.stopped():
            raise self.halted()
        assert self.zero, "only rank 0 judges"
        self.zero.servers.check()
