"""`prefixrl`: the operator's commands, loaded when they are called: --help is quick."""

import pkgutil
from typing import TYPE_CHECKING, Any, cast

import click

from prefixrl.common.config.foreign.plugins import check_names, load_plugin, plugins
from prefixrl.common.errors import ConfigError
from prefixrl.common.host.exit_codes import exit_codes
from prefixrl.deploy.commands import COMMANDS, GONE, groups_with_plugins

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


class LateCommands(click.Group):
    """A group that imports a command when it is called, and turns errors into messages."""

    def list_commands(self, context: click.Context) -> list[str]:
        """Return the names of all commands, those of installed packages included."""
        with exit_codes():
            check_names("commands", COMMANDS)
            return sorted({*COMMANDS, *plugins("commands")})

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        """Return a command, imported now."""
        if name in COMMANDS:
            return cast("click.Command", pkgutil.resolve_name(COMMANDS[name][0]))
        with exit_codes():
            plugin = plugins("commands").get(name)
            if plugin is None and name in GONE:
                raise ConfigError(f"there is no command {name!r} any more: {GONE[name]}")
            if plugin is None:
                return None
            return load_plugin(plugin, click.Command, "a click.Command")

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands, group by group."""
        self.list_commands(context)
        for title, group in groups_with_plugins().items():
            with formatter.section(title):
                formatter.write_dl([(name, sentence) for name, (_, sentence) in group.items()])

    def shell_complete(self, context: click.Context, incomplete: str) -> "list[CompletionItem]":
        """Complete the name of a command."""
        from click.shell_completion import CompletionItem

        if incomplete.startswith("-"):
            return super().shell_complete(context, incomplete)
        return [
            CompletionItem(name, help=sentence)
            for group in groups_with_plugins().values()
            for name, (_, sentence) in sorted(group.items())
            if name.startswith(incomplete)
        ]

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
