"""`prefixrl warm-start`: before reward trains it, an adapter learns how right answers begin.

RUN_FILE ──▶ launch of an evaluation: the target answers the training problems ──▶ evaluations/*.jsonl
         ──▶ learner: cross entropy on their first tokens ──▶ checkpoints/step_N ──▶ adapter.init_from of a run
"""

import hashlib
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import msgspec

from prefixrl.common.config.foreign.files import read_json
from prefixrl.common.config.load import import_functions, load
from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import ConfigError, to_copy
from prefixrl.common.evaluation.plans import RESULTS_FILE
from prefixrl.common.host.placement import LEARNER
from prefixrl.common.host.process import own, stop_event, write_atomically
from prefixrl.common.run.warm_start import (
    EPOCHS_FILE,
    FORM_KEYS,
    PLAN_FILE,
    RECORD_FILE,
    ROLE_KEYS,
    WarmStartPlan,
    WarmStartRecord,
    shared_settings,
)
from prefixrl.common.worker.command import PATH, set_flags, settings_option
from prefixrl.deploy.launch.endpoint_trial import try_endpoint
from prefixrl.deploy.launch.launch import STOPPED, Launcher
from prefixrl.deploy.launch.offline_plan import FREE_PORT, offline_run
from prefixrl.deploy.runs import checkpoints

SUFFIX = "_warm_start"
UNLEARNED_NAT = 1.0
"""Loss of a place in the prefix above which the adapter is guessing there."""
HELD_OUT_FRACTION = 0.1
ALL_PROBLEMS = 10**9
TEACHER = "Learn the prefixes of this run's trained adapter, in place of the beginnings of the target's answers."


@dataclass(frozen=True, kw_only=True)
class WarmStartOptions:
    """Options of `prefixrl warm-start`."""

    teacher: Path | None
    takes_all: bool
    samples: int
    problems: int | None
    min_reward: float
    epochs: int
    batch_rows: int
    patience: int
    lr: float
    out: Path | None


@click.command("warm-start")
@click.argument("run_file", type=PATH)
@settings_option
@click.option("--teacher", type=PATH, metavar="RUN", help=TEACHER)
@click.option("--all", "takes_all", is_flag=True, help="Learn from all answers, right or not.")
@click.option(
    "--samples",
    type=click.IntRange(1),
    default=4,
    show_default=True,
    help="Sampled answers per problem, beside a greedy one.",
)
@click.option("--problems", type=click.IntRange(2), help="Only so many of the training problems.")
@click.option(
    "--min-reward",
    type=float,
    default=1.0,
    show_default=True,
    help="Least reward of a right answer.",
)
@click.option(
    "--epochs", type=click.IntRange(1), default=10, show_default=True, help="At most so many."
)
@click.option("--batch-rows", type=click.IntRange(1), default=32, show_default=True)
@click.option(
    "--patience",
    type=click.IntRange(1),
    default=2,
    show_default=True,
    help="Epochs without a better held-out loss after which it ends.",
)
@click.option("--lr", type=click.FloatRange(0, min_open=True), default=2e-4, show_default=True)
@click.option("--out", type=PATH, help=f"Folder of the result.  [default: directory + {SUFFIX}]")
def warm_start_command(run_file: Path, settings: tuple[str, ...], **options: Any) -> None:
    """Teach the adapter of RUN_FILE the beginnings of right answers, before it is trained by reward.

    The target answers the training problems; the first tokens of its right answers train the adapter by cross entropy.
    A run begins with the result by adapter.init_from. The same command goes on where it was stopped.

    Executes the Python files that RUN_FILE names (reward.function).
    """
    raise SystemExit(warm_start(run_file, settings, WarmStartOptions(**options)))


@dataclass(frozen=True)
class AnswerSource:
    """The models that answer the training problems."""

    config: RunConfig
    weights: checkpoints.Weights
    arm: str
    """Arm of an evaluation: the target alone, or a teacher's adapter and its target."""

    @property
    def digest(self) -> str:
        """Digest of all that decides the answers, but their number."""
        document = self.config.model_dump(mode="json")
        parts = [document[name] for name in ("target", "scorer", "data", "reward", "seed")]
        if self.arm != "no_prefix":
            parts += [document["adapter"], document["rollout"], self.weights.model]
        return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()


