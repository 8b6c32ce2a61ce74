"""`prefixrl eval`: judges adapters of finished (or running) runs, and what is to be compared with them, on data sets.

    per run and checkpoint: plan.json ──▶ launch: offline learner, rollouts, scorers ──▶ results.json ──▶ one table of all

Everything lies in <run>/eval/<checkpoint>; asked again, only what is not judged yet is judged.
"""

import functools
import shutil
from dataclasses import dataclass
from pathlib import Path

import click
import msgspec

from prefixrl.common import journal
from prefixrl.common.config import ModelConfig, RunConfig, changed, from_json
from prefixrl.common.data_section import DataConfig, resolve
from prefixrl.common.errors import ConfigError
from prefixrl.common.offline import (
    PLAN_FILE,
    PREFIX_ARMS,
    RESULTS_FILE,
    Plan,
    Result,
    Results,
)
from prefixrl.common.process import stop_event, write_atomically
from prefixrl.common.records import VersionPublished
from prefixrl.deploy.launch import Launcher
from prefixrl.deploy.results import markdown, print_results

USUAL_ARMS = ("no_prefix", "fixed_prefix", "adapter")
LATEST = "latest"
INCOMPLETE = 6
"""Exit code of an evaluation that is told, but not whole."""


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    checkpoints: tuple[str, ...]
    """Iterations, or `latest`; 0 is the adapter the run began with."""
    arms: tuple[str, ...]
    sets: tuple[str, ...]
    """As `data.eval` names them; empty: the run's own held-out problems."""
    samples: int
    opening_tokens: int
    is_averaged: bool
    """Judge the moving average of the weights (learner.ema_decay) instead."""
    settings: tuple[str, ...]
    fresh: bool


def evaluate(runs: list[Path], options: Options, out: Path | None) -> int:
    """Judge everything, print the table; returns the exit code.

    Raises:
        ConfigError: a run, checkpoint, arm, data set or setting that cannot be.
    """
    plans = [
        _plan(run, label, checkpoint, options, is_first=index == 0)
        for run, label in zip(runs, _labels(runs), strict=True)
        for index, checkpoint in enumerate(options.checkpoints or (LATEST,))
    ]
    plans = [(plan, config) for plan, config in plans if plan.arms]
    found: list[Result] = []
    incomplete: list[str] = []
    stop = stop_event()
    for plan, config in plans:
        directory = _directory(plan, config, options.fresh)
        launcher = Launcher(config, ["prefixrl.learner.offline", str(directory)], devices=0)
        code = launcher.run_and_stop(stop.is_set)
        if stop.is_set():
            click.echo("stopped; the same command goes on where it stands")
            return 130
        if code != 0:
            launcher.tell_failure(code)
            return code
        results = msgspec.json.decode((directory / RESULTS_FILE).read_bytes(), type=Results)
        found += results.results
        incomplete += [f"{plan.label}: {name}" for name in results.incomplete]
    print_results(found, incomplete)
    out = out or Path(plans[0][1].directory) / "table.md"
    out.write_text(markdown(found, incomplete), encoding="utf-8")
    click.echo(f"the table is in {out}, every answer in {plans[0][1].directory}/evaluations")
    return INCOMPLETE if incomplete else 0


def _labels(runs: list[Path]) -> list[str]:
    """The names of the runs' folders, whole paths where two have one name."""
    names = [run.resolve().name for run in runs]
    return names if len(set(names)) == len(names) else [str(run) for run in runs]


