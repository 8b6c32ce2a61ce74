"""`prefixrl eval`: judges adapters of runs, and arms to compare them with, on data sets.

    per run and checkpoint: plan.json ──▶ launch: offline learner, rollouts, scorers ──▶ results.json ──▶ one table

Everything lies in <run>/eval/<checkpoint>. Asked again, the command judges only what is not judged yet.
"""

import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from prefixrl.common.config.data import EVAL_FILE, TRAIN_FILE, DataConfig, Source
from prefixrl.common.config.foreign.files import read_json
from prefixrl.common.config.foreign.verifier import MATHEMATICS, SANDBOXED
from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import ConfigError
from prefixrl.common.evaluation import plans as planning
from prefixrl.common.host.process import own, stop_event
from prefixrl.common.wire.messages.groups import CodeMode
from prefixrl.common.worker.command import PATH, settings_option
from prefixrl.deploy.launch.launch import STOPPED
from prefixrl.deploy.launch.offline_plan import (
    INCOMPLETE,
    OfflineRun,
    PlanOptions,
    data_flag_named,
    data_option,
    offline_run,
    with_problems,
)
from prefixrl.deploy.runs import checkpoints
from prefixrl.deploy.runs.eval_table import markdown, print_results

WEIGHTS = "weights_judged"
"""Folder of an evaluation with the checkpoint that it judges, while it does."""
USUAL_ARMS = ("no_prefix", "fixed_prefix", "adapter")


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(PlanOptions):
    """Options of `prefixrl eval`. Without `sets` the run's own held-out problems are judged."""

    checkpoints: tuple[str, ...]
    arms: tuple[str, ...]
    opening_tokens: int
    fresh: bool


@click.command("eval")
@click.argument("runs", nargs=-1, required=True, type=PATH)
@click.option(
    "--checkpoint", "checkpoints", multiple=True, metavar="N", help=checkpoints.CHECKPOINT
)
@click.option(
    "--arm",
    "arms",
    multiple=True,
    help=f"{', '.join(planning.PREFIX_ARMS)}; default: all but clustering.",
)
@data_option("; default: the run's held-out problems.")
@click.option(
    "--samples",
    type=click.IntRange(0),
    default=0,
    help="Sampled answers per problem besides the greedy one.",
)
@click.option(
    "--opening-tokens",
    type=click.IntRange(1),
    default=16,
    help="Length of an opening in prefix clustering.",
)
@checkpoints.ema_option
@settings_option
@click.option("--out", type=PATH, help="Where to write the table in Markdown.")
@click.option("--fresh", is_flag=True, help="Throw away what was judged before.")
def eval_command(runs: tuple[Path, ...], out: Path | None, **options: Any) -> None:
    """Judge the adapters of RUNS (run directories) and arms to compare them with; print a table.

    Starts workers on this machine. Several runs, of different seeds for example, also get a line with their mean.
    """
    raise SystemExit(evaluate(list(runs), EvaluateOptions(**options), out))


def evaluate(runs: list[Path], options: EvaluateOptions, out: Path | None) -> int:
    """Judge everything, print the table, return the exit code; raise ConfigError."""
    _check_arms(runs, options.arms)
    names = [run.resolve().name for run in runs]
    labels = names if len(set(names)) == len(names) else map(str, runs)
    planned = (
        _plan(run, label, checkpoint, options, is_first=index == 0)
        for run, label in zip(runs, labels, strict=True)
        for index, checkpoint in enumerate(options.checkpoints or (checkpoints.LATEST,))
    )
    evaluations = [evaluation for evaluation in planned if evaluation.plan.arms]
    # All of them at once: a run that is training removes checkpoints while the first is judged.
    for evaluation in evaluations:
        _prepare(evaluation, options.fresh)
    results: list[planning.ArmResult] = []
    incomplete: list[str] = []
    stop = stop_event()
    for number, evaluation in enumerate(evaluations, start=1):
        plan = evaluation.plan
        if len(evaluations) > 1:
            click.echo(
                f"{number} of {len(evaluations)}: {plan.label} after {plan.version} iterations"
            )
        launcher = evaluation.launcher("evaluation")
        code = launcher.run_and_stop(stop.is_set)
        if stop.is_set():
            click.echo("stopped; run the same command again to resume")
            return STOPPED
        if code != 0:
            launcher.report_failure(code)
            return code
        document = read_json(
            evaluation.directory / planning.RESULTS_FILE, planning.EvaluationResults
        )
        results += document.results
        incomplete += [f"{plan.label}: {name}" for name in document.incomplete]
    # After all of them: two names may be of one checkpoint.
    for evaluation in evaluations:
        shutil.rmtree(evaluation.directory / WEIGHTS, ignore_errors=True)
    print_results(results, incomplete)
    directory = evaluations[0].directory
    out = out or directory / "table.md"
    out.write_text(markdown(results, incomplete), encoding="utf-8")
    click.echo(f"the table is in {out}, every answer in {directory}/evaluations")
    return INCOMPLETE if incomplete else 0


