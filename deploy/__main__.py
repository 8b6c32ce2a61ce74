"""`prefixrl`: the operator's commands. Imports are late, so that --help is quick."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

import click

from prefixrl.common.host.process import exit_codes, printable, stop_event
from prefixrl.common.worker.command import settings_option
from prefixrl.deploy.commands import begin as starting
from prefixrl.deploy.commands import operate as watching
from prefixrl.deploy.serve.serve_command import serve

Command = TypeVar("Command", bound=Callable[..., object])
PATH = click.Path(path_type=Path)
run_file_argument = click.argument("run_file", type=PATH)
run_directory_argument = click.argument("run_directory", type=PATH)
ema_option = click.option("--ema", "is_averaged", is_flag=True, help="Take the moving average of the weights.")
CHECKPOINT = "Iterations trained, 0 for none, best, or latest (default)."
ARMS = "no_prefix, fixed_prefix, prefix_clustering, adapter; default: all but clustering."
OPENING = "Length of an opening in prefix clustering."
TEMPERATURE = "Temperature of adapter and target when sampling; default: those of the run."
LAYOUT = "A job of the learner and arrays of workers, or one heterogeneous job of all."
OUT = "Where the lines go; a new or empty file.  [default: stdout]"


def _data_option(default: str) -> Callable[[Command], Command]:
    text = f"A problem set, file, folder or hf:OWNER/NAME{default}"
    return click.option("--data", "sets", multiple=True, metavar="SET", help=text)


def _samples_option(text: str) -> Callable[[Command], Command]:
    return click.option("--samples", type=click.IntRange(0), default=0, help=text)


@click.group()
@click.version_option(package_name="prefixrl", message="prefixrl %(version)s")
def main() -> None:
    """Train small adapters that write the first tokens of a large frozen model's answers."""


@main.command()
@run_file_argument
@settings_option
@click.option("--fresh", is_flag=True, help="Throw the run directory away and start anew.")
@click.option("--check", is_flag=True, help="Start nothing: print what `prefixrl-learner --check` prints.")
def launch(run_file: Path, settings: tuple[str, ...], fresh: bool, check: bool) -> None:
    """Run learner, rollouts and scorers on this machine, with a live view; resume a run.

    Executes the Python files that RUN_FILE names (reward.function, algorithm.advantage_function).
    """
    with exit_codes():
        if check:
            flags = [flag for setting in settings for flag in ("--set", setting)]
            command = [sys.executable, "-m", "prefixrl.learner", str(run_file), "--check", *flags]
            raise SystemExit(subprocess.call(command))
        from prefixrl.deploy.launch.launch import launch as run

        raise SystemExit(run(run_file, settings, fresh))


@main.command()
@run_directory_argument
@click.option("--change", "changes", multiple=True, metavar="KEY=VALUE", help="algorithm.iterations=500, for example.")
@settings_option
def resume(run_directory: Path, changes: tuple[str, ...], settings: tuple[str, ...]) -> None:
    """Go on with the run in RUN_DIRECTORY, with a few changes that are recorded there."""
    with exit_codes():
        from prefixrl.deploy.launch.launch import launch as run
        from prefixrl.deploy.launch.resume import resumed

        raise SystemExit(run(resumed(run_directory, changes), settings, fresh=False))


@main.command("config")
@click.argument("key", required=False)
@click.option("--markdown", "form", flag_value="markdown", help="All keys, as the page docs/configuration.md.")
@click.option("--json-schema", "form", flag_value="schema", help="The JSON schema of a run file, for editors.")
def config_command(key: str | None, form: str | None) -> None:
    """Explain a KEY or section of the run file; without one, list the sections.

    KEY may also be the name of the same setting in TRL, verl or OpenRLHF.
    """
    with exit_codes():
        import json

        from prefixrl.common.config.catalogue import json_schema
        from prefixrl.deploy.commands.config import explained, page

        if form == "schema":
            click.echo(json.dumps(json_schema(), indent=2))
        elif form == "markdown":
            click.echo(page(), nl=False)
        else:
            for line in explained(key):
                click.echo(line)


