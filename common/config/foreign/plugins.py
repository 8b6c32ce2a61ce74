"""Packages of others that add members at the seams of this software, found by their entry points.

A *seam* is a list of records that has an entry-point group of the same name. A package adds a member by one line of
its pyproject.toml, and `pip install` is all that a user does:

    [project.entry-points."prefixrl.trackers"]
    my_board = "my_package.board:TRACKER"

The name on the left is the one that a run file or a command line uses; it may not be that of a built-in member. The
object on the right is imported only where a run names it. What it must be, each seam says beside its own record.
"""

import sys
from collections.abc import Collection, Iterable
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar, get_args

from prefixrl.common.errors import ConfigError

Seam = Literal["objectives", "engines", "verifiers", "rewards", "trackers", "commands"]
SEAMS: tuple[Seam, ...] = get_args(Seam)
PACKAGE = "prefixrl"

Member = TypeVar("Member")


class Plugin(NamedTuple):
    """One member that an installed package adds."""

    seam: Seam
    name: str
    """The name that users write."""
    target: str
    """`module:attribute` of the member."""
    package: str
    """The package and its version, for example `my-board 0.3`."""

    def __str__(self) -> str:
        return f"{self.seam}: {self.name} = {self.target} of {self.package}"


@cache
def _is_any_installed() -> bool:
    """Return True if any package adds a member; `prefixrl --help` has no time for the general search, 30 ms."""
    header = f"[{PACKAGE}.".encode()
    return any(
        header in file.read_bytes()
        for folder in sys.path
        for file in Path(folder).glob("*-info/entry_points.txt")
    )


@cache
def plugins(seam: Seam) -> dict[str, Plugin]:
    """Return the members that installed packages add at a seam, by name; imports none of them.

    Raises:
        ConfigError: two packages add a member of the same name.
    """
    if not _is_any_installed():
        return {}
    from importlib.metadata import entry_points

    by_name: dict[str, Plugin] = {}
    for entry_point in entry_points(group=f"{PACKAGE}.{seam}"):
        distribution = entry_point.dist
        package = f"{distribution.name} {distribution.version}" if distribution else "a package"
        plugin = Plugin(seam, entry_point.name, entry_point.value, package)
        # An editable install of a package may be listed twice.
        if by_name.setdefault(plugin.name, plugin) != plugin:
            raise ConfigError(
                f"two packages add {plugin.name!r} to {PACKAGE}.{seam}: {by_name[plugin.name].package} and "
                f"{plugin.package}; uninstall one of them"
            )
    return dict(sorted(by_name.items()))


def all_plugins() -> list[Plugin]:
    """Return the members that installed packages add at all seams."""
    return [plugin for seam in SEAMS for plugin in plugins(seam).values()]


def check_names(seam: Seam, built_in: Collection[str]) -> None:
    """Raise ConfigError if a package adds a member that has the name of a built-in one."""
    for name in built_in:
        if plugin := plugins(seam).get(name):
            raise ConfigError(
                f"{plugin.package} adds {name!r} to {PACKAGE}.{seam}, which is the name of a built-in member; "
                f"uninstall the package, or ask its author for another name"
            )


def load_plugin(plugin: Plugin, kind: type[Member], expected: str) -> Member:
    """Import a member and return it.

    Args:
        kind: class of the members of the seam; `object` where the caller checks them.
        expected: what a member is, in words, for the error.

    Raises:
        ConfigError: the import failed, or the object is no such member; the package is named.
    """
    from importlib.metadata import EntryPoint

    place = f"{plugin.package} adds {plugin.name!r} to {PACKAGE}.{plugin.seam}"
    try:
        member = EntryPoint(plugin.name, plugin.target, f"{PACKAGE}.{plugin.seam}").load()
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{place}, but {plugin.target} cannot be loaded: {type(error).__name__}: {error!s:.500}; "
            f"update or uninstall the package"
        ) from error
    if not isinstance(member, kind):
        raise ConfigError(
            f"{place}, but {plugin.target} is {member!r:.100}; expected {expected}; "
            f"update or uninstall the package"
        )
    return member


def names(seam: Seam, built_in: Iterable[str]) -> tuple[str, ...]:
    """Return the names that users may write at a seam: the built-in ones, then those of packages."""
    return (*built_in, *plugins(seam))
