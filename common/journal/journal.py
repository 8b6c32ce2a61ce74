"""The journal: MessagePack streams of [checksum, record], one after another in a folder.

    000000.msgpack.zst   000001.msgpack.zst   000002.msgpack
    closed, compressed   closed, compressed   open: records are appended here

The writer syncs before a result is acknowledged. A segment that has grown long is closed: the next one begins with all
that a ledger is rebuilt from, and appears whole, by a rename. So a restart reads the last segment or two; who wants the
whole history reads all of them.

A torn last record (the machine died while it was written) is cut off at the next start. A damaged record before the
end, a closed segment that ends early and one that is missing are errors: skipping them silently would lose accepted
work.
"""

import logging
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from prefixrl.common.errors import DataError
from prefixrl.common.host.process import sync
from prefixrl.common.journal import segments
from prefixrl.common.journal.crash_points import crash_point
from prefixrl.common.journal.records import JournalRecord, SegmentStart
from prefixrl.common.journal.segments import PARTIAL, closed_path, open_path, pack, private, scan

log = logging.getLogger(__name__)

FOLDER = "journal"
SEGMENT_BYTES = 64 << 20
"""Length at which a segment is closed: read again within seconds."""
START_SHARE = 4
"""A segment is at least so many times as long as its start, or large live groups would be written again and again."""


class Journal:
    """An open journal; one process writes it at a time."""

    def __init__(self, folder: Path, segment_bytes: int = SEGMENT_BYTES) -> None:
        """Open the newest segment of a folder, which is made if it is missing."""
        self._folder, self._segment_bytes = folder, segment_bytes
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(f"*{PARTIAL}"):
            left.unlink()
        self._number = max(segments.numbers(folder), default=0)
        self._before_bytes = self._start_bytes = 0
        self._open()
        first, end = next(scan(folder, self._number, is_last=True), (None, 0))
        if isinstance(first, SegmentStart):
            self._before_bytes, self._start_bytes = first.before_bytes, end
        self._compressor = self._compress()

    def _open(self) -> None:
        self._file = private(str(open_path(self._folder, self._number)), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._offset_bytes = os.fstat(self._file).st_size

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
        rest = memoryview(whole)
        crash_point("journal.begun")
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
            crash_point("journal.written")
            os.fdatasync(self._file)
        except OSError:
            # What the next append brings would stand behind half a record, and nobody could read on.
            os.ftruncate(self._file, self._offset_bytes)
            raise
        self._offset_bytes += len(whole)
        crash_point("journal.synced")

    def begin_segment(self, start: SegmentStart) -> None:
        """Close the open segment and begin the next; OSError: the open one stays open."""
        assert start.before_bytes == self.size_bytes
        path, whole = open_path(self._folder, self._number + 1), pack(start)
        partial = path.with_name(path.name + PARTIAL)
        try:
            with open(partial, "xb", opener=private) as file:
                file.write(whole)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
        sync(self._folder)
        crash_point("journal.segment")
        os.close(self._file)
        self._number += 1
        self._before_bytes, self._start_bytes = start.before_bytes, len(whole)
        self._open()
        if not self._compressor.is_alive():
            self._compressor = self._compress()

    def _compress(self) -> threading.Thread:
        """Compress closed segments beside the writer, whose turn would wait for seconds."""
        thread = threading.Thread(target=_compress_closed, args=(self._folder, self._number), daemon=True)
        thread.start()
        return thread

    def close(self) -> None:
        """Close the file; everything appended is already on disk."""
        self._compressor.join()
        os.close(self._file)


def _compress_closed(folder: Path, last: int) -> None:
    try:
        segments.compress_closed(folder, last)
    except OSError as error:
        log.warning("closed segments of %s stay uncompressed until the next is closed: %s", folder, error)


def exists(folder: Path) -> bool:
    """Return True if a folder holds a journal."""
    return bool(segments.numbers(folder))


def read(folder: Path, iteration: int | None = None) -> Iterator[JournalRecord]:
    """Yield every record of all segments but a torn last one.

    With `iteration` only of the segments that tell of it and of later ones; the first record is a SegmentStart then,
    unless the journal is read from its beginning.

    Raises:
        DataError: anything else is damaged or missing.
    """
    found = segments.numbers(folder)
    if iteration is not None and found:
        found = _since(folder, found, iteration)
    elif found and found[0] != 0:
        raise DataError(f"{closed_path(folder, 0)} is missing: restore it; the run itself goes on without it")
    for record, _ in _records(folder, found):
        yield record


def recover(folder: Path, iteration: int) -> Iterator[JournalRecord]:
    """Yield what rebuilds a ledger at an iteration; then cut off a torn last record."""
    found = _since(folder, segments.numbers(folder), iteration)
    end = 0
    for record, after in _records(folder, found):
        yield record
        end = after
    path = open_path(folder, found[-1])
    if (torn_bytes := path.stat().st_size - end) > 0:
        # A machine that died left it, or the disk damaged it. Nothing in it is trained; its groups are asked again.
        log.warning("%s ends in an incomplete record: %d bytes are cut off", path, torn_bytes)
        with path.open("r+b") as file:
            file.truncate(end)
            os.fsync(file.fileno())


def _since(folder: Path, found: list[int], iteration: int) -> list[int]:
    """Return the segments from the newest on that begins by an iteration."""
    begin = next((at for at in reversed(range(len(found))) if _begins_by(folder, found[at], iteration)), None)
    if begin is None:
        raise DataError(
            f"{closed_path(folder, found[0] - 1)} is missing: every segment that is there begins after iteration "
            f"{iteration}, whose groups are asked for; restore it. A run with a newest checkpoint of that iteration "
            f"cannot go on without it"
        )
    return found[begin:]


def _begins_by(folder: Path, number: int, iteration: int) -> bool:
    if number == 0:
        return True  # it begins with the run; its first record may be torn
    first, _ = next(scan(folder, number, is_last=False), (None, 0))
    return isinstance(first, SegmentStart) and first.ledger.completed <= iteration


def _records(folder: Path, found: Sequence[int]) -> Iterator[tuple[JournalRecord, int]]:
    """Yield the records of successive segments with the offset behind each in its segment."""
    length = None
    for number in found:
        before_bytes, end = 0, 0
        for record, after in scan(folder, number, is_last=number == found[-1]):
            if end == 0 and number > 0:
                before_bytes = _before_bytes(folder, number, record, length)
            end = after
            yield record, end
        if end == 0 and number > 0:
            raise DataError(f"{open_path(folder, number)} is empty; restore the file or start a new run")
        length = before_bytes + end


def _before_bytes(folder: Path, number: int, first: JournalRecord, length: int | None) -> int:
    """Return the length of all earlier segments; DataError if it is not `length`."""
    if not isinstance(first, SegmentStart):
        raise DataError(f"{open_path(folder, number)} does not begin with the state of the run; restore the file")
    if length is not None and first.before_bytes != length:
        raise DataError(
            f"the segments before {open_path(folder, number)} have {length:,} bytes of {first.before_bytes:,}: the end "
            "of one is lost; restore it or start a new run"
        )
    return first.before_bytes
