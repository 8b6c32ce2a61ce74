"""`prefixrl eval`: judges adapters of finished (or running) runs, and what is to be compared with them, on data sets.

    per run and checkpoint: plan.json ──▶ launch: offline learner, rollouts, scorers ──▶ results.json ──▶ one table of all

Everything lies in <run>/eval/<checkpoint>; asked again, only what is not judged yet is judged.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

import click
import msgspec

from prefixrl.common.config import ModelConfig, RunConfig
from prefixrl.common.data_section import EVAL_FILE, TRAIN_FILE, DataConfig, Source, resolve
from prefixrl.common.errors import ConfigError
from prefixrl.common.messages import CodeMode
from prefixrl.common.offline import (
    PLAN_FILE,
    PREFIX_ARMS,
    RESULTS_FILE,
    Plan,
    Result,
    Results,
)
from prefixrl.common.process import stop_event, write_atomically
from prefixrl.deploy.checkpoints import LATEST, config_of, published, weights_of
from prefixrl.deploy.launch import STOPPED, Launcher
from prefixrl.deploy.results import markdown, print_results

USUAL_ARMS = ("no_prefix", "fixed_prefix", "adapter")
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
    _check_arms(runs, options.arms)
    plans = [
        _plan(run, label, checkpoint, options, is_first=index == 0)
        for run, label in zip(runs, _labels(runs), strict=True)
        for index, checkpoint in enumerate(options.checkpoints or (LATEST,))
    ]
    plans = [(plan, config) for plan, config in plans if plan.arms]
    found: list[Result] = []
    incomplete: list[str] = []
    stop = stop_event()
    for number, (plan, config) in enumerate(plans, start=1):
        if len(plans) > 1:
            click.echo(f"{number} of {len(plans)}: {plan.label} after {plan.version} iterations")
        directory = _directory(plan, config, options.fresh)
        launcher = Launcher(config, ["prefixrl.learner.offline", str(directory)], "evaluation")
        code = launcher.run_and_stop(stop.is_set)
        if stop.is_set():
            click.echo("stopped; the same command goes on where it stands")
            return STOPPED
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
    config = config_of(run, options.settings)
    kind = _kind(config)
    version, model = weights_of(run, config, checkpoint, options.is_averaged)
    arms = tuple(arm for arm in _possible_arms(config) if arm in (options.arms or USUAL_ARMS))
    name = f"step_{version:08d}" + ("_ema" if options.is_averaged else "")
    config = config.model_copy(
        update={
            "directory": str((run / "eval" / name).resolve()),
            "adapter": ModelConfig(model=model),
            "data": _data(run, config.data, options.sets),
        }
    )
    plan = Plan(
        config=config.model_dump_json(),
        label=label,
        kind=kind,
        version=version,
        published=() if options.is_averaged else published(run).get(version, ()),
        arms=arms if is_first else tuple(arm for arm in arms if arm == "adapter"),
        samples=options.samples,
        opening_tokens=options.opening_tokens,
    )  # fmt: skip
    return plan, config


def _kind(config: RunConfig) -> str:
    """What a run trains, in words."""
    learned = "low-rank matrices" if config.learner.lora else "whole weights"
    target = f" for {config.target.model}" if config.target else ""
    return f"{config.mode} mode, {learned} of {config.adapter.model}{target}"


def _check_arms(runs: list[Path], asked: tuple[str, ...]) -> None:
    """Raise ConfigError for arms that there are not, or that none of the runs has."""
    if strange := [arm for arm in asked if arm not in PREFIX_ARMS]:
        raise ConfigError(
            f"--arm {strange[0]}: there is no such arm; known: {', '.join(PREFIX_ARMS)}"
        )
    possible = {arm for run in runs for arm in _possible_arms(config_of(run, ()))}
    if impossible := [arm for arm in asked if arm not in possible]:
        raise ConfigError(
            f"--arm {impossible[0]}: a run in direct mode has no target; its arm is adapter"
        )


def _possible_arms(config: RunConfig) -> tuple[str, ...]:
    return PREFIX_ARMS if config.mode == "prefix" else ("adapter",)


def _data(run: Path, data: DataConfig, given: tuple[str, ...]) -> DataConfig:
    """The run's `[data]` with the problems to judge on as its held-out ones; its own are those that it kept."""
    if not given and not data.eval:
        raise ConfigError("--data: the run has no held-out problems (data.eval); name some")
    train = _kept(run / TRAIN_FILE, data.train, data.code)
    if not given:
        held = _kept(run / EVAL_FILE, data.eval, data.code)
        return data.model_copy(update={"train": train, "eval": held})
    sources = DataConfig.model_validate({"train": list(given)}).train
    resolved = resolve(data.model_copy(update={"train": sources, "eval": sources}), Path.cwd())
    return resolved.model_copy(update={"train": train})


def _kept(path: Path, sources: tuple[Source, ...], code: CodeMode) -> tuple[Source, ...]:
    """The file in which a run kept the problems of some sources, or the sources of a run that never began."""
    if not path.exists():
        return sources
    runs_programs = any(source.runs_programs(code) for source in sources)
    return (Source(path=str(path.resolve()), code="tests" if runs_programs else "none"),)


def _directory(plan: Plan, config: RunConfig, fresh: bool) -> Path:
    """The evaluation's directory with its plan and with what the run kept."""
    directory = Path(config.directory)
    known = directory / PLAN_FILE
    if fresh and known.exists():
        shutil.rmtree(directory)
    (directory / "logs").mkdir(parents=True, exist_ok=True)
    run = directory.parent.parent
    tried = run / "evaluations" / "candidates.json"
    if tried.exists():
        shutil.copyfile(tried, directory / tried.name)
    (directory / TRAIN_FILE).parent.mkdir(exist_ok=True)
    for name, sources in ((TRAIN_FILE, config.data.train), (EVAL_FILE, config.data.eval)):
        (directory / name).unlink(missing_ok=True)
        kept = (run / name).resolve()
        if [source.path for source in sources] == [str(kept)]:
            shutil.copyfile(kept, directory / name)
    write_atomically(known, msgspec.json.encode(plan).decode())
    return directory
