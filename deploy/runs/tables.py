"""Tables of plain texts, for a terminal or a file."""

import sys
from collections.abc import Iterable, Mapping

from rich import box
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from prefixrl.common.host.exit_codes import printable

PIPE_CHARS = 200
"""A pipe or file has no width of its own, and nothing may be cut there."""


def console(is_on_stderr: bool = False) -> Console:
    """Return a console as wide as the terminal; where there is none, wide enough for every row."""
    stream = sys.stderr if is_on_stderr else sys.stdout
    return Console(stderr=is_on_stderr, width=None if stream.isatty() else PIPE_CHARS)


def cell(text: str) -> Text:
    """Return a worker's text as it is: rich would read markup in it."""
    return Text(printable(text))


def figure(value: float | None) -> str:
    """Return a share or a mean for a table, "" for None."""
    return "" if value is None else f"{value:.3f}"


def interval(ends: tuple[float, float]) -> str:
    """Return the ends of an interval for a table."""
    return "{:.3f} to {:.3f}".format(*ends)


def counted(histogram: Mapping[str, int]) -> str:
    """Return counts by name, as `0: 3, 1: 2`."""
    return ", ".join(f"{name}: {count}" for name, count in histogram.items())


def table_of(columns: Iterable[str], rows: Iterable[Iterable[str]], no_wrap: bool = False) -> Table:
    """Return a table of plain texts; `no_wrap`: cells are not folded."""
    table = Table(*(Column(cell(name), no_wrap=no_wrap) for name in columns), box=box.SIMPLE_HEAD)
    for row in rows:
        table.add_row(*map(cell, row))
    return table