def _plan(
    run: Path, label: str, checkpoint: str, options: EvaluateOptions, is_first: bool
) -> OfflineRun:
    """Plan one checkpoint of a run; arms without an adapter are judged with the first one only."""
    config = checkpoints.config_of(run, options.all_settings)
    weights = checkpoints.weights_of(run, config, checkpoint, options.is_averaged)
    arms = [arm for arm in _possible_arms(config) if arm in (options.arms or USUAL_ARMS)]
    name = f"step_{weights.version:08d}" + ("_ema" if options.is_averaged else "")
    directory = (run / "eval" / name).resolve()
    if weights.version:
        weights = replace(weights, model=str(directory / WEIGHTS))
    return offline_run(
        config,
        weights,
        directory,
        _data(run, config.data, options.sets),
        label=label,
        kind=kind_of(config),
        arms=tuple(arm for arm in arms if is_first or arm == "adapter"),
        samples=options.samples,
        opening_tokens=options.opening_tokens,
    )


def kind_of(config: RunConfig) -> str:
    """Return what a run trains, in words."""
    learned = "low-rank matrices" if config.learner.lora else "whole weights"
    target = f" for {config.target.model}" if config.target else ""
    return f"{config.mode} mode, {learned} of {config.adapter.model}{target}"


def _check_arms(runs: list[Path], arms: tuple[str, ...]) -> None:
    """Raise ConfigError for unknown arms, and for arms that none of the runs can have."""
    if strange := [arm for arm in arms if arm not in planning.PREFIX_ARMS]:
        raise ConfigError(
            f"--arm {strange[0]}: there is no such arm; known: {', '.join(planning.PREFIX_ARMS)}"
        )
    possible = {arm for run in runs for arm in _possible_arms(checkpoints.config_of(run, ()))}
    if impossible := [arm for arm in arms if arm not in possible]:
        raise ConfigError(
            f"--arm {impossible[0]}: a run in direct mode has no target; its arm is adapter"
        )


def _possible_arms(config: RunConfig) -> tuple[str, ...]:
    return planning.PREFIX_ARMS if config.mode == "prefix" else ("adapter",)


def _data(run: Path, data: DataConfig, sets: tuple[str, ...]) -> DataConfig:
    """Return the run's `[data]`, with the problems to judge as its held-out ones."""
    if not sets and not data.eval:
        raise ConfigError("--data: the run has no held-out problems (data.eval); name some")
    train = _kept(run / TRAIN_FILE, data.train, data.code)
    held_out = _kept(run / EVAL_FILE, data.eval, data.code)
    if sets:
        with data_flag_named():
            data = with_problems(data, sets)
        held_out = data.eval
    return data.model_copy(update={"train": train, "eval": held_out})


def _kept(path: Path, sources: tuple[Source, ...], code: CodeMode) -> tuple[Source, ...]:
    """Return the file with the problems that a run kept; the sources where it never began."""
    if not path.exists():
        return sources
    verifiers = {source.code_of(code) for source in sources} - {MATHEMATICS}
    runs_programs = not verifiers.isdisjoint(SANDBOXED)
    verifier = "tests" if runs_programs else max(verifiers, default=MATHEMATICS)
    return (Source(path=str(path.resolve()), code=verifier),)


def _prepare(evaluation: OfflineRun, fresh: bool) -> None:
    """Make an evaluation's directory; raise ConfigError if it is in use, or its checkpoint gone."""
    directory = evaluation.directory
    data = evaluation.config.data
    (directory / "logs").mkdir(parents=True, exist_ok=True)
    with own(directory):
        if fresh and (directory / planning.PLAN_FILE).exists():
            shutil.rmtree(directory)
            (directory / "logs").mkdir(parents=True)
        run = directory.parent.parent
        version = evaluation.plan.version
        _link_weights(run / "checkpoints" / f"step_{version:08d}", directory, version)
        candidates = run / "evaluations" / "candidates.json"
        if candidates.exists():
            shutil.copyfile(candidates, directory / candidates.name)
        (directory / TRAIN_FILE).parent.mkdir(exist_ok=True)
        for name, sources in ((TRAIN_FILE, data.train), (EVAL_FILE, data.eval)):
            (directory / name).unlink(missing_ok=True)
            problems_file = (run / name).resolve()
            if [source.path for source in sources] == [str(problems_file)]:
                shutil.copyfile(problems_file, directory / name)
        evaluation.write_plan()


def _link_weights(checkpoint: Path, directory: Path, version: int) -> None:
    """Put a checkpoint's weights in an evaluation's directory, where the run removes none."""
    if version == 0:
        return
    exported = checkpoint / ("hf_ema" if directory.name.endswith("_ema") else "hf")
    shutil.rmtree(directory / WEIGHTS, ignore_errors=True)
    try:
        shutil.copytree(exported, directory / WEIGHTS, copy_function=_link)
    except (OSError, shutil.Error) as error:
        raise ConfigError(
            f"the run removed {checkpoint} just now, or it cannot be read ({error}); name another --checkpoint, or "
            "keep more of them (checkpoint.keep)"
        ) from None


def _link(source: str, target: str) -> None:
    """Give a file another name; copy it where the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
