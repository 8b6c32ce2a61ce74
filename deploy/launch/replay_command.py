"""`prefixrl replay`: the learner of a run trains again on the samples in its journal, without one completion.

RUN ── journal, config, changes, settings ──▶ plan in a directory of its own ──▶ learner, once for each part of the plan
"""

import time
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

import click
import msgspec

from prefixrl.common.config.data import TRAIN_FILE
from prefixrl.common.config.foreign import user_function
from prefixrl.common.config.load import CONFIG_FILE, from_json, with_models
from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import ConfigError, DataError, Halted, to_copy
from prefixrl.common.host.placement import LEARNER
from prefixrl.common.host.process import own, patient_console, stop_event, write_atomically
from prefixrl.common.journal import journal
from prefixrl.common.journal.batches import recorded_batches
from prefixrl.common.journal.records import JournalRecord, RunHeader
from prefixrl.common.run import json_lines
from prefixrl.common.run.changes import CHANGES_FILE, ChangeLine
from prefixrl.common.run.digests import function_digest
from prefixrl.common.run.directory_format import check_is_no_evaluation, write_format
from prefixrl.common.run.documents import SUMMARY_FILE, newest_metrics
from prefixrl.common.run.replay import (
    PLAN_FILE,
    ReplayPlan,
    check_is_no_replay,
    check_settings,
    parts_of,
    plan_of,
    returns_of,
)
from prefixrl.common.worker.command import PATH, settings_option
from prefixrl.deploy.launch.launch import STOPPED, Launcher
from prefixrl.deploy.runs.checkpoints import config_of, newest_checkpoint, run_directory_argument
from prefixrl.deploy.runs.report import print_table, write_report
from prefixrl.deploy.view.live_view import LINE_S, View
from prefixrl.deploy.view.run_state import is_going_on

SUFFIX = "_replay"
FUNCTION_KEYS = ("algorithm.advantage_function", "algorithm.loss_function")


class ReplayView(View):
    """A replay as it goes on, from its files: it has no broker that could be asked."""

    def __init__(self, directory: Path, iterations: int) -> None:
        super().__init__(directory)
        self._metrics, self._iterations = directory, iterations
        self._told_s = time.monotonic()
        self._shown = -1

    def refresh(self) -> None:
        """Print the newest iteration, at most every `LINE_S`."""
        if time.monotonic() - self._told_s < LINE_S:
            return
        self._told_s = time.monotonic()
        for line in newest_metrics(self._metrics):
            if line.iteration != self._shown:
                self._shown = line.iteration
                loss, entropy = (line.figures.get(name, 0.0) for name in ("policy_loss", "entropy"))
                self.announce(
                    f"it {line.iteration + 1}/{self._iterations}; policy loss {loss:.3g}, entropy {entropy:.3g}"
                )


@click.command("replay")
@run_directory_argument
@settings_option
@click.option(
    "--out", type=PATH, help=f"Folder of the replay.  [default: RUN_DIRECTORY + {SUFFIX}]"
)
def replay_command(run_directory: Path, settings: tuple[str, ...], out: Path | None) -> None:
    """Train the adapter of a finished run again, on the samples in its journal.

    Nothing is sampled or judged. With --set the learner has another loss, rate or objective; without, the result is
    that of the run. The same command goes on where it was stopped.

    Executes the Python files of algorithm.advantage_function and loss_function.
    """
    raise SystemExit(replay(run_directory, settings, out))


@patient_console()
def replay(run: Path, settings: tuple[str, ...], out: Path | None) -> int:
    """Plan and train; return the exit code; ConfigError, DataError for what cannot be replayed."""
    plan = _plan(run.resolve(), settings, out)
    directory = Path(_first_config(plan).directory)
    _prepare(directory, plan)
    stop = stop_event()
    # A part for each time at which a person changed the run: its learner began anew there, too.
    while not (directory / SUMMARY_FILE).exists():
        before = newest_checkpoint(directory)
        launcher = _launcher(directory, plan)
        code = launcher.run_and_stop(stop.is_set)
        if stop.is_set() or code == Halted.exit_code:
            click.echo("stopped; run the same command again to go on")
            return STOPPED
        if code:
            launcher.report_failure(code)
            return code
        assert newest_checkpoint(directory) > before or (directory / SUMMARY_FILE).exists()
    write_report(directory)
    print_table(directory)
    beside = to_copy("prefixrl compare", plan.source, directory)
    click.echo(f"{beside} shows it beside its run")
    return 0


