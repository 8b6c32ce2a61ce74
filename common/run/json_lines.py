"""Files of lines, mostly of JSON, of which the last may be incomplete; files of one document."""

import io
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from prefixrl.common.config.foreign.files import FAULTS, read_json
from prefixrl.common.errors import DataError
from prefixrl.common.host.process import write_atomically

log = logging.getLogger(__name__)

TAIL_BYTES = 2**20
BLOCK_BYTES = 2**19

Line = TypeVar("Line", bound=msgspec.Struct)


def read(path: Path, kind: type[Line]) -> list[Line]:
    """Return every whole line, none without a file; DataError for a damaged or strange one."""
    return list(each(path, kind))


def each(path: Path, kind: type[Line]) -> Iterator[Line]:
    """Yield what `read` returns, a line at a time."""
    if not path.exists():
        return
    decoder = msgspec.json.Decoder(kind)
    with path.open("rb") as file:
        for number, text in enumerate(file, start=1):
            if not text.strip():
                continue
            try:
                yield decoder.decode(text)
            except FAULTS as error:
                # A line that was cut is no JSON; a whole line with other fields is of another kind.
                if next(file, None) is not None or isinstance(error, msgspec.ValidationError):
                    raise DataError(
                        f"{path} line {number} is damaged: {error}; repair or remove the line"
                    ) from None
                log.warning("%s: left out the last line, which is incomplete: %s", path, error)


def newest(path: Path, kind: type[Line], count: int = 1) -> list[Line]:
    """Return the last whole lines of a file that may be being written, in order, from its end alone."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        tail = _tail_of(file)
    texts = tail[: tail.rfind(b"\n") + 1].splitlines()[-count:]
    try:
        return [msgspec.json.decode(text, type=kind) for text in texts]
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return []


class AddedLines:
    """The lines that a file gets, read once each; all of them again where it is another file, or a shorter one."""

    def __init__(
        self, path: Path, offset: int = 0, begin_anew: Callable[[], None] = lambda: None
    ) -> None:
        """Read from `offset` on; call `begin_anew` before the first line of another file, or where it is gone."""
        self.path = path
        self.offset = offset
        self._begin_anew = begin_anew
        self._number = 0

    def blocks(self) -> Iterator[bytes]:
        """Yield whole lines that were added, many together; those of the block at which the caller fails come again."""
        if not self.path.exists():
            if self.offset:
                self.offset = 0
                self._begin_anew()
            return
        with self.path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_size < self.offset or status.st_ino != (self._number or status.st_ino):
                self.offset = 0
                self._begin_anew()
            self._number = status.st_ino
            file.seek(self.offset)
            while True:
                block = file.read(BLOCK_BYTES) + file.readline()
                whole = block[: block.rfind(b"\n") + 1]
                if not whole:
                    break
                yield whole
                # Only now: a caller that fails gets these lines again.
                self.offset += len(whole)
                file.seek(self.offset)


def document(path: Path, kind: type[Line]) -> Line | None:
    """Return the one document of a file, None without a file; raise DataError for a damaged one."""
    if not path.exists():
        return None
    return read_json(path, kind, DataError, "restore it, or remove it if it can be missed")


def write(path: Path, rows: Iterable[msgspec.Struct]) -> None:
    """Replace a file by these rows."""
    write_atomically(path, msgspec.json.Encoder().encode_lines(rows))


def append(path: Path, rows: Iterable[msgspec.Struct]) -> None:
    """Write rows at the end of a file, less a last line that was cut: all, or none where it raises OSError."""
    with path.open("a+b", buffering=0) as file:
        _end_last_line(file)
        before = file.seek(0, os.SEEK_END)
        remaining = memoryview(msgspec.json.Encoder().encode_lines(rows))
        try:
            while remaining:
                remaining = remaining[file.write(remaining) :]
        except OSError:
            file.truncate(before)
            raise


def _tail_of(file: BinaryIO | io.FileIO) -> bytes:
    """Return the end of a file, as far as it may belong to its newest lines."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - TAIL_BYTES))
    return file.read()


def _end_last_line(file: io.FileIO) -> None:
    """Give the last line of a file its line end, or remove it if it was cut."""
    line = _tail_of(file).rpartition(b"\n")[2]
    if not line:
        return
    try:
        msgspec.json.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        file.truncate(file.tell() - len(line))
    else:
        file.write(b"\n")