def warm_start(run_file: Path, settings: tuple[str, ...], options: WarmStartOptions) -> int:
    """Answer, train, and print the report; return the exit code; raise ConfigError for what cannot be done."""
    config = load(run_file, (FREE_PORT, *settings))
    import_functions(config)
    _check(config, options)
    source = _source_of(config, options)
    directory = options.out or Path(config.directory).with_name(
        Path(config.directory).name + SUFFIX
    )
    directory = directory.resolve()
    _prepare(directory, config, options, source)
    stop = stop_event()
    steps: tuple[tuple[str, Callable[[], Launcher]], ...] = (
        (RESULTS_FILE, lambda: _answering_launcher(directory, source, options.samples, stop)),
        (RECORD_FILE, lambda: _training_launcher(directory, config)),
    )
    for result, launcher_of in steps:
        # The same command goes on after a stop: a step with its result is not repeated.
        if (directory / result).exists():
            continue
        launcher = launcher_of()
        code = launcher.run_and_stop(stop.is_set)
        if stop.is_set():
            click.echo("stopped; run the same command again to go on")
            return STOPPED
        if code:
            launcher.report_failure(code)
            return code
    _print_record(directory, run_file, settings)
    return 0


def _check(config: RunConfig, options: WarmStartOptions) -> None:
    """Raise ConfigError for a run whose adapter cannot be taught so, and for options that do not fit it."""
    if config.mode != "prefix":
        raise ConfigError(
            'mode = "direct": a warm start teaches prefixes, which this run has none of'
        )
    if config.has_advice and options.teacher is None:
        raise ConfigError(
            'target.placement = "advice": the beginning of an answer is no advice; give a --teacher, whose adapter '
            "writes some"
        )
    if config.adapter.sees_draft:
        raise ConfigError(
            'adapter.sees = "draft": the adapter would be taught without the drafts that it reads in the run; '
            "teach one that sees the problem alone"
        )
    if not config.rollout.has_tokenizer:
        raise ConfigError(
            f'rollout.engine = "{config.rollout.engine}" has no adapter that could learn'
        )
    if options.out is not None and options.out.exists() and not options.out.is_dir():
        raise ConfigError(
            f"--out {options.out}: it is a file; give a folder, which may be a new one"
        )


def _source_of(config: RunConfig, options: WarmStartOptions) -> AnswerSource:
    """Return the models that answer; raise ConfigError for a teacher that writes something else, or nothing yet."""
    data = config.data.model_copy(update={"eval": config.data.train})
    most = config.evaluation.model_copy(update={"problems": options.problems or ALL_PROBLEMS})
    if options.teacher is None:
        alone = config.model_copy(update={"data": data, "evaluation": most})
        return AnswerSource(alone, checkpoints.Weights(0, config.adapter.start), "no_prefix")
    teacher = checkpoints.config_of(options.teacher, (FREE_PORT,))
    taught, here = shared_settings(teacher), shared_settings(config)
    # The adapter learns the form of these prefixes, so its own run must ask for the same form.
    for key in (*ROLE_KEYS, *FORM_KEYS):
        if taught[key] != here[key]:
            raise ConfigError(
                f"--teacher {options.teacher}: it writes prefixes with {key} = {taught[key]!r}, this run with "
                f"{here[key]!r}; choose another teacher, or set it to {taught[key]!r}"
            )
    if not checkpoints.newest_checkpoint(options.teacher):
        raise ConfigError(
            f"--teacher {options.teacher}: it has no checkpoint yet, so its adapter is untrained"
        )
    served = checkpoints.served_checkpoint(options.teacher)
    weights = checkpoints.weights_of(options.teacher, teacher, served, False)
    changes = {"data": data, "evaluation": most}
    return AnswerSource(teacher.model_copy(update=changes), weights, "adapter")


