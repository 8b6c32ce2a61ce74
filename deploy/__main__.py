"""`prefixrl`: the operator's commands, loaded when they are called: --help is quick."""

import importlib
import tomllib
from pathlib import Path
from typing import Any, cast

import click
from click.shell_completion import CompletionItem

from prefixrl.common.host.process import exit_codes

_TABLE = Path(__file__).parent / "commands" / "tables" / "commands.toml"
COMMANDS: dict[str, list[str]] = tomllib.loads(_TABLE.read_text(encoding="utf-8"))
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
        return cast(
            "click.Command",
            getattr(importlib.import_module(f"prefixrl.deploy.{module}"), attribute),
        )

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
    """Train small adapters that begin the answers of a large frozen model. First: `prefixrl example arithmetic`."""


if __name__ == "__main__":
    main()
