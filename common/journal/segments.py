"""The segments of a journal: names, records of one, compression of closed ones."""

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import msgpack
import msgspec
import xxhash
import zstandard

from prefixrl.common.errors import DataError
from prefixrl.common.host.process import sync
from prefixrl.common.journal.records import JournalRecord

PARTIAL = ".partial"
MAX_RECORD_BYTES = 1 << 30
_RECORD_START = b"\x92\xcf"
"""An array of two whose first element is a 64-bit checksum."""
_BYTES_OF = struct.Struct(">BI")
"""Head of so many bytes: the sign of a length of 32 bits, and the length."""
_REMEDY = "restore the file or start a new run"


def open_path(folder: Path, number: int) -> Path:
    """Return the path of a segment that is appended to."""
    return folder / f"{number:06d}.msgpack"


def closed_path(folder: Path, number: int) -> Path:
    """Return the path of a compressed segment."""
    return folder / f"{number:06d}.msgpack.zst"


def numbers(folder: Path) -> list[int]:
    """Return the numbers of a folder's segments, in order; DataError if one is missing."""
    names = {path.name.removesuffix(".zst").removesuffix(".msgpack") for path in folder.glob("*.msgpack*")}
    found = sorted(int(name) for name in names if name.isdigit())
    if found and (missing := sorted(set(range(found[0], found[-1])) - set(found))):
        raise DataError(f"{closed_path(folder, missing[0])} is missing; {_REMEDY}")
    # A closed segment is always followed by another; a reader may come while one is closed.
    if found and not any(open_path(folder, number).exists() for number in (found[-1], found[-1] + 1)):
        raise DataError(f"{open_path(folder, found[-1] + 1)} is missing: the end of the journal is lost; {_REMEDY}")
    return found


def pack(record: JournalRecord) -> bytes:
    """Return a record with its checksum, as it stands in a segment."""
    body = msgspec.msgpack.encode(record)
    # The checksum in all its eight bytes, however small it is: `_RECORD_START` is looked for.
    return b"".join((_RECORD_START, xxhash.xxh3_64_digest(body), _BYTES_OF.pack(0xC6, len(body)), body))


def scan(folder: Path, number: int, is_last: bool) -> Iterator[tuple[JournalRecord, int]]:
    """Yield every record of a segment with the offset behind it; only the last may be torn."""
    decoder = msgspec.msgpack.Decoder(JournalRecord)
    with _opened(folder, number) as (path, file):
        unpacker = msgpack.Unpacker(file, max_buffer_size=MAX_RECORD_BYTES, max_bin_len=MAX_RECORD_BYTES)
        while True:
            start = unpacker.tell()
            try:
                body = _unpacked(unpacker)
            except msgpack.OutOfData:
                if is_last:
                    _check_nothing_follows(path, start, "its length runs past the end of the file")
                return  # a closed segment that ends early is found by its length
            except (ValueError, TypeError, zstandard.ZstdError) as error:
                if not is_last or not _is_end(path, unpacker, error):
                    raise DataError(f"{path} is damaged at byte {start}: {error}; {_REMEDY}") from None
                _check_nothing_follows(path, start, str(error))
                return
            try:
                record = decoder.decode(body)
            except ValueError as error:
                reason = f"holds a record at byte {start} that this release cannot read: {error}"
                raise DataError(f"{path} {reason}") from None
            yield record, unpacker.tell()


class _WrongChecksum(ValueError):
    """A record whose bytes are not those that were written."""


def _unpacked(unpacker: msgpack.Unpacker) -> bytes:
    checksum, body = unpacker.unpack()
    if not isinstance(body, bytes) or xxhash.xxh3_64_intdigest(body) != checksum:
        raise _WrongChecksum("checksum differs")
    return body


def _is_end(path: Path, unpacker: msgpack.Unpacker, error: Exception) -> bool:
    """Return True for a wrong checksum of the very last record: it may be torn."""
    return isinstance(error, _WrongChecksum) and unpacker.tell() == path.stat().st_size


@contextmanager
def _opened(folder: Path, number: int) -> Iterator[tuple[Path, IO[bytes]]]:
    """Open a segment, compressed or not yet; one that is compressed meanwhile too."""
    raw, closed = open_path(folder, number), closed_path(folder, number)
    try:
        plain = raw.open("rb")
    except FileNotFoundError:
        with closed.open("rb") as packed, zstandard.ZstdDecompressor().stream_reader(packed) as stream:
            yield closed, stream
        return
    with plain:
        yield raw, plain


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
            _unpacked(unpacker)
        except (msgpack.OutOfData, ValueError, TypeError):
            continue
        raise DataError(f"{path} is damaged at byte {start}: {reason}; {_REMEDY}")


def compress_closed(folder: Path, last: int) -> None:
    """Compress every segment before `last`; OSError leaves the rest as they are."""
    for number in range(last):
        raw, closed = open_path(folder, number), closed_path(folder, number)
        if raw.exists():
            _compress(raw, closed)


def _compress(raw: Path, closed: Path) -> None:
    partial = closed.with_name(closed.name + PARTIAL)
    try:
        with raw.open("rb") as source, open(partial, "xb", opener=private) as target:
            zstandard.ZstdCompressor(write_checksum=True).copy_stream(source, target)
            target.flush()
            os.fsync(target.fileno())
        os.replace(partial, closed)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    sync(closed.parent)
    raw.unlink()


def private(name: str, flags: int) -> int:
    """Open a file for its owner alone: a journal holds gold answers and a secret."""
    return os.open(name, flags, 0o600)
