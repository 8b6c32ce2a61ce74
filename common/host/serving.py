"""Servers as child processes: `python -m MODULE PARENT DIRECTORY OPTIONS`, the options as JSON."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from prefixrl.common.host import process
from prefixrl.common.host.exit_codes import exit_codes
from prefixrl.common.host.log_lines import LineBudget

Options = TypeVar("Options", bound=msgspec.Struct)


def command(module: str, directory: Path, options: msgspec.Struct) -> list[str]:
    """Return the command of a server that does not outlive this process."""
    return [
        sys.executable,
        "-m",
        module,
        str(os.getpid()),
        str(directory),
        msgspec.json.encode(options).decode(),
    ]


def run(
    name: str, kind: type[Options], serve: Callable[[Path, Options, Callable[[], bool]], None]
) -> None:
    """Be the server of such a command: call `serve`, which returns once its last argument returns True."""
    parent, directory, options = sys.argv[1:]
    process.die_with_parent(int(parent))
    process.start_logging(name, LineBudget())
    stop = process.stop_event([process.END_SIGNAL])
    with exit_codes():
        process.allow_many_files()
        serve(Path(directory), msgspec.json.decode(options, type=kind), stop.is_set)
