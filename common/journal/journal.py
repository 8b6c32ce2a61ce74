"""The journal: MessagePack streams of [checksum, record], one after another in a folder.

    000000.msgpack.zst   000001.msgpack.zst   000002.msgpack
    closed, compressed   closed, compressed   open: records are appended here

A long segment is closed: the next one begins with all that a ledger is rebuilt from, and appears whole, by a rename. A
torn last record (the machine died meanwhile) is cut off at the next start; any other damage is an error.
"""

import contextlib
import logging
import os
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import msgpack
import msgspec
import xxhash
import zstandard

from prefixrl.common.errors import DataError
from prefixrl.common.host.process import sync
from prefixrl.common.journal.crash_points import crash_point
from prefixrl.common.journal.records import JournalRecord, SegmentStart

log = logging.getLogger(__name__)

FOLDER = "journal"
SEGMENT_BYTES = 64 << 20
"""Length at which a segment is closed: read again within seconds."""
START_SHARE = 4
"""Least length of a segment, in lengths of its start: large live groups are written rarely."""
PARTIAL = ".partial"
MAX_RECORD_BYTES = 1 << 30
_RECORD_START = b"\x92\xcf"
"""First bytes of every record: an array of two, whose first element is a 64-bit checksum."""
_BYTES_OF = struct.Struct(">BI")
"""Head of the bytes of a record: MessagePack's mark of a 32-bit length, and the length."""
_REMEDY = "restore the file or start a new run"


class Journal:
    """An open journal; one process writes it at a time."""

    def __init__(self, folder: Path, segment_bytes: int = SEGMENT_BYTES) -> None:
        """Open the newest segment of a folder, which is made if it is missing."""
        self._folder = folder
        self._segment_bytes = segment_bytes
        folder.mkdir(parents=True, exist_ok=True)
        self._names = os.open(folder, os.O_RDONLY)
        for partial in folder.glob(f"*{PARTIAL}"):
            partial.unlink()
        self._number = max(numbers(folder), default=0)
        self._before_bytes = self._start_bytes = 0
        self._file = private(
            str(open_path(folder, self._number)), os.O_WRONLY | os.O_CREAT | os.O_APPEND
        )
        self._offset_bytes = os.fstat(self._file).st_size
        first, end = next(scan(folder, self._number, is_last=True), (None, 0))
        if isinstance(first, SegmentStart):
            self._before_bytes = first.before_bytes
            self._start_bytes = end
        self._compressor = self._compress()

    @property
    def size_bytes(self) -> int:
        """Length of all segments, uncompressed."""
        return self._before_bytes + self._offset_bytes

    @property
    def is_long(self) -> bool:
        """True when the open segment is to be closed."""
        return self._offset_bytes > max(self._segment_bytes, START_SHARE * self._start_bytes)

    def append(self, records: Sequence[JournalRecord]) -> None:
        """Write records and sync them to disk: all, or none where it raises OSError."""
        if not records:
            return
        whole = b"".join(map(pack, records))
        remaining = memoryview(whole)
        crash_point("journal.begun")
        try:
            while remaining:
                remaining = remaining[os.write(self._file, remaining) :]
            crash_point("journal.written")
            os.fdatasync(self._file)
        except OSError:
            # No record behind half a record could be read.
            os.ftruncate(self._file, self._offset_bytes)
            raise
        self._offset_bytes += len(whole)
        crash_point("journal.synced")

    def check(self) -> None:
        """Raise DataError where the open segment was removed or replaced: no later start would read what it holds."""
        path = open_path(self._folder, self._number)
        open_file = os.fstat(self._file)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if os.path.samestat(path.stat(), open_file):
                return
        raise DataError(
            f"{path} was removed or replaced while the run goes on, which nothing can resume without it: the run ends; "
            f"start a new one"
        )

    def begin_segment(self, start: SegmentStart) -> None:
        """Close the open segment and begin the next; OSError: the open one stays open."""
        assert start.before_bytes == self.size_bytes
        path = open_path(self._folder, self._number + 1)
        whole = pack(start)
        partial = path.with_name(path.name + PARTIAL)
        # After the rename nothing may fail: later records of the old segment would never be read.
        begun = private(str(partial), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND)
        try:
            with open(begun, "wb", closefd=False) as file:
                file.write(whole)
            os.fsync(begun)
            os.replace(partial, path)
        except OSError:
            os.close(begun)
            partial.unlink(missing_ok=True)
            raise
        # The new name must outlast a power cut, or records behind it would be lost with it.
        os.fsync(self._names)
        crash_point("journal.segment")
        os.close(self._file)
        self._file = begun
        self._number += 1
        self._offset_bytes = len(whole)
        self._before_bytes = start.before_bytes
        self._start_bytes = len(whole)
        if not self._compressor.is_alive():
            self._compressor = self._compress()

    def _compress(self) -> threading.Thread:
        """Compress closed segments beside the writer, whose turn would wait for seconds."""
        thread = threading.Thread(
            target=_compress_closed, args=(self._folder, self._number), daemon=True
        )
        thread.start()
        return thread

    def close(self) -> None:
        """Close the file; everything appended is already on disk."""
        self._compressor.join()
        os.close(self._file)
        os.close(self._names)