@main.command()
@run_directory_argument
@click.option("--worker", "added", metavar="NAME", help="Let one more worker in, by a key file of its own.")
@click.option("--remove", "removed", metavar="NAME", help="Let a key in no longer; its processes are refused at once.")
@click.option("--new", "is_new", is_flag=True, help="Make the keys of a run that has not begun.")
def keygen(run_directory: Path, added: str | None, removed: str | None, is_new: bool) -> None:
    """Add or remove a key of a run, also while the run goes on; list the keys."""
    with exit_codes():
        from prefixrl.deploy.commands.keygen import change, listing

        change(run_directory, added, removed, is_new)
        click.echo(listing(run_directory))


@main.command("worker-command")
@run_directory_argument
@click.option("--role", type=click.Choice(["rollout", "scorer"]), default="scorer", show_default=True)
@click.option("--key", "name", default="worker", metavar="NAME", help="Name of the key to use.", show_default=True)
def worker_command(run_directory: Path, role: str, name: str) -> None:
    """Print the command that starts a worker on another host, and the key file to copy there."""
    with exit_codes():
        from prefixrl.deploy.commands.keygen import command_for

        click.echo(command_for(run_directory, role, name))


@main.command("eval")
@click.argument("runs", nargs=-1, required=True, type=PATH)
@click.option("--checkpoint", "checkpoints", multiple=True, metavar="N", help=CHECKPOINT)
@click.option("--arm", "arms", multiple=True, help=ARMS)
@_data_option("; default: the run's held-out problems.")
@_samples_option("Sampled answers per problem besides the greedy one.")
@click.option("--opening-tokens", type=click.IntRange(1), default=16, help=OPENING)
@ema_option
@settings_option
@click.option("--out", type=PATH, help="Where to write the table in Markdown.")
@click.option("--fresh", is_flag=True, help="Throw away what was judged before.")
def evaluate(runs: tuple[Path, ...], out: Path | None, **options: Any) -> None:
    """Judge the adapters of RUNS (run directories) and arms to compare them with; print a table.

    Starts workers on this machine. Several runs, of different seeds for example, also get a line with their mean.
    """
    with exit_codes():
        from prefixrl.deploy.commands.eval_command import EvaluateOptions
        from prefixrl.deploy.commands.eval_command import evaluate as run

        raise SystemExit(run(list(runs), EvaluateOptions(**options), out))


@main.command()
@click.argument("run", required=False, type=PATH)
@click.option("--checkpoint", metavar="N", help=f"Of RUN: {CHECKPOINT}")
@ema_option
@click.option("--adapter", metavar="MODEL", help="Without RUN: a folder or hub name.")
@click.option("--target", metavar="MODEL", help="Without RUN: likewise; without it the adapter writes all.")
@_data_option(", or - for JSONL on stdin (default).")
@click.option("--suffix", help="Append this to every question, in place of a problem set's own.")
@_samples_option("Sampled answers per problem; default: one greedy answer.")
@click.option("--temperature", type=click.FloatRange(0), help=TEMPERATURE)
@settings_option
@click.option("--out", type=PATH, help=OUT)
@click.option("--overwrite", "overwrites", is_flag=True, help="Replace the content of the file of --out.")
def generate(out: Path | None, **options: Any) -> None:
    """Answer problems with the adapter of RUN (a run directory) and its target, in JSONL.

    Starts workers on this machine. A line per answer, in the order of the problems. Exit code 6: some row has no
    answer, or no verdict although it has a gold answer.
    """
    with exit_codes():
        from prefixrl.deploy.commands.generate_command import GenerateOptions
        from prefixrl.deploy.commands.generate_command import generate as run

        raise SystemExit(run(GenerateOptions(**options), out))


