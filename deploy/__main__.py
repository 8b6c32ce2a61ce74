"""`prefixrl`: the operator's commands, loaded when they are called: --help is quick."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import click
from click.shell_completion import CompletionItem

from prefixrl.common.host.process import exit_codes
from prefixrl.common.worker.command import settings_option
from prefixrl.deploy.serve.serve_command import serve

COMMANDS = {
    "advise": ("commands.advise:advise_command", "Say which part holds a run up, and the workers that balance it."),
    "compare": ("commands.list_command:compare", "Show runs side by side."),
    "completion": ("commands.docs:completion", "Print the script by which a shell completes commands and options."),
    "config": ("commands.config:config_command", "Explain a key or section of the run file."),
    "docs": ("commands.docs:docs", "Print a page of the documentation."),
    "export": ("runs.export:export_command", "Write the metrics of a run as a table."),
    "init": ("commands.init:init_command", "Print a run file to begin with."),
    "inspect": ("runs.inspect:inspect_command", "List or check every trained group of a run."),
    "keygen": ("commands.keygen:keygen", "Add or remove a key of a run; list the keys."),
    "launch": ("launch.command:launch_command", "Run learner, rollouts and scorers on this machine; resume a run."),
    "list": ("commands.list_command:list_runs", "List the runs in a folder."),
    "logs": ("commands.logs:logs", "Print the newest lines of the logs of a run."),
    "report": ("runs.report:report", "Write the pages of a run's results and print its table."),
    "resume": ("launch.resume:resume", "Go on with a run, with a few changes."),
    "samples": ("runs.samples:samples_command", "Print what the adapter writes."),
    "scale": ("slurm.scale:scale_command", "Have another number of rollouts or scorers in a run on SLURM."),
    "show": ("runs.show:show_command", "Show the text and tokens that adapter and target see of a question."),
    "slurm": ("slurm.submit:slurm_command", "Run a run as jobs of SLURM."),
    "status": ("commands.status_command:status", "Show how a run goes on, or how it ended."),
    "stop": ("commands.stop_and_drain:stop_command", "Have a run save and stop, on whatever host it is."),
    "sweep": ("sweep.conduct:sweep_command", "Run every combination of settings in a file."),
    "systemd": ("systemd.install:systemd", "Run a run's daemons as services of systemd on this machine."),
    "track": ("runs.track:track_command", "Send metrics of a run to TensorBoard or Weights & Biases."),
    "worker-command": ("commands.keygen:worker_command", "Print the command that starts a worker on another host."),
    "workers": ("commands.stop_and_drain:workers_command", "List the workers of a running run, or drain one."),
}
"""Commands with the module and name that define each, and what `prefixrl --help` says of it."""

Command = TypeVar("Command", bound=Callable[..., object])
PATH = click.Path(path_type=Path)
ema_option = click.option("--ema", "is_averaged", is_flag=True, help="Take the moving average of the weights.")
CHECKPOINT = "Iterations trained, 0 for none, best, or latest (default)."
ARMS = "no_prefix, fixed_prefix, prefix_clustering, adapter; default: all but clustering."
OPENING = "Length of an opening in prefix clustering."
TEMPERATURE = "Temperature of adapter and target when sampling; default: those of the run."
OUT = "Where the lines go; a new or empty file.  [default: stdout]"


class LateCommands(click.Group):
    """A group that imports a command when it is called, and turns errors into messages."""

    def list_commands(self, context: click.Context) -> list[str]:
        """Return the names of all commands."""
        return sorted([*COMMANDS, *self.commands])

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        """Return a command, imported now."""
        if name not in COMMANDS:
            return super().get_command(context, name)
        module, _, attribute = COMMANDS[name][0].partition(":")
        return cast("click.Command", getattr(importlib.import_module(f"prefixrl.deploy.{module}"), attribute))

    def summary(self, name: str) -> str:
        """Return a command in a line, without an import."""
        return COMMANDS[name][1] if name in COMMANDS else self.commands[name].get_short_help_str(100)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.summary(name)) for name in self.list_commands(context)])

    def shell_complete(self, context: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete the name of a command."""
        if incomplete.startswith("-"):
            return super().shell_complete(context, incomplete)
        names = [name for name in self.list_commands(context) if name.startswith(incomplete)]
        return [CompletionItem(name, help=self.summary(name)) for name in names]

    def invoke(self, context: click.Context) -> Any:
        """Run a command; a user's mistake is one message and an exit code."""
        with exit_codes():
            return super().invoke(context)


def _data_option(default: str) -> Callable[[Command], Command]:
    text = f"A problem set, file, folder or hf:OWNER/NAME{default}"
    return click.option("--data", "sets", multiple=True, metavar="SET", help=text)


def _samples_option(text: str) -> Callable[[Command], Command]:
    return click.option("--samples", type=click.IntRange(0), default=0, help=text)


@click.group(cls=LateCommands)
@click.version_option(package_name="prefixrl", message="prefixrl %(version)s")
def main() -> None:
    """Train small adapters that write the first tokens of a large frozen model's answers."""


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
    from prefixrl.deploy.commands.generate_command import GenerateOptions
    from prefixrl.deploy.commands.generate_command import generate as run

    raise SystemExit(run(GenerateOptions(**options), out))


main.add_command(serve)


if __name__ == "__main__":
    main()
