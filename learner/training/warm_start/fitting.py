"""The epochs of a warm start: cross entropy on prefixes, judged on held-out examples, the best epoch kept.

batch ──▶ micro-batches ──▶ −Σ log p(prefix | prompt) / tokens ──▶ one step
epoch ──▶ held-out loss ──▶ checkpoint
"""

import logging
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefixrl.common.errors import TrainingFault
from prefixrl.common.host.process import write_atomically
from prefixrl.common.run import json_lines
from prefixrl.common.run.directory_format import checkpoints
from prefixrl.common.run.warm_start import EPOCHS_FILE, EpochLine
from prefixrl.common.seeds import derive
from prefixrl.learner.models.batch import PaddedRows, Sample, pad
from prefixrl.learner.models.model import Models
from prefixrl.learner.training import checkpoint
from prefixrl.learner.training.warm_start.examples import Example, batches_of, micro_batches

log = logging.getLogger(__name__)

PAD_ID = 0


@dataclass(frozen=True)
class Fit:
    """Numbers of a warm start."""

    epochs: int
    batch_rows: int
    patience: int
    """Epochs without a better held-out loss after which it ends."""
    micro_batch_tokens: int
    seed: int


class Fitting:
    """The training of one adapter, which goes on from its newest checkpoint."""

    def __init__(
        self,
        models: Models,
        directory: Path,
        examples: Sequence[Example],
        held_out: Sequence[Example],
        fit: Fit,
    ) -> None:
        self._models = models
        self._checkpoints = directory / "checkpoints"
        self._file = directory / EPOCHS_FILE
        self._examples, self._held_out, self._fit = examples, held_out, fit
        steps_per_epoch = len(batches_of(examples, fit.batch_rows, 0))
        self._total_steps = fit.epochs * steps_per_epoch

    def run(self) -> list[EpochLine]:
        """Train to the end; return the line of every epoch. Only the best checkpoint is left."""
        self._checkpoints.mkdir(exist_ok=True)
        state = checkpoint.load(self._checkpoints, self._models)
        saved_epochs = state.iteration if state else 0
        # An epoch beyond the checkpoint was not kept: it is trained, and written, once more.
        lines = [
            line for line in json_lines.read(self._file, EpochLine) if line.epoch <= saved_epochs
        ]
        if not lines:
            lines = [self._judged(epoch=0, loss=None, begun_s=time.monotonic())]
            self._write_lines(lines)
            log.info("held-out loss before training: %.3f nat per token", lines[0].held_out_loss)
        while lines[-1].epoch < self._fit.epochs and not self._is_settled(lines):
            lines.append(self._train_epoch(lines[-1].epoch + 1))
            # First: an epoch whose checkpoint is missing is trained again.
            self._write_lines(lines)
            self._keep_checkpoints(lines)
            log.info(
                "epoch %d: loss %.3f, held-out loss %.3f nat per token, %.0f s",
                lines[-1].epoch,
                lines[-1].loss,
                lines[-1].held_out_loss,
                lines[-1].seconds,
            )
        self._keep_best_checkpoint(lines)
        return lines

    def _train_epoch(self, epoch: int) -> EpochLine:
        begun_s = time.monotonic()
        losses = [
            self._step(batch)
            for batch in batches_of(
                self._examples, self._fit.batch_rows, derive(self._fit.seed, "epoch", epoch)
            )
        ]
        return self._judged(epoch, float(np.mean(losses)), begun_s)

    def _judged(self, epoch: int, loss: float | None, begun_s: float) -> EpochLine:
        sums, counts = self.held_out_losses()
        return EpochLine(
            epoch=epoch,
            loss=loss,
            held_out_loss=float(sums.sum() / counts.sum()),
            held_out_by_place=tuple((sums / counts).tolist()),
            seconds=time.monotonic() - begun_s,
        )

    def _step(self, batch: Sequence[Example]) -> float:
        """Take one step; return the loss before it."""
        models = self._models
        tokens = sum(example.prefix.size for example in batch)
        parts = micro_batches(batch, self._fit.micro_batch_tokens)
        total = 0.0
        for number, part in enumerate(parts, start=1):
            loss = token_losses(models, part).sum() / tokens
            models.actor.backward(loss, is_last=number == len(parts))
            total += loss.item()
        report = models.actor.step(models.optimizer_steps, self._total_steps)
        models.optimizer_steps += 1
        if not report.is_applied:
            raise TrainingFault(
                f"step {models.optimizer_steps} of the warm start has a loss or a gradient that is no number; lower "
                f"--lr"
            )
        return total

    @torch.no_grad()
    def held_out_losses(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return summed losses of the held-out examples in nats, and numbers of tokens, by place in the prefix."""
        places = max(example.prefix.size for example in self._held_out)
        sums, counts = np.zeros(places), np.zeros(places)
        for part in micro_batches(self._held_out, self._fit.micro_batch_tokens):
            losses = token_losses(self._models, part).sum(dim=0).cpu().numpy()
            sums[: losses.size] += losses
            for example in part:
                counts[: example.prefix.size] += 1
        return sums, counts

    def _is_settled(self, lines: Sequence[EpochLine]) -> bool:
        return lines[-1].epoch - best_epoch(lines) >= self._fit.patience

    def _keep_checkpoints(self, lines: Sequence[EpochLine]) -> None:
        """Write a checkpoint; leave it, and the best one."""
        epoch, models = lines[-1].epoch, self._models
        state = checkpoint.TrainerState(epoch, models.optimizer_steps, models.world_size)
        checkpoint.save(self._checkpoints, models, state)
        self._leave_checkpoints({epoch, best_epoch(lines)})

    def _keep_best_checkpoint(self, lines: Sequence[EpochLine]) -> None:
        self._leave_checkpoints({best_epoch(lines)})

    def _leave_checkpoints(self, epochs: set[int]) -> None:
        for number, folder in checkpoints(self._checkpoints).items():
            if number not in epochs:
                shutil.rmtree(folder)

    def _write_lines(self, lines: Sequence[EpochLine]) -> None:
        text = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
        write_atomically(self._file, text)


def best_epoch(lines: Sequence[EpochLine]) -> int:
    """Return the epoch with the least held-out loss, the earliest of equals; never the state before training."""
    trained = [line for line in lines if line.epoch > 0]
    if not trained:
        return 0
    return min(trained, key=lambda line: line.held_out_loss).epoch


def token_losses(models: Models, examples: Sequence[Example]) -> Tensor:
    """Return −log p of the tokens of prefixes, (rows, tokens), 0 behind their ends, at the sampling temperature."""
    batch = padded(examples).to(models.device)
    logprobs, _ = models.forward_actor(batch)
    return -(logprobs * batch.mask)


def padded(examples: Sequence[Example]) -> PaddedRows:
    """Return examples as rows of a micro-batch."""
    samples = []
    for example in examples:
        zeros = np.zeros_like(example.prefix)
        samples.append(
            Sample(example.prompt, example.prefix, zeros.astype(np.float32), 0.0, 0, zeros)
        )
    return pad(samples, PAD_ID)
