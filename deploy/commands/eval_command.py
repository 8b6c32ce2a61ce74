"""`prefixrl eval`: judges adapters of runs, and arms to compare them with, on data sets.

    per run and checkpoint: plan.json ──▶ launch: offline learner, rollouts, scorers ──▶ results.json ──▶ one table

Everything lies in <run>/eval/<checkpoint>. Asked again, the command judges only what is not judged yet.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import msgspec

from prefixrl.common.config.data import EVAL_FILE, TRAIN_FILE, DataConfig, Source
from prefixrl.common.config.foreign.files import read_json, read_toml
from prefixrl.common.config.foreign.verifier import MATHEMATICS, SANDBOXED
from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import ConfigError
from prefixrl.common.evaluation import plans as planning
from prefixrl.common.host.process import own, stop_event
from prefixrl.common.journal import journal as journals
from prefixrl.common.journal.records import AnswerKept
from prefixrl.common.run.changes import FREE_KEYS, changes_between
from prefixrl.common.run.directory_format import ANSWERS_FOLDER
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
TARGET = "Judge on another target: a TOML file with its [target] and [scorer]; may be repeated."
TARGET_SECTIONS = ("target", "scorer", "rollout", "evaluation")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(PlanOptions):
    """Options of `prefixrl eval`. Without `sets` the run's own held-out problems are judged."""

    checkpoints: tuple[str, ...]
    targets: tuple[str, ...]
    """`NAME=FILE` of other targets, in place of the run's own."""
    arms: tuple[str, ...]
    opening_tokens: int
    fresh: bool


@dataclass(frozen=True)
class JudgedTarget:
    """A target that adapters are judged with."""

    name: str = ""
    """"" for the run's own."""
    settings: tuple[str, ...] = ()
    """`KEY=VALUE` over the config of the run."""


OWN_TARGET = JudgedTarget()


@click.command("eval")
@click.argument("runs", nargs=-1, required=True, type=PATH)
@click.option(
    "--checkpoint", "checkpoints", multiple=True, metavar="N", help=checkpoints.CHECKPOINT
)
@click.option("--target", "targets", multiple=True, metavar="NAME=FILE", help=TARGET)
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
    targets = [_target_of(option) for option in options.targets] or [OWN_TARGET]
    planned = (
        _plan(run, label, checkpoint, options, is_first=index == 0, target=target)
        for run, label in zip(runs, labels, strict=True)
        for target in targets
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


def _target_of(option: str) -> JudgedTarget:
    """Return the target that an option names; raise ConfigError for a file that describes none."""
    name, _, file = option.partition("=")
    if not _NAME.fullmatch(name) or not file:
        raise ConfigError(f"--target {option!r}: expected NAME=FILE, for example other=other.toml")
    path = Path(file)
    document = read_toml(path, "--target")
    if strange := sorted(set(document) - set(TARGET_SECTIONS)):
        raise ConfigError(
            f"--target {option!r}: {path} has {', '.join(strange)}; allowed are the sections "
            f"{', '.join(TARGET_SECTIONS)}"
        )
    model = document.get("target", {}).get("model")
    if isinstance(model, str) and (path.parent / model).is_dir():
        document["target"]["model"] = str((path.parent / model).resolve())
    return JudgedTarget(name, tuple(_settings_of(document)))


def _settings_of(document: dict[str, Any], section: str = "") -> Iterator[str]:
    """Yield `KEY=VALUE` for every key of a document."""
    for key, value in document.items():
        if isinstance(value, dict):
            yield from _settings_of(value, f"{section}{key}.")
        else:
            yield f"{section}{key}={json.dumps(value)}"


def _variant(run: Path, config: RunConfig, target: str) -> str:
    """Return the end of the name of an evaluation's folder: its target, and a digest of other settings.

    Answers with other settings are other answers, so that they have a folder of their own.
    """
    before = checkpoints.config_of(run, ()).model_dump(mode="json")
    free = FREE_KEYS | {("directory",)}
    changes = list(changes_between(before, config.model_dump(mode="json"), free))
    digest = hashlib.sha256("\n".join(changes).encode()).hexdigest()[:8] if changes else ""
    return "".join(f"_{part}" for part in (target, digest) if part)


def _plan(
    run: Path,
    label: str,
    checkpoint: str,
    options: EvaluateOptions,
    is_first: bool,
    target: JudgedTarget = OWN_TARGET,
) -> OfflineRun:
    """Plan one checkpoint of a run on one target; arms without an adapter are judged with the first one only."""
    config = checkpoints.config_of(run, (*options.all_settings, *target.settings))
    weights = checkpoints.weights_of(run, config, checkpoint, options.is_averaged)
    arms = [arm for arm in _possible_arms(config) if arm in (options.arms or USUAL_ARMS)]
    name = f"step_{weights.version:08d}" + ("_ema" if options.is_averaged else "")
    variant = _variant(run, config, target.name)
    directory = (run / "eval" / f"{name}{variant}").resolve()
    # The evaluation has its own links to the weights: the run may remove the checkpoint meanwhile.
    if weights.version:
        weights = replace(weights, model=str(directory / WEIGHTS))
    if target.name:
        label = f"{label} on {target.name}"
    elif variant:
        label = f"{label} ({', '.join(options.settings)})"
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
    # Another command may be judging in this very directory.
    with own(directory):
        if fresh and (directory / planning.PLAN_FILE).exists():
            shutil.rmtree(directory)
            (directory / "logs").mkdir(parents=True)
        run = directory.parent.parent
        version = evaluation.plan.version
        _link_weights(run / "checkpoints" / f"step_{version:08d}", directory, version)
        _adopt_answers(run, evaluation)
        candidates = run / "evaluations" / "candidates.json"
        if candidates.exists():
            shutil.copyfile(candidates, directory / candidates.name)
        (directory / TRAIN_FILE).parent.mkdir(exist_ok=True)
        # A run's own problems are judged from its copy of them, whatever became of the sources.
        for name, sources in ((TRAIN_FILE, data.train), (EVAL_FILE, data.eval)):
            (directory / name).unlink(missing_ok=True)
            problems_file = (run / name).resolve()
            if [source.path for source in sources] == [str(problems_file)]:
                shutil.copyfile(problems_file, directory / name)
        evaluation.write_plan()


def _adopt_answers(run: Path, evaluation: OfflineRun) -> None:
    """Copy the greedy answers that the run's target has given, where the same endpoint is asked, if any."""
    answers = evaluation.directory / ANSWERS_FOLDER
    asked_before = checkpoints.config_of(run, ()).scorer.openai.url
    is_same = asked_before == evaluation.config.scorer.openai.url
    if is_same and (run / ANSWERS_FOLDER).is_dir() and not answers.exists():
        # The run has paid for its drafts: here they are none.
        records = [
            msgspec.structs.replace(record, is_draft=False, prompt_tokens=0)
            for record in journals.read(run / ANSWERS_FOLDER)
            if isinstance(record, AnswerKept)
        ]
        copy = journals.Journal(answers)
        copy.append(records)
        copy.close()


def _link_weights(checkpoint: Path, directory: Path, version: int) -> None:
    """Put a checkpoint's weights in an evaluation's directory, where the run removes none."""
    if version == 0:
        return
    exported = checkpoint / ("hf_ema" if "_ema" in directory.name else "hf")
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