def _plan(
    run: Path, label: str, checkpoint: str, options: Options, is_first: bool
) -> tuple[Plan, RunConfig]:
    """What to judge of one run at one checkpoint; arms without an adapter are judged with the first one only."""
    known = run / "config.json"
    if not known.exists():
        raise ConfigError(f"{run} holds no run (no file {known})")
    config = changed(
        from_json(known.read_text(encoding="utf-8"), str(known)), options.settings, "--set"
    )
    version, model = _model(run, config, checkpoint, options.is_averaged)
    arms = _arms(config, options.arms)
    name = f"step_{version:08d}" + ("_ema" if options.is_averaged else "")
    config = config.model_copy(
        update={
            "directory": str((run / "eval" / name).resolve()),
            "adapter": ModelConfig(model=model),
            "data": _data(config, options.sets),
        }
    )
    plan = Plan(
        config=config.model_dump_json(),
        label=label,
        version=version,
        published=() if options.is_averaged else _published(run).get(version, ()),
        arms=arms if is_first else tuple(arm for arm in arms if arm == "adapter"),
        samples=options.samples,
        opening_tokens=options.opening_tokens,
    )  # fmt: skip
    return plan, config


def _model(run: Path, config: RunConfig, checkpoint: str, is_averaged: bool) -> tuple[int, str]:
    """Iterations and model folder of a checkpoint."""
    if checkpoint == "0":
        return 0, config.adapter.model
    there = {int(path.name[5:]): path for path in (run / "checkpoints").glob("step_????????")}
    if not there:
        raise ConfigError(
            f"{run} has no checkpoint yet; --checkpoint 0 is the adapter it began with"
        )
    wanted = (
        max(there) if checkpoint == LATEST else int(checkpoint) if checkpoint.isdecimal() else -1
    )
    if wanted not in there:
        kept = ", ".join(map(str, sorted(there)))
        raise ConfigError(
            f"--checkpoint {checkpoint}: {run} keeps 0, {kept} and {LATEST} (checkpoint.keep)"
        )
    folder = there[wanted] / ("hf_ema" if is_averaged else "hf")
    if not folder.is_dir():
        raise ConfigError(f"--ema: {there[wanted]} holds no averaged weights (learner.ema_decay)")
    return wanted, str(folder.resolve())


def _arms(config: RunConfig, asked: tuple[str, ...]) -> tuple[str, ...]:
    possible = PREFIX_ARMS if config.mode == "prefix" else ("adapter",)
    if strange := [arm for arm in asked if arm not in PREFIX_ARMS]:
        raise ConfigError(
            f"--arm {strange[0]}: there is no such arm; known: {', '.join(PREFIX_ARMS)}"
        )
    if impossible := [arm for arm in asked if arm not in possible]:
        raise ConfigError(
            f"--arm {impossible[0]}: a run in direct mode has no target; its arm is adapter"
        )
    return tuple(arm for arm in possible if arm in (asked or USUAL_ARMS))


def _data(config: RunConfig, given: tuple[str, ...]) -> DataConfig:
    """The run's `[data]` with the problems to judge on as its held-out ones."""
    if not given:
        if not config.data.eval:
            raise ConfigError("--data: the run has no held-out problems (data.eval); name some")
        return config.data
    sources = DataConfig.model_validate({"train": list(given)}).train
    return resolve(config.data.model_copy(update={"eval": sources}), Path.cwd())


@functools.cache
def _published(run: Path) -> dict[int, tuple[str, ...]]:
    """Digests under which a run published each version; a journal is long, so it is read once for all checkpoints."""
    found: dict[int, tuple[str, ...]] = {}
    path = run / "journal.msgpack"
    for each in journal.read(path) if path.exists() else ():
        if isinstance(each, VersionPublished):
            found[each.note.version] = (*found.get(each.note.version, ()), each.note.digest)
    return found


def _directory(plan: Plan, config: RunConfig, fresh: bool) -> Path:
    """The evaluation's directory with its plan."""
    directory = Path(config.directory)
    known = directory / PLAN_FILE
    if fresh and known.exists():
        shutil.rmtree(directory)
    (directory / "logs").mkdir(parents=True, exist_ok=True)
    tried = directory.parent.parent / "evaluations" / "candidates.json"
    if tried.exists():
        shutil.copyfile(tried, directory / tried.name)
    write_atomically(known, msgspec.json.encode(plan).decode())
    return directory
