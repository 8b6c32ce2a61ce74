"""The journal: an append-only MessagePack stream of [checksum, record].

The writer syncs before a result is acknowledged. A torn last record (the machine died while it was written) is cut off
at the next start. A damaged record before the end is an error: skipping it silently would lose accepted work.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgpack
import msgspec
import xxhash

from prefixrl.common.errors import DataError
from prefixrl.common.run.records import JournalRecord

MAX_RECORD_BYTES = 1 << 30
_RECORD_START = b"\x92\xcf"
"""An array of two whose first element is a 64-bit checksum."""
_REMEDY = "restore the file or start a new run"


class Journal:
    """An open journal. The next record goes to `offset_bytes`."""

    def __init__(self, path: Path) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        path.touch(mode=0o600)  # it holds gold answers, and the secret that proves who held a task
        self._file = path.open("ab", buffering=0)
        self.offset_bytes = self._file.tell()

    def append(self, records: Sequence[JournalRecord]) -> None:
        """Write records and sync them to disk: all, or none where it raises OSError."""
        if not records:
            return
        bodies = [self._encoder.encode(record) for record in records]
        whole = b"".join(msgpack.packb([xxhash.xxh3_64_intdigest(body), body]) for body in bodies)
        rest = memoryview(whole)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
            os.fdatasync(self._file.fileno())
        except OSError:
            # What the next append brings would stand behind half a record, and nobody could read on.
            os.ftruncate(self._file.fileno(), self.offset_bytes)
            raise
        self.offset_bytes += len(whole)

    def close(self) -> None:
        """Close the file; everything appended is already on disk."""
        self._file.close()


def read(path: Path) -> Iterator[JournalRecord]:
    """Yield every intact record; raise DataError where one before the last is damaged."""
    for record, _ in _scan(path):
        yield record


def recover(path: Path) -> Iterator[JournalRecord]:
    """Yield as `read`, then cut off an incomplete last record, to append more."""
    end = 0
    for record, after in _scan(path):
        yield record
        end = after
    if end < path.stat().st_size:
        with path.open("r+b") as file:
            file.truncate(end)
            os.fsync(file.fileno())


def _scan(path: Path) -> Iterator[tuple[JournalRecord, int]]:
    """Yield every intact record with the offset behind it; end before a torn last record."""
    decoder = msgspec.msgpack.Decoder(JournalRecord)
    size = path.stat().st_size
    with path.open("rb") as file:
        unpacker = msgpack.Unpacker(file, max_buffer_size=MAX_RECORD_BYTES, max_bin_len=MAX_RECORD_BYTES)
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
                    raise DataError(f"{path} is damaged at byte {start}: checksum differs; {_REMEDY}")
                _check_nothing_follows(path, start, "checksum differs")
                return
            try:
                record = decoder.decode(body)
            except ValueError as error:
                reason = f"holds a record at byte {start} that this release cannot read: {error}"
                raise DataError(f"{path} {reason}") from None
            yield record, unpacker.tell()


def _check_nothing_follows(path: Path, start: int, reason: str) -> None:
    """Raise DataError where an intact record follows an unreadable one: its length is damaged."""
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
