"""The batches of a journal, in the place of a broker: what a replay trains on. Nothing is written."""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import DataError
from prefixrl.common.journal import journal
from prefixrl.common.journal.batches import recorded_batches
from prefixrl.common.journal.records import GroupTotals
from prefixrl.common.run.replay import ReplayPlan
from prefixrl.common.run.status import AdmissionStatus, GroupCounts, StatusDocument
from prefixrl.common.seeds import derive
from prefixrl.common.wire.messages.groups import ScoredGroup
from prefixrl.common.wire.messages.learner import Batch, GetBatch, Halt, RunOver
from prefixrl.learner.broker.batches import batch_group

log = logging.getLogger(__name__)


class JournalClient:
    """Answers one rank; each rank of a replay reads the journal for itself, from its beginning."""

    def __init__(
        self,
        plan: ReplayPlan,
        config: RunConfig,
        last: int,
        are_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        """Open the journal of the plan's run.

        Args:
            plan: of the replay.
            config: the settings of the learner until `last`.
            last: the number of iterations after which there are no more batches.
            are_stopping: True once all ranks are to save and end. A collective: every rank asks before each batch.
        """
        self._plan, self._config, self._last = plan, config, last
        self._are_stopping = are_stopping
        self._source = Path(plan.source) / journal.FOLDER
        self._batches = self._read()
        self._iteration = -1
        self._groups: list[ScoredGroup] = []
        """Groups of the batch of `_iteration`."""
        self._counts = GroupTotals()
        """Counts of the groups of all batches so far: those of earlier starts, too."""

    def _read(self) -> Iterator[tuple[int, list[ScoredGroup]]]:
        return recorded_batches(journal.read(self._source))

    def next_batch(self, request: GetBatch, timeout_s: float) -> Batch | RunOver | Halt:
        """Return the batch that the run trained in an iteration; a rank asks for rising iterations."""
        iteration = request.iteration
        if iteration >= self._last:
            return RunOver(iteration)
        if self._are_stopping():
            return Halt(iteration)
        while self._iteration < iteration:
            self._iteration, self._groups = self._next_recorded(self._iteration + 1)
            for group in self._groups:
                self._counts.issued += 1
                self._counts.note_scored(group, group.faults)
                self._counts.note_trained(group, self._iteration - group.version, self._iteration)
        return Batch(
            iteration=iteration,
            total_iterations=self._plan.iterations,
            seed=derive(self._config.seed, "iteration", iteration),
            groups=tuple(map(batch_group, self._groups)),
            waited_s={},
        )

    def _next_recorded(self, expected: int) -> tuple[int, list[ScoredGroup]]:
        iteration, groups = next(self._batches, (-1, []))
        if iteration != expected:
            place = "its end" if iteration < 0 else f"the batch of iteration {iteration}"
            raise DataError(
                f"{self._source} has {place} where the batch of iteration {expected} should be; restore the journal"
            )
        return iteration, groups

    def groups(self, iteration: int, indices: Sequence[int]) -> dict[int, ScoredGroup]:
        """Return groups of the newest batch, by index in it."""
        assert iteration == self._iteration, "a rank fetches its part of the newest batch"
        return {index: self._groups[index] for index in indices}

    def iteration_done(
        self, iteration: int, optimizer_steps: int, relative_ess: float | None = None
    ) -> None:
        """Do nothing: no admission waits for the figures."""

    def status(self) -> StatusDocument:
        """Return the status document of a run without workers, whose groups are those trained so far."""
        counts = self._counts
        groups = GroupCounts(
            issued=counts.issued,
            trained=counts.trained,
            filtered=0,
            failed=0,
            expired=0,
            outstanding=0,
            duplicates_ignored=0,
        )
        algorithm = self._config.algorithm
        admission = AdmissionStatus(
            rule=algorithm.admission, lead_groups=0.0, cap_groups=0.0, waited_s=0.0
        )
        return StatusDocument(
            run_id=f"replay of {self._plan.run_id}",
            directory=self._config.directory,
            broker_pid=os.getpid(),
            iteration=self._iteration + 1,
            total_iterations=self._plan.iterations,
            groups=groups,
            causes={},
            row_errors=dict(counts.row_errors),
            filter=None,
            queues={},
            window=algorithm.max_staleness,
            mean_age=counts.mean_age,
            admission=admission,
            age_histogram=_by_text(counts.age_histogram),
            token_age_histogram=_by_text(counts.token_age_histogram),
            crossed_fraction=counts.rows_crossed / max(1, counts.rows),
            workers=[],
            busy_fraction={},
            waiting_rows={},
            losses={},
            truncated_fraction=0.0,
            waiting_for="",
            malformed_messages=0,
            journal_bytes=0,
            up_s=0.0,
            rows_left_out=dict(counts.rows_left_out),
        )

    def stop(self, reason: str) -> None:
        """Do nothing: there is no worker to dismiss."""

    def close(self) -> None:
        """Close the journal."""
        self._batches = iter(())


def _by_text(histogram: dict[int, int]) -> dict[str, int]:
    return {str(age): count for age, count in sorted(histogram.items())}