def _compress_closed(folder: Path, last: int) -> None:
    try:
        for number in range(last):
            if (raw := open_path(folder, number)).exists():
                _compress(raw, closed_path(folder, number))
    except OSError as error:
        log.warning(
            "closed segments of %s stay uncompressed until the next is closed: %s", folder, error
        )


def exists(folder: Path) -> bool:
    """Return True if a folder holds a journal."""
    return bool(numbers(folder))


def read(folder: Path, iteration: int | None = None) -> Iterator[JournalRecord]:
    """Yield the records of all segments, without a torn last record; raises DataError.

    With `iteration`, segments that ended before it are left out.
    """
    segments = numbers(folder)
    if iteration is not None and segments:
        segments = _since(folder, segments, iteration)
    elif segments and segments[0] != 0:
        raise DataError(
            f"{closed_path(folder, 0)} is missing: restore it; the run itself goes on without it"
        )
    for record, _ in _records(folder, segments):
        yield record


def recover(folder: Path, iteration: int) -> Iterator[JournalRecord]:
    """Yield what rebuilds a ledger at an iteration; then cut off a torn last record."""
    segments = _since(folder, numbers(folder), iteration)
    end = 0
    for record, after in _records(folder, segments):
        yield record
        end = after
    path = open_path(folder, segments[-1])
    if (torn_bytes := path.stat().st_size - end) > 0:
        # The machine died, or the disk damaged it. Its groups were not trained; they are sampled again.
        log.warning("%s ends in an incomplete record: %d bytes are cut off", path, torn_bytes)
        with path.open("r+b") as file:
            file.truncate(end)
            os.fsync(file.fileno())


def _since(folder: Path, segments: list[int], iteration: int) -> list[int]:
    """Return the segments from the newest that begins at or before an iteration."""
    for at in reversed(range(len(segments))):
        if _begins_by(folder, segments[at], iteration):
            return segments[at:]
    raise DataError(
        f"{closed_path(folder, segments[0] - 1)} is missing: every segment that is there begins after iteration "
        f"{iteration}, whose groups are asked for; restore it. A run with a newest checkpoint of that iteration "
        f"cannot go on without it"
    )


def _begins_by(folder: Path, number: int, iteration: int) -> bool:
    if number == 0:
        return True  # it begins with the run; its first record may be torn
    first, _ = next(scan(folder, number, is_last=False), (None, 0))
    return isinstance(first, SegmentStart) and first.ledger.completed <= iteration


def _records(folder: Path, segments: Sequence[int]) -> Iterator[tuple[JournalRecord, int]]:
    """Yield the records of successive segments with the offset behind each in its segment."""
    length = None
    for number in segments:
        before_bytes = 0
        end = 0
        for record, after in scan(folder, number, is_last=number == segments[-1]):
            if end == 0 and number > 0:
                before_bytes = _before_bytes(folder, number, record, length)
            end = after
            yield record, end
        if end == 0 and number > 0:
            raise DataError(
                f"{open_path(folder, number)} is empty; restore the file or start a new run"
            )
        length = before_bytes + end


def _before_bytes(folder: Path, number: int, first: JournalRecord, length: int | None) -> int:
    if not isinstance(first, SegmentStart):
        raise DataError(
            f"{open_path(folder, number)} does not begin with the state of the run; restore the file"
        )
    if length is not None and first.before_bytes != length:
        raise DataError(
            f"the segments before {open_path(folder, number)} have {length:,} bytes of {first.before_bytes:,}: the end "
            "of one is lost; restore it or start a new run"
        )
    return first.before_bytes


def open_path(folder: Path, number: int) -> Path:
    """Return the path of a segment that is appended to."""
    return folder / f"{number:06d}.msgpack"


