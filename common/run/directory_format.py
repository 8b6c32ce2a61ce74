"""The format of a run directory (journal, records, config), which every reader checks first."""

from importlib.metadata import version
from pathlib import Path

import msgspec

from prefixrl.common.errors import ConfigError
from prefixrl.common.host.process import write_atomically

FORMAT = 3
"""The only format that this release reads and writes. Format 1 had no file that names it."""
FORMAT_FILE = "format.json"


class DirectoryFormat(msgspec.Struct, frozen=True):
    """The content of `format.json`."""

    format: int
    release: str
    """Release of the package that wrote the directory."""


def write_format(directory: Path) -> None:
    """Mark a directory as one of this release; to be called before `config.json` is written."""
    mark = DirectoryFormat(FORMAT, version("prefixrl"))
    write_atomically(directory / FORMAT_FILE, msgspec.json.encode(mark).decode() + "\n")


def check_holds_run(directory: Path) -> None:
    """Raise ConfigError unless a directory holds a run that this release can read."""
    check_format(directory)
    known = directory / "config.json"
    if not known.exists():
        why = f"no file {known}" if directory.exists() else "there is no such folder"
        raise ConfigError(f"{directory} holds no run ({why})")


def check_format(directory: Path) -> None:
    """Raise ConfigError where a directory holds a run of another release; change nothing."""
    known = directory / FORMAT_FILE
    holds_a_run = (directory / "config.json").exists()  # first: a learner that starts now writes the format before it
    if known.exists():
        try:
            found = msgspec.json.decode(known.read_bytes(), type=DirectoryFormat)
        except msgspec.MsgspecError as error:
            raise ConfigError(
                f"{known} cannot be read: {error}; expected an object with format and release; restore it, choose "
                "another directory, or start anew (prefixrl launch --fresh)"
            ) from None
    elif holds_a_run:
        found = DirectoryFormat(1, "0.1")
    else:
        return
    if found.format != FORMAT:
        raise ConfigError(
            f"{directory} holds a run of format {found.format}, of release {found.release}; this release "
            f"({version('prefixrl')}) reads format {FORMAT} only; finish the run with release {found.release}, choose "
            "another directory (--set directory=...), or start anew (prefixrl launch --fresh)"
        )