def _plan(run: Path, settings: tuple[str, ...], out: Path | None) -> ReplayPlan:
    """Return the plan; raise ConfigError for settings that need other samples, DataError for a journal with gaps."""
    before = config_of(run, ())
    check_is_no_replay(run)
    check_is_no_evaluation(run)
    if is_going_on(run):
        raise ConfigError(
            f"the run in {run} goes on; replay it when it is finished or stopped ({to_copy('prefixrl stop', run)})"
        )
    trained = max([newest_checkpoint(run), *(line.iteration + 1 for line in newest_metrics(run))])
    if not trained:
        raise ConfigError(
            f"the run in {run} has trained no iteration, so there is nothing to replay"
        )
    run_id = _check_journal(run / journal.FOLDER, trained)
    has_length = any(each.partition("=")[0].strip() == "algorithm.iterations" for each in settings)
    # The first may be set again by the user; the second is what `algorithm.iterations` takes the place of.
    inner = (f"launch.learner_ranks={_ranks_of(run, before)}", *settings)
    inner += ("data.epochs=null",) * (has_length and before.data.epochs is not None)
    after = config_of(run, inner)
    check_settings(before, after)
    iterations = trained
    if has_length and (length := after.algorithm.iterations) != before.algorithm.iterations:
        assert length is not None, "it was set"
        iterations = length
    if iterations > trained:
        raise ConfigError(
            f"algorithm.iterations = {iterations}: the run in {run} has trained {trained} iterations, and there are "
            f"samples for no more; give at most {trained}"
        )
    directory = out or Path(
        after.directory if after.directory != before.directory else f"{run}{SUFFIX}"
    )
    lines = json_lines.read(run / CHANGES_FILE, ChangeLine)
    parts = tuple(
        msgspec.structs.replace(
            part,
            config=_resolved(from_json(part.config), directory.resolve()).model_dump_json(),
        )
        for part in parts_of(before, lines, inner, iterations)
    )
    refs = (attrgetter(key)(from_json(parts[-1].config)) for key in FUNCTION_KEYS)
    return ReplayPlan(
        source=str(run),
        run_id=run_id,
        iterations=iterations,
        problems=_problems_of(run, after),
        parts=parts,
        returns=returns_of(lines),
        functions=tuple(map(function_digest, refs)),
        settings=settings,
    )


def _check_journal(folder: Path, trained: int) -> str:
    """Return the run's id; raise ConfigError without a journal, DataError for one that lacks what was trained."""
    if not journal.exists(folder):
        raise ConfigError(f"{folder.parent} holds no samples to replay (no journal in {folder})")
    run_ids: list[str] = []

    def watched() -> Iterator[JournalRecord]:
        for record in journal.read(folder):
            if isinstance(record, RunHeader):
                run_ids.append(record.run_id)
            yield record

    batches = 0
    for iteration, _ in recorded_batches(watched()):
        if iteration != batches:
            raise DataError(
                f"the batch of iteration {iteration} follows {batches} others in {folder}; restore the journal"
            )
        batches += 1
    if batches < trained or not run_ids:
        raise DataError(
            f"{folder} holds the batches of {batches} iterations, and the run has trained {trained}: its end is lost; "
            f"restore the journal"
        )
    return run_ids[0]


class _SavedState(msgspec.Struct):
    world_size: int


class _Saved(msgspec.Struct):
    """The part of a checkpoint's manifest that names the ranks."""

    state: _SavedState


def _ranks_of(run: Path, config: RunConfig) -> int:
    """Return the number of learner ranks of a run, which a cluster may have decided."""
    newest = run / "checkpoints" / f"step_{newest_checkpoint(run):08d}" / "manifest.json"
    saved = json_lines.document(newest, _Saved)
    return saved.state.world_size if saved else config.launch.learner_ranks


def _problems_of(run: Path, config: RunConfig) -> int:
    """Return the number of training problems, by which the epochs of a run become iterations."""
    path = run / TRAIN_FILE
    if not path.exists() and config.algorithm.iterations is None:
        raise DataError(
            f"{path} is missing, whose number of problems says how long an epoch is; restore it, or give "
            f"--set algorithm.iterations=N"
        )
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _resolved(config: RunConfig, directory: Path) -> RunConfig:
    """Return the config with the directory of the replay and absolute paths of what a setting may have named."""
    functions = {
        key.partition(".")[2]: user_function.resolve(key, function_ref, Path.cwd())
        for key in FUNCTION_KEYS
        if (function_ref := attrgetter(key)(config)) is not None
    }
    changes = {
        "directory": str(directory),
        "algorithm": config.algorithm.model_copy(update=functions),
        "implicit_reward": with_models(config.implicit_reward, "implicit_reward", Path.cwd()),
    }
    return config.model_copy(update=changes)


def _first_config(plan: ReplayPlan) -> RunConfig:
    return from_json(plan.parts[0].config)


def _prepare(directory: Path, plan: ReplayPlan) -> None:
    """Write the plan; raise ConfigError where the folder holds another replay, or something else."""
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"{directory} is a file; give a folder (--out), which may be a new one")
    before = plan_of(directory)
    if before is None and directory.exists() and any(directory.iterdir()):
        raise ConfigError(
            f"{directory} is not empty and holds no replay; give another folder (--out)"
        )
    if before is not None and _content(before) != _content(plan):
        raise ConfigError(
            f"{directory} holds a replay of {before.source} with other settings, or of other iterations; give another "
            f"folder (--out), or remove it"
        )
    directory.mkdir(parents=True, exist_ok=True)
    with own(directory):
        if before is None:
            # The plan first: without it the directory would be taken for that of a run.
            write_atomically(directory / PLAN_FILE, msgspec.json.encode(plan))
            write_format(directory)
            config = _first_config(plan)
            write_atomically(directory / CONFIG_FILE, config.model_dump_json(indent=2))
    (directory / "logs").mkdir(exist_ok=True)


def _content(plan: ReplayPlan) -> ReplayPlan:
    return msgspec.structs.replace(plan, settings=())


def _launcher(directory: Path, plan: ReplayPlan) -> Launcher:
    """Return the launcher of the learner alone."""
    config = _first_config(plan)
    alone = config.launch.model_copy(update={"rollouts": 0, "scorers": 0})
    ranks = ["--nproc-per-node", str(config.launch.learner_ranks)]
    command = ["prefixrl.learner.commands.replay", str(directory), *ranks]
    view = ReplayView(directory, plan.iterations)
    return Launcher(config.model_copy(update={"launch": alone}), command, LEARNER, view=view)
