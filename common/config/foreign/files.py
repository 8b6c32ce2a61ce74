"""Files that others wrote, or that may be damaged: whatever is wrong with one is one sentence that names it."""

import stat
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from prefixrl.common.errors import ConfigError, UserError

T = TypeVar("T")
FAULTS = (OSError, ValueError, OverflowError, RecursionError, MemoryError, msgspec.MsgspecError)
"""Faults that reading, and decoders of whatever form, raise over a file."""
REASON_CHARS = 500
_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


def reason(error: BaseException) -> str:
    """Return what is wrong with a file, in words."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, MemoryError):
        return "it needs more memory than there is"
    return ((isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__)[
        :REASON_CHARS
    ]


def kind_of(path: Path) -> str:
    """Return what a path is in place of a file, "" for a file; a pipe or device would be read for ever."""
    mode = path.stat().st_mode
    return "" if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "a socket")


def read_bytes(path: Path, called: str = "", error: type[UserError] = ConfigError) -> bytes:
    """Return the content of a file, which messages call so; raise the error where it cannot be read."""
    try:
        if kind := kind_of(path):
            raise OSError(0, f"it is {kind}, not a file")
        return path.read_bytes()
    except FAULTS as fault:
        raise error(f"cannot read {called} {path}: {reason(fault)}".replace("  ", " ")) from None


def read_json(
    path: Path, kind: type[T], error: type[UserError] = ConfigError, remedy: str = "restore it"
) -> T:
    """Return a file's document; raise the error where it is damaged, or not of this kind."""
    content = read_bytes(path, error=error)
    with explained(f"{path} is damaged", error, remedy):
        return msgspec.json.decode(content, type=kind)


def read_toml(path: Path, called: str) -> dict[str, Any]:
    """Return the document of a TOML file that the user wrote; raises ConfigError."""
    content = read_bytes(path, called)
    with explained(f"{path} is not valid TOML"):
        return tomllib.loads(content.decode())


@contextmanager
def explained(fault: str, error: type[Exception] = ConfigError, remedy: str = "") -> Iterator[None]:
    """Turn whatever a decoder or library raises over a file into one sentence; panics of Rust code are no Exception."""
    try:
        yield
    except UserError:
        raise
    except BaseException as found:
        if not isinstance(found, Exception) and type(found).__name__ != "PanicException":
            raise
        raise error(f"{fault}: {reason(found)}{'; ' + remedy if remedy else ''}") from found
