"""`prefixrl resume`: resumes a run with the config in its directory, and records the settings that it changes."""

import json
import time
from operator import attrgetter
from pathlib import Path

import click

from prefixrl.common.config.load import CONFIG_FILE, changed
from prefixrl.common.errors import ConfigError
from prefixrl.common.host.process import own, write_atomically
from prefixrl.common.run import json_lines
from prefixrl.common.run.changes import CHANGES_FILE, ChangeLine
from prefixrl.common.run.directory_format import check_is_no_evaluation
from prefixrl.common.run.replay import check_is_no_replay
from prefixrl.common.worker.command import settings_option
from prefixrl.deploy.launch.launch import launch
from prefixrl.deploy.runs.checkpoints import config_of, newest_checkpoint, run_directory_argument

CHANGEABLE = (
    "algorithm.iterations",
    "data.epochs",
    "learner.actor_lr",
    "learner.critic_lr",
    "algorithm.kl",
    "algorithm.entropy",
)


@click.command()
@run_directory_argument
@click.option(
    "--change",
    "changes",
    multiple=True,
    metavar="KEY=VALUE",
    help="algorithm.iterations=500, for example.",
)
@settings_option
def resume(run_directory: Path, changes: tuple[str, ...], settings: tuple[str, ...]) -> None:
    """Resume the run in RUN_DIRECTORY with changed settings, which are recorded there."""
    raise SystemExit(launch(resumed(run_directory, changes), settings, fresh=False))


def resumed(directory: Path, changes: tuple[str, ...]) -> Path:
    """Record the changes of a run and return its run file; raises ConfigError."""
    config = config_of(directory, ())
    check_is_no_evaluation(directory)
    check_is_no_replay(directory)
    run_file = directory / CONFIG_FILE
    moved = (f"directory={json.dumps(str(directory.resolve()))}",)
    if not changes and Path(config.directory) == directory.resolve():
        return run_file
    for change in changes:
        key, separator, _ = change.partition("=")
        if not separator or key not in CHANGEABLE:
            raise ConfigError(
                f"--change {change!r}: in a run that has begun only {', '.join(CHANGEABLE)} may change, as KEY=VALUE; "
                f"for anything else start another run from its adapter (adapter.init_from)"
            )
    new = changed(config, (*moved, *changes), "--change")
    # No learner may write a checkpoint while the lines name the newest one.
    with own(directory):
        iteration = newest_checkpoint(directory)
        if (length := new.algorithm.iterations) is not None and length < iteration:
            raise ConfigError(
                f"--change algorithm.iterations={length}: the run has a checkpoint of {iteration} iterations; "
                f"{iteration} ends it there, with its last evaluation and summary"
            )
        lines = []
        for key in CHANGEABLE:
            before, after = map(attrgetter(key), (config, new))
            if before != after:
                lines.append(ChangeLine(time.time(), iteration, key, before, after))
        # The lines first: a kill in between leaves the old config, and the command is repeated.
        json_lines.append(directory / CHANGES_FILE, lines)
        write_atomically(run_file, new.model_dump_json(indent=2))
    return run_file
