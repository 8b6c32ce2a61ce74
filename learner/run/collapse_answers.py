"""The answers to a collapse, carried out on every rank: rank 0 decides, and all change alike.

figures ──▶ Collapse (rank 0) ──sum over ranks──▶ entropy bonus, scale of the rates ──▶ every rank
└─▶ a checkpoint, for a way back        ──▶ every rank
"""

import logging
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from prefixrl.common.config.run import RunConfig
from prefixrl.common.run import json_lines
from prefixrl.common.run.changes import CHANGES_FILE, WEIGHTS_KEY, ChangeLine
from prefixrl.common.run.directory_format import checkpoints
from prefixrl.common.run.disk import when_there_is_room
from prefixrl.common.wire.messages.learner import Batch
from prefixrl.learner.models.distributed import sum_over_ranks
from prefixrl.learner.models.model import Models
from prefixrl.learner.run.collapse import Collapse
from prefixrl.learner.run.fractions import batch_fractions
from prefixrl.learner.run.stop import NO_STOP, StopSignal
from prefixrl.learner.training import checkpoint
from prefixrl.learner.training.figures import IterationMetrics

log = logging.getLogger(__name__)


class CollapseAnswers:
    """The changes that the answers so far have made, on one rank."""

    def __init__(
        self,
        config: RunConfig,
        directory: Path,
        models: Models,
        collapse: Collapse | None,
        stop: StopSignal = NO_STOP,
        returns: Mapping[int, int] = {},
    ) -> None:
        """Apply the answers before this start. A collective, unless the run file wants no answers.

        Args:
            config: the run file.
            directory: the run's, with its checkpoints and changes.
            models: of this rank.
            collapse: of rank 0, with the figures of all iterations so far; None on the others.
            stop: may end a wait for room on the disk.
            returns: by version, that of the weights which a way back takes there whatever else is saved. A replay
                goes back where its run went.
        """
        self.config = config
        """The run file, with the entropy bonus that applies now."""
        self._run_file = config
        self._directory, self._stop, self._returns = directory, stop, returns
        self._models = models
        self._collapse = collapse
        self.is_on = config.algorithm.on_collapse != "warn"
        """False: no iteration is answered."""
        if self.is_on:
            self._share_decision(is_due=False)

    @property
    def way_back(self) -> frozenset[int]:
        """Iterations of checkpoints that a way back may need, on rank 0."""
        if self._collapse is None or self._run_file.algorithm.on_collapse != "go_back":
            return frozenset()
        saved = checkpoints(self._directory / "checkpoints")
        return frozenset(
            [n for n in saved if n <= self._collapse.good_iteration][-1:]
            + [n for n in saved if n in self._returns.values()]
        )

    def answer_iteration(self, batch: Batch, metrics: IterationMetrics, version: int) -> None:
        """Answer a trained iteration if it is due; `version`: iterations trained now. A collective."""
        reason = ""
        if self._collapse is not None:
            figures = metrics.means | batch_fractions(batch.groups)
            reason = self._collapse.add_iteration(batch.iteration, figures)
        before = self.config.algorithm.entropy, self._models.actor.rate_scale
        is_due, good_iteration = self._share_decision(bool(reason))
        if not is_due:
            return
        weights: int | None = None
        if self._run_file.algorithm.on_collapse == "go_back":
            folder = self._directory / "checkpoints"
            newest = self._returns.get(version, good_iteration)
            weights = checkpoint.go_back(folder, self._models, newest)
        if self._collapse is not None:
            self._write_changes(reason, version, before, weights)

    def _share_decision(self, is_due: bool) -> tuple[bool, int]:
        """Have all ranks apply what rank 0 knows; return whether an answer is due, and the best iteration."""
        decided = torch.zeros(4, dtype=torch.float64)
        if (collapse := self._collapse) is not None:
            values = is_due, collapse.good_iteration, collapse.entropy, collapse.rate_scale
            decided = torch.tensor([float(value) for value in values], dtype=torch.float64)
        due, good, entropy, rate_scale = sum_over_ranks(decided.to(self._models.device)).tolist()
        algorithm = self._run_file.algorithm.model_copy(update={"entropy": entropy})
        self.config = self._run_file.model_copy(update={"algorithm": algorithm})
        reward = self._models.reward.trained if self._models.reward else None
        for model in (self._models.actor, self._models.critic, reward):
            if model is not None:
                model.rate_scale = rate_scale
        return bool(due), int(good)

    def _write_changes(
        self, reason: str, version: int, before: tuple[float, float], weights: int | None
    ) -> None:
        """Write down and log what changed; an iteration that is trained again changes nothing twice."""
        entropy, rate_scale = before
        changes = [
            ("algorithm.entropy", entropy, self.config.algorithm.entropy),
            ("scale of the learning rates", rate_scale, self._models.actor.rate_scale),
            (WEIGHTS_KEY, version, version if weights is None else weights),
        ]
        now_s = time.time()
        lines = [
            ChangeLine(now_s, version, key, old, new, reason)
            for key, old, new in changes
            if new != old
        ]
        path = self._directory / CHANGES_FILE
        written = {(line.iteration, line.key) for line in json_lines.read(path, ChangeLine)}
        # After a resume the same iteration may be trained again, and its lines are there already.
        unwritten = [line for line in lines if (line.iteration, line.key) not in written]
        # On a full disk the run waits: nothing else says why its settings changed.
        when_there_is_room(
            lambda: json_lines.append(path, unwritten),
            path.parent,
            path.name,
            self._stop.end_disk_wait,
        )
        words = ", ".join(f"{line.key} {line.before} -> {line.after}" for line in lines)
        if weights is None and self._run_file.algorithm.on_collapse == "go_back":
            words += "; no checkpoint is older than the fall"
        log.warning("answer to a collapse after iteration %d: %s (%s)", version, words, reason)