def closed_path(folder: Path, number: int) -> Path:
    """Return the path of a compressed segment."""
    return folder / f"{number:06d}.msgpack.zst"


def numbers(folder: Path) -> list[int]:
    """Return the numbers of a folder's segments, in order; DataError if one is missing."""
    names = {
        path.name.removesuffix(".zst").removesuffix(".msgpack")
        for path in folder.glob("*.msgpack*")
    }
    segments = sorted(int(name) for name in names if name.isdigit())
    if segments and (missing := sorted(set(range(segments[0], segments[-1])) - set(segments))):
        raise DataError(f"{closed_path(folder, missing[0])} is missing; {_REMEDY}")
    # A closed segment is always followed by another; a reader may come while one is closed.
    if segments and not any(
        open_path(folder, number).exists() for number in (segments[-1], segments[-1] + 1)
    ):
        raise DataError(
            f"{open_path(folder, segments[-1] + 1)} is missing: the end of the journal is lost; {_REMEDY}"
        )
    return segments


def pack(record: JournalRecord) -> bytes:
    """Return a record with its checksum, as it stands in a segment."""
    body = msgspec.msgpack.encode(record)
    # The checksum in all its eight bytes, however small it is: `_RECORD_START` is looked for.
    return b"".join(
        (_RECORD_START, xxhash.xxh3_64_digest(body), _BYTES_OF.pack(0xC6, len(body)), body)
    )


def scan(folder: Path, number: int, is_last: bool) -> Iterator[tuple[JournalRecord, int]]:
    """Yield every record of a segment with the offset behind it; only the last may be torn."""
    decoder = msgspec.msgpack.Decoder(JournalRecord)
    with _opened(folder, number) as (path, file):
        unpacker = msgpack.Unpacker(
            file, max_buffer_size=MAX_RECORD_BYTES, max_bin_len=MAX_RECORD_BYTES
        )
        while True:
            start = unpacker.tell()
            try:
                body = _unpacked(unpacker)
            except msgpack.OutOfData:
                if is_last:
                    _check_nothing_follows(path, start, "its length runs past the end of the file")
                return  # a closed segment that ends early is found by its length
            except (ValueError, TypeError, zstandard.ZstdError) as error:
                # A wrong checksum of the very last record may be a torn one.
                is_end = (
                    isinstance(error, _WrongChecksum) and unpacker.tell() == path.stat().st_size
                )
                if not (is_last and is_end):
                    raise DataError(
                        f"{path} is damaged at byte {start}: {error}; {_REMEDY}"
                    ) from None
                _check_nothing_follows(path, start, str(error))
                return
            try:
                record = decoder.decode(body)
            except ValueError as error:
                reason = f"holds a record at byte {start} that this release cannot read: {error}"
                raise DataError(f"{path} {reason}") from None
            yield record, unpacker.tell()


class _WrongChecksum(ValueError):
    """The checksum of a record does not match its bytes."""


def _unpacked(unpacker: msgpack.Unpacker) -> bytes:
    checksum, body = unpacker.unpack()
    if not isinstance(body, bytes) or xxhash.xxh3_64_intdigest(body) != checksum:
        raise _WrongChecksum("checksum differs")
    return body


@contextmanager
def _opened(folder: Path, number: int) -> Iterator[tuple[Path, IO[bytes]]]:
    raw = open_path(folder, number)
    closed = closed_path(folder, number)
    try:
        plain = raw.open("rb")
    except FileNotFoundError:
        with (
            closed.open("rb") as packed,
            zstandard.ZstdDecompressor().stream_reader(packed) as stream,
        ):
            yield closed, stream
        return
    with plain:
        yield raw, plain


def _check_nothing_follows(path: Path, start: int, reason: str) -> None:
    """Raise DataError where an intact record follows an unreadable one: its length is damaged."""
    with path.open("rb") as file:
        file.seek(start)
        remaining = file.read()
    at = 0
    while (at := remaining.find(_RECORD_START, at + 1)) > 0:
        unpacker = msgpack.Unpacker(max_buffer_size=MAX_RECORD_BYTES, max_bin_len=MAX_RECORD_BYTES)
        unpacker.feed(memoryview(remaining)[at:])
        try:
            _unpacked(unpacker)
        except (msgpack.OutOfData, ValueError, TypeError):
            continue
        raise DataError(f"{path} is damaged at byte {start}: {reason}; {_REMEDY}")


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
