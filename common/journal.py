"""What must survive a crash: an append-only MessagePack stream of [checksum, record].

The writer syncs before anybody is told that a result is held. A torn last record (the machine died while it was written) is cut
off at the next start; a damaged record before the end is an error: silently skipping it would lose accepted work.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgpack
import msgspec
import xxhash

from prefixrl.common.errors import DataError
from prefixrl.common.records import JournalRecord

MAX_RECORD_BYTES = 1 << 30
_RECORD_START = b"\x92\xcf"
"""An array of two whose first element is a 64-bit checksum."""
_REMEDY = "restore the file or start a new run"


class Journal:
    """An open journal. `offset_bytes` is where the next record goes."""

    def __init__(self, path: Path) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._file = path.open("ab")
        self.offset_bytes = self._file.tell()

    def append(self, records: Sequence[JournalRecord]) -> None:
        """Write records and sync them to disk."""
        if not records:
            return
        for record in records:
            body = self._encoder.encode(record)
            self._file.write(msgpack.packb([xxhash.xxh3_64_intdigest(body), body]))
        self._file.flush()
        os.fdatasync(self._file.fileno())
        self.offset_bytes = self._file.tell()

    def close(self) -> None:
        """Close the file; everything appended is already on disk."""
        self._file.close()


def read(path: Path) -> Iterator[JournalRecord]:
    """Every intact record, oldest first.

    Raises:
        DataError: a record before the last one is damaged.
    """
    for record, _ in _scan(path):
        yield record


def recover(path: Path) -> Iterator[JournalRecord]:
    """Every intact record, oldest first; afterwards an incomplete last one is cut off, so that more can be appended.

    Raises:
        DataError: a record before the last one is damaged; nothing is cut off.
    """
    end = 0
    for record, after in _scan(path):
        yield record
        end = after
    if end < path.stat().st_size:
        with path.open("r+b") as file:
            file.truncate(end)
            os.fsync(file.fileno())


def _scan(path: Path) -> Iterator[tuple[JournalRecord, int]]:
    """Every intact record with the byte after it; ends before a torn last record."""
    decoder = msgspec.msgpack.Decoder(JournalRecord)
    size = path.stat().st_size
    with path.open("rb") as file:
        unpacker = msgpack.Unpacker(
            file, max_buffer_size=MAX_RECORD_BYTES, max_bin_len=MAX_RECORD_BYTES
        )
        while True:
            start = unpacker.tell()
            try:
                checksum, body = unpacker.unpack()
            except msgpack.OutOfData:
                _check_nothing_follows(path, start, "its length runs past the end of the file")
                return
            except (ValueError, TypeError) as error:
                raise DataError(f"{path} is damaged at byte {start}: {error}; {_REMEDY}") from None
            if not isinstance(body, bytes) or xxhash.xxh3_64_intdigest(body) != checksum:
                if unpacker.tell() != size:
                    raise DataError(
                        f"{path} is damaged at byte {start}: checksum differs; {_REMEDY}"
                    )
                _check_nothing_follows(path, start, "checksum differs")
                return
            try:
                record = decoder.decode(body)
            except ValueError as error:
                raise DataError(
                    f"{path} holds a record at byte {start} that this release cannot read: {error}"
                ) from None
            yield record, unpacker.tell()


def _check_nothing_follows(path: Path, start: int, reason: str) -> None:
    """Raise DataError when an intact record stands after an unreadable one: a damaged length looks like a torn end."""
    with path.open("rb") as file:
        file.seek(start)
        rest = file.read()
    at = 0
    while (at := rest.find(_RECORD_START, at + 1)) > 0:
        unpacker = msgpack.Unpacker(max_buffer_size=MAX_RECORD_BYTES, max_bin_len=MAX_RECORD_BYTES)
        unpacker.feed(memoryview(rest)[at:])
        try:
            checksum, body = unpacker.unpack()
        except (msgpack.OutOfData, ValueError, TypeError):
            continue
        if isinstance(body, bytes) and xxhash.xxh3_64_intdigest(body) == checksum:
            raise DataError(f"{path} is damaged at byte {start}: {reason}; {_REMEDY}")
