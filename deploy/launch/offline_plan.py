"""The plan of `prefixrl eval` and `prefixrl generate`: a checkpoint answers problems, in a directory of its own.

options ──▶ config with the checkpoint and the problems ──▶ plan.json ──▶ launch: plan runner, rollouts, scorers
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from prefixrl.common.config.data import DataConfig, resolve
from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import ConfigError
from prefixrl.common.evaluation.plans import PLAN_FILE, OfflinePlan
from prefixrl.common.host.process import write_atomically
from prefixrl.deploy.launch.launch import Launcher
from prefixrl.deploy.runs.checkpoints import Weights

Command = TypeVar("Command", bound=Callable[..., object])
INCOMPLETE = 6
"""Exit code of a command that ended well, but some of whose answers or verdicts are missing."""
FREE_PORT = 'broker.listen="tcp://127.0.0.1:0"'
"""The configured port may be taken: the run may still be training, here or on a host with another address."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of every command that answers problems with checkpoints."""

    sets: tuple[str, ...]
    """Problems as `data.eval` names them."""
    samples: int
    is_averaged: bool
    """Take the moving average of the weights (learner.ema_decay)."""
    settings: tuple[str, ...]

    @property
    def all_settings(self) -> tuple[str, ...]:
        """The settings of the user, after the port of a plan."""
        return (FREE_PORT, *self.settings)


def data_option(default: str) -> Callable[[Command], Command]:
    """Return the option that names problems; `default` says which problems are used without it."""
    text = f"A problem set, file, folder or hf:OWNER/NAME{default}"
    return click.option("--data", "sets", multiple=True, metavar="SET", help=text)


@contextmanager
def data_flag_named() -> Iterator[None]:
    """Name `--data` in a ConfigError, instead of the key of the run file that it stands for."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(re.sub(r"^data\.train(\[\d+\])?( =)?", "--data", str(error))) from None


def with_problems(data: DataConfig, sets: tuple[str, ...], suffix: str | None = None) -> DataConfig:
    """Return `[data]` with the problems of `--data` only; `suffix` replaces the suffixes of problem sets."""
    changes = {} if suffix is None else {"suffix": suffix}
    sources = tuple(
        source.model_copy(update=changes)
        for source in DataConfig.model_validate({"train": list(sets)}).train
    )
    return resolve(data.model_copy(update={"train": sources, "eval": sources}), Path.cwd())


@dataclass(frozen=True)
class OfflineRun:
    """A plan and the config that it is carried out with."""

    plan: OfflinePlan
    config: RunConfig

    @property
    def directory(self) -> Path:
        """The directory of the plan, its answers and its logs."""
        return Path(self.config.directory)

    def write_plan(self) -> None:
        """Write the plan for the process that carries it out."""
        write_atomically(self.directory / PLAN_FILE, msgspec.json.encode(self.plan))

    def launcher(self, name: str, **options: Any) -> Launcher:
        """Return the launcher of that process, under a name for its log, and of its workers."""
        command = ["prefixrl.learner.commands.plan_runner", str(self.directory)]
        return Launcher(self.config, command, name, **options)


def offline_run(
    config: RunConfig, weights: Weights, directory: Path, data: DataConfig, **fields: Any
) -> OfflineRun:
    """Plan answers of an adapter to the held-out problems of `data`; `fields` are those of the plan."""
    adapter = config.adapter.model_copy(update={"model": weights.model, "init_from": None})
    changes = {"directory": str(directory), "adapter": adapter, "data": data}
    config = config.model_copy(update=changes)
    plan = OfflinePlan(
        config=config.model_dump_json(),
        version=weights.version,
        published=weights.published,
        **fields,
    )
    return OfflineRun(plan, config)