@main.command()
@run_directory_argument
@click.option("--json", "as_json", is_flag=True, help="One JSON object per trained group.")
@click.option("--check", is_flag=True, help="Check instead that no group was lost, trained twice or too old.")
def inspect(run_directory: Path, as_json: bool, check: bool) -> None:
    """List every trained group of the run in RUN_DIRECTORY: its prompt, rewards and versions."""
    with exit_codes():
        from prefixrl.deploy.runs.inspect import checked
        from prefixrl.deploy.runs.inspect import inspect as run

        for line in [checked(run_directory)] if check else run(run_directory, as_json):
            click.echo(printable(line))


@main.command()
@run_directory_argument
@click.option("--iteration", type=click.IntRange(0), help="Of which iteration.  [default: the newest]")
@click.option("--best", "order", flag_value="best", help="Highest advantages first.")
@click.option("--worst", "order", flag_value="worst", help="Lowest advantages first.")
@click.option("--count", type=click.IntRange(1), default=8, show_default=True, help="Most samples to print.")
@click.option("--follow", "follows", is_flag=True, help="A sample of every group, as iterations are trained.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per sample.")
def samples(
    run_directory: Path, iteration: int | None, order: str | None, count: int, follows: bool, as_json: bool
) -> None:
    """Print what the adapter writes: its commonest texts over time, and samples."""
    with exit_codes():
        from prefixrl.deploy.runs.samples import SampleChoice, follow
        from prefixrl.deploy.runs.samples import samples as run

        if follows:
            lines = follow(run_directory, as_json, stop_event().is_set)
        else:
            lines = run(run_directory, SampleChoice(iteration, order or "first", count), as_json)
        for line in lines:
            click.echo(printable(line))


@main.command("list")
@click.argument("folder", default="runs", type=PATH)
@click.option("--json", "as_json", is_flag=True, help="One JSON object per run.")
def list_command(folder: Path, as_json: bool) -> None:
    """List the runs in FOLDER (default: runs) with state, reward and accuracy."""
    with exit_codes():
        import msgspec
        from rich.console import Console

        from prefixrl.deploy.view.run_state import listing, runs_below, state_of

        if as_json:
            for run in runs_below(folder):
                click.echo(msgspec.json.encode(state_of(run)).decode())
        else:
            Console().print(listing(folder))


@main.command()
@click.argument("runs", nargs=-1, required=True, type=PATH)
def compare(runs: tuple[Path, ...]) -> None:
    """Show RUNS side by side: their figures, and the settings in which they differ."""
    with exit_codes():
        from rich.console import Console

        from prefixrl.deploy.view.run_state import comparison

        Console().print(comparison(list(runs)))


@main.command()
@run_directory_argument
@click.option("--out", type=PATH, required=True, help="A .csv or .parquet file.")
def export(run_directory: Path, out: Path) -> None:
    """Write the metrics of the run in RUN_DIRECTORY as a table, a row per iteration."""
    with exit_codes():
        from prefixrl.deploy.runs.export import export as run

        click.echo(f"wrote {run(run_directory, out)} iterations to {out}")


@main.command()
@run_directory_argument
@click.option("--tensorboard", is_flag=True, help="Write event files into RUN_DIRECTORY/tensorboard.")
@click.option("--wandb", "project", metavar="PROJECT", help="Send to this project of Weights & Biases.")
@click.option("--offline", is_flag=True, help="With --wandb: write files for `wandb sync`.")
@click.option("--follow", "follows", is_flag=True, help="Go on as iterations are trained, until Ctrl-C.")
@click.option("--until-eof", "is_child", is_flag=True, hidden=True, help="As [log] says, until stdin ends.")
def track(
    run_directory: Path, tensorboard: bool, project: str | None, offline: bool, follows: bool, is_child: bool
) -> None:
    """Send metrics and samples of a run to TensorBoard or Weights & Biases.

    A run does so itself where its run file says so (log.tensorboard, log.wandb).
    """
    with exit_codes():
        from prefixrl.deploy.runs.track import stdin_ended, track_as_configured, track_as_told

        if is_child:
            track_as_configured(run_directory, stdin_ended)
        else:
            ended = stop_event().is_set if follows else lambda: True
            track_as_told(run_directory, tensorboard, project, offline, ended)


