"""`prefixrl`: the operator's commands, loaded when they are called: --help is quick."""

import importlib
from typing import Any, cast

import click
from click.shell_completion import CompletionItem

from prefixrl.common.host.process import exit_codes

COMMANDS = {
    "advise": ("commands.advise:advise_command", "Say which part holds a run up, and the workers that balance it."),
    "compare": ("commands.list_command:compare", "Show runs side by side."),
    "completion": ("commands.docs:completion", "Print the script by which a shell completes commands and options."),
    "config": ("commands.config:config_command", "Explain a key or section of the run file."),
    "docs": ("commands.docs:docs", "Print a page of the documentation."),
    "eval": ("commands.eval_command:eval_command", "Judge the adapters of runs, and arms to compare them with."),
    "export": ("runs.export:export_command", "Write the metrics of a run as a table."),
    "generate": ("commands.generate_command:generate_command", "Answer problems with an adapter and its target."),
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
    "serve": ("serve.serve_command:serve", "Serve an adapter and its target on OpenAI's HTTP interface."),
    "show": ("runs.show:show_command", "Show the text and tokens that adapter and target see of a question."),
    "slurm": ("slurm.submit:slurm_command", "Run a run as jobs of SLURM."),
    "status": ("commands.status_command:status", "Show how a run goes on, or how it ended."),
    "stop": ("commands.stop_and_drain:stop_command", "Have a run save and stop, on whatever host it is."),
    "sweep": ("sweep.conduct:sweep_command", "Run every combination of settings in a file."),
    "systemd": ("systemd.install:systemd", "Run a run's daemons as services of systemd on this machine."),
    "track": ("runs.track:track_command", "Send metrics of a run to TensorBoard or Weights & Biases."),
    "try-loss": ("commands.config:try_loss", "Try a loss function of your own, its gradient in float64 too."),
    "worker-command": ("commands.keygen:worker_command", "Print the command that starts a worker on another host."),
    "workers": ("commands.stop_and_drain:workers_command", "List the workers of a running run, or drain one."),
}
"""Commands with the module and name that define each, and what `prefixrl --help` says of it."""


class LateCommands(click.Group):
    """A group that imports a command when it is called, and turns errors into messages."""

    def list_commands(self, context: click.Context) -> list[str]:
        """Return the names of all commands."""
        return sorted(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        """Return a command, imported now."""
        if name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[name][0].partition(":")
        return cast("click.Command", getattr(importlib.import_module(f"prefixrl.deploy.{module}"), attribute))

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in self.list_commands(context)])

    def shell_complete(self, context: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete the name of a command."""
        if incomplete.startswith("-"):
            return super().shell_complete(context, incomplete)
        names = [name for name in self.list_commands(context) if name.startswith(incomplete)]
        return [CompletionItem(name, help=COMMANDS[name][1]) for name in names]

    def invoke(self, context: click.Context) -> Any:
        """Run a command; a user's mistake is one message and an exit code."""
        with exit_codes():
            return super().invoke(context)


@click.group(cls=LateCommands)
@click.version_option(package_name="prefixrl", message="prefixrl %(version)s")
def main() -> None:
    """Train small adapters that write the first tokens of a large frozen model's answers."""


if __name__ == "__main__":
    main()
