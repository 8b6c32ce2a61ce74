"""The loop of a replay: that of every learner, without the parts that serve workers."""

import logging
import time
from dataclasses import dataclass

from prefixrl.common.run.replay import ReplayPlan
from prefixrl.common.wire.messages.learner import Batch
from prefixrl.learner.loop import Learner
from prefixrl.learner.run import summary
from prefixrl.learner.run.metrics import MetricsLog, Times
from prefixrl.learner.run.retention import prune
from prefixrl.learner.run.summary import EvaluationOutcome
from prefixrl.learner.training.figures import IterationMetrics

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Replay(Learner):
    """One rank of a replay; `rank_zero` is None on all of them: there is nobody to publish for."""

    plan: ReplayPlan
    metrics: MetricsLog | None
    """The figures, on rank 0; None on the others."""

    def publish(self) -> None:
        """Publish nothing: nobody samples."""

    def finish_iteration(self, batch: Batch, metrics: IterationMetrics, times: Times) -> None:
        """Write a trained iteration to the files."""
        if self.metrics:
            steps = self.models.optimizer_steps
            self.metrics.write(batch, metrics, steps, times, self.client.status())

    def save_if_due(self) -> None:
        """Checkpoint as the run did, and where the run went back to: the replay goes back there too."""
        if self.iteration in self.plan.returns.values():
            self.save()
        super().save_if_due()

    def remove_old(self) -> None:
        """Remove the checkpoints that nothing keeps; no version is judged, so none is the best."""
        if self.metrics:
            folder = self.directory / "checkpoints"
            prune(folder, self.config.checkpointing, awaited=self.answers.way_back)

    def finish(self) -> None:
        """Write the summary after the last part of the plan; it has no accuracy."""
        if self.metrics is None or self.iteration < self.plan.iterations:
            return
        since_start_s = time.monotonic() - self.times.started_s
        result = summary.summarise(
            self.client.status(),
            EvaluationOutcome(),
            self.metrics.lines(),
            self.models.optimizer_steps,
            self.metrics.since_run_began_s(since_start_s),
        )
        summary.write(summary.merged(result, self.directory), self.directory)
        log.info("replayed %d iterations", self.iteration)