@main.command()
@run_directory_argument
def report(run_directory: Path) -> None:
    """Write reward.png and report.html into RUN_DIRECTORY and print its table."""
    with exit_codes():
        from prefixrl.deploy.runs.report import print_table, write_report

        write_report(run_directory)
        print_table(run_directory)


@main.group()
def systemd() -> None:
    """Run a run's daemons as services of systemd on this machine."""


user_option = click.option("--user", "is_user", is_flag=True, help="Your own service manager, not the machine's.")
name_option = click.option("--name", help="Name of this run in unit names, where several runs share a machine.")


@systemd.command()
@run_file_argument
@settings_option
@user_option
@name_option
@click.option("--as-user", "account", help="Without --user: the account of the services.  [default: you]")
@click.option("--print", "shows", is_flag=True, help="Print the files and write nothing.")
def install(
    run_file: Path, settings: tuple[str, ...], is_user: bool, name: str | None, account: str | None, shows: bool
) -> None:
    """Write units for the run of RUN_FILE and print the next commands."""
    with exit_codes():
        from prefixrl.deploy.systemd.install import installation

        wanted = installation(run_file, settings, is_user, name, account)
        if shows:
            for path, content in (wanted.files() | wanted.gpu_files()).items():
                click.echo(f"# {path}\n{content}")
            return
        for path in wanted.install():
            click.echo(f"wrote {path}")
        click.echo(f"\nNext:\n{wanted.next_commands()}")


@systemd.command()
@user_option
@name_option
def uninstall(is_user: bool, name: str | None) -> None:
    """Remove the units of a run; its directory stays. Stop them first."""
    with exit_codes():
        from prefixrl.deploy.systemd import install as units

        where = units.places(is_user)
        removed = units.uninstall(where, units.prefix_of(name))
        for path in removed:
            click.echo(f"removed {path}")
        click.echo(f"next: {where.manager} daemon-reload" if removed else f"nothing of that name in {where.units}")


@main.command()
@run_file_argument
@click.option("--print", "action", flag_value="print", help="Print the job scripts.")
@click.option("--submit", "action", flag_value="submit", help="Submit them; the same command resumes a run.")
@click.option("--layout", type=click.Choice(["arrays", "het"]), default="arrays", show_default=True, help=LAYOUT)
@settings_option
def slurm(run_file: Path, action: str | None, layout: Literal["arrays", "het"], settings: tuple[str, ...]) -> None:
    """Run the run of RUN_FILE as jobs of SLURM."""
    with exit_codes():
        from prefixrl.common.errors import ConfigError
        from prefixrl.deploy.slurm.submit import print_scripts, run_on_slurm, submit

        if action is None:
            raise ConfigError("give --print to see the job scripts, or --submit to submit them")
        run = run_on_slurm(run_file, settings)
        (submit if action == "submit" else print_scripts)(run, layout)


@main.command()
@run_directory_argument
@click.argument("role", type=click.Choice(["rollouts", "scorers"]))
@click.argument("count", type=click.IntRange(0))
def scale(run_directory: Path, role: Literal["rollouts", "scorers"], count: int) -> None:
    """Have COUNT rollouts or scorers in the run in RUN_DIRECTORY.

    The run is one that `prefixrl slurm` submitted. Ends the newest workers first; what they hold is handed back.
    """
    with exit_codes():
        from prefixrl.deploy.slurm.scale import scale as run

        run(run_directory, role, count)


@main.command()
@run_file_argument
@click.argument("question")
@click.option("--prefix", default="", help="Text to show as the prefix of the answer too.")
@settings_option
def show(run_file: Path, question: str, prefix: str, settings: tuple[str, ...]) -> None:
    """Show the exact text and tokens that adapter and target of RUN_FILE see of QUESTION."""
    with exit_codes():
        from prefixrl.common.config.load import load
        from prefixrl.deploy.runs.checkpoints import show as run

        for line in run(load(run_file, settings), question, prefix):
            click.echo(line)


for command in (*starting.COMMANDS, *watching.COMMANDS, serve):
    main.add_command(command)


if __name__ == "__main__":
    main()
