"""Weights & Biases, and trackio, which has the same calls."""

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from prefixrl.common.config.learner import WandbConfig
from prefixrl.common.errors import ConfigError
from prefixrl.common.run.documents import MetricsLine, columns
from prefixrl.common.run.tracker import SampleText, Tracker
from prefixrl.deploy.track.identity import identity_at, imported_package, settings_of


class LoggedRun:
    """One run of Weights & Biases, or of trackio, which has the same calls; also over resumes."""

    def __init__(self, module: Any, run: Any, takes_steps: bool) -> None:
        self._module = module
        self._run = run
        self._takes_steps = takes_steps

    def write(self, lines: Sequence[MetricsLine]) -> None:
        """Send the columns of each line."""
        for line in lines:
            self._run.log(columns(line), step=line.iteration if self._takes_steps else None)

    def samples(self, samples: Sequence[SampleText]) -> None:
        """Send a table."""
        rows = [[*msgspec.structs.astuple(sample)] for sample in samples]
        iteration = samples[0].iteration if samples else 0
        table = self._module.Table(columns=list(SampleText.__struct_fields__), data=rows)
        step = iteration if self._takes_steps else None
        self._run.log({"samples": table, "iteration": iteration}, step=step)

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()


def open_wandb(directory: Path, options: WandbConfig) -> LoggedRun:
    """Begin or go on; raise ConfigError without the package or an account."""
    wandb = imported_package("wandb")
    run_id = identity_at(directory, "wandb", lambda: secrets.token_hex(4))
    try:
        run: Any = wandb.init(
            project=options.project,
            entity=options.entity,
            name=options.name or directory.resolve().name,
            id=run_id,
            resume="allow",
            mode=options.mode,
            dir=str(directory),
            config=settings_of(directory),
            settings=wandb.Settings(console="off"),
        )
    except wandb.Error as error:
        raise ConfigError(f"log.wandb: {error}") from None
    # Its own counter of steps only rises; iterations that are trained again have their own number again.
    run.define_metric("*", step_metric="iteration")
    return LoggedRun(wandb, run, takes_steps=False)


def open_trackio(directory: Path, project: str) -> LoggedRun:
    """Begin or go on; raise ConfigError without the package."""
    package = imported_package("trackio")
    name = identity_at(
        directory, "trackio", lambda: f"{directory.resolve().name}-{secrets.token_hex(2)}"
    )
    quiet = {"resume": "allow", "embed": False, "auto_log_cpu": False, "auto_log_gpu": False}
    run = package.init(project, name, config=settings_of(directory), **quiet)
    return LoggedRun(package, run, takes_steps=True)


WANDB = Tracker(open=open_wandb)
TRACKIO = Tracker(open=open_trackio)