def _prepare(
    directory: Path, config: RunConfig, options: WarmStartOptions, source: AnswerSource
) -> None:
    """Write the plan; raise ConfigError where the folder holds other answers, or something else.

    Where another plan was there, what it decided otherwise is thrown away: the training, and with other numbers of
    answers the results, never an answer.
    """
    student = {"directory": str(directory), "data": source.config.data}
    plan = WarmStartPlan(
        config=config.model_copy(update=student).model_dump_json(),
        answers=source.digest,
        samples=options.samples,
        problems=options.problems,
        arm=source.arm,
        teacher="" if options.teacher is None else str(options.teacher.resolve()),
        min_reward=None if options.takes_all else options.min_reward,
        held_out_fraction=HELD_OUT_FRACTION,
        epochs=options.epochs,
        batch_rows=options.batch_rows,
        patience=options.patience,
        lr=options.lr,
    )
    path = directory / PLAN_FILE
    if not path.exists() and directory.exists() and any(directory.iterdir()):
        raise ConfigError(
            f"{directory} is not empty and holds no warm start; give another folder (--out)"
        )
    directory.mkdir(parents=True, exist_ok=True)
    with own(directory):
        if path.exists():
            _drop_stale_results(directory, read_json(path, WarmStartPlan), plan)
        write_atomically(path, msgspec.json.encode(plan))
    (directory / "logs").mkdir(exist_ok=True)


def _drop_stale_results(directory: Path, before: WarmStartPlan, now: WarmStartPlan) -> None:
    """Remove what another plan has made and this one would make otherwise; ConfigError for other answers."""
    if before == now:
        return
    if (before.answers, before.teacher) != (now.answers, now.teacher):
        raise ConfigError(
            f"{directory} holds answers to other problems, or of another target or teacher; give another folder "
            f"(--out), or remove it"
        )
    stale = [RECORD_FILE, EPOCHS_FILE]
    if (before.samples, before.problems) != (now.samples, now.problems):
        stale.append(RESULTS_FILE)
    for name in stale:
        (directory / name).unlink(missing_ok=True)
    shutil.rmtree(directory / "checkpoints", ignore_errors=True)


def _answering_launcher(
    directory: Path, source: AnswerSource, samples: int, stop: threading.Event
) -> Launcher:
    """Return the launcher of the evaluation that has the training problems answered."""
    try_endpoint(source.config, stop)
    run = offline_run(
        source.config,
        source.weights,
        directory,
        source.config.data,
        arms=(source.arm,),
        samples=samples,
    )
    run.write_plan()
    return run.launcher("evaluation")


def _training_launcher(directory: Path, config: RunConfig) -> Launcher:
    """Return the launcher of the learner that trains on the answers, without workers."""
    alone = config.launch.model_copy(update={"rollouts": 0, "scorers": 0, "learner_ranks": 1})
    changed = config.model_copy(update={"directory": str(directory), "launch": alone})
    return Launcher(changed, ["prefixrl.learner.commands.warm_start", str(directory)], LEARNER)


def _print_record(directory: Path, run_file: Path, settings: tuple[str, ...]) -> None:
    record = read_json(directory / RECORD_FILE, WarmStartRecord)
    before, *_ = record.epochs
    best = next(line for line in record.epochs if line.epoch == record.best_epoch)
    if max(best.held_out_by_place) > UNLEARNED_NAT:
        places = " ".join(f"{loss:.2f}" for loss in best.held_out_by_place)
        click.echo(
            f"loss by place in the prefix: {places}. From the first that is high the adapter writes by chance, and the "
            f"target believes it: have prefixes end before (rollout.stop_tokens, or fewer rollout.prefix_tokens)",
            err=True,
        )
    click.echo(
        f"{record.right} of {record.answers} answers were used ({record.target_tokens:,} tokens of the target), "
        f"{record.examples} examples trained and {record.held_out_examples} held out\n"
        f"held-out loss: {before.held_out_loss:.3f} nat per token before, {best.held_out_loss:.3f} after epoch "
        f"{best.epoch} of {record.epochs[-1].epoch}; {record.seconds:.0f} s\n"
        f"a run begins with it by "
        + to_copy(
            "prefixrl launch", run_file, *set_flags((*settings, f"adapter.init_from={directory}"))
        )
    )
