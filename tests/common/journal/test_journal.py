"""After a crash the journal holds everything acknowledged and nothing torn; no damage is passed over in silence."""

import subprocess
import sys
from pathlib import Path

import msgpack
import msgspec
import pytest
import xxhash
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from prefixrl.common.errors import DataError
from prefixrl.common.journal.journal import Journal, read, recover
from prefixrl.common.journal.records import (
    BatchFormed,
    GroupEnded,
    GroupIssued,
    GroupScored,
    GroupTotals,
    JournalRecord,
    LedgerState,
    RunHeader,
    SegmentStart,
    VersionPublished,
)
from prefixrl.common.run.disk import FullDisk
from prefixrl.common.wire.messages.weights import WeightsNote
from support.messages import group, row, scored_group, verdict
from support.runs.no_descriptor import no_descriptor
from support.runs.small_disk import small_disk

GROUP = scored_group(group(0, row([1, 2], "eos")), verdict(extracted="2"))
TASK_KEY = b"k" * 32
RECORDS: list[JournalRecord] = [
    RunHeader("run", 1, TASK_KEY),
    VersionPublished(WeightsNote(0, "d0", b"", b"")),
    GroupIssued(0, 0, 0),
    GroupScored(GROUP),
    BatchFormed(0, (0,)),
    GroupEnded(seq=1, state="expired", cause="lost", requeued=True),
]


def first_of(folder: Path) -> Path:
    return folder / "000000.msgpack"


def write(folder: Path, records: list[JournalRecord]) -> list[int]:
    """Write records one by one; the byte each begins at, and the end."""
    journal = Journal(folder)
    starts = [journal.size_bytes]
    for record in records:
        journal.append([record])
        starts.append(journal.size_bytes)
    journal.close()
    assert starts[-1] == first_of(folder).stat().st_size
    return starts


def recovered(folder: Path) -> list[JournalRecord]:
    return list(recover(folder, 0))


numbers = st.integers(0, 2**63)
any_record = (
    st.builds(GroupIssued, numbers, numbers, numbers)
    | st.builds(BatchFormed, numbers, st.lists(numbers).map(tuple))
    | st.builds(
        GroupEnded,
        seq=numbers,
        state=st.sampled_from(["filtered", "expired"]),
        cause=st.text(),
        requeued=st.booleans(),
        faults=st.just({}),
    )
    | st.builds(RunHeader, st.text(), numbers, st.binary())
)


@given(records=st.lists(any_record))
def test_records_are_read_as_they_were_written(
    records: list[JournalRecord], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("j") / "journal"
    journal = Journal(path)
    journal.append(records)
    journal.close()
    size = first_of(path).stat().st_size
    assert list(read(path)) == recovered(path) == records
    assert first_of(path).stat().st_size == size


def test_every_kind_of_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    write(tmp_path / "journal", RECORDS)
    assert list(read(tmp_path / "journal")) == RECORDS


def test_a_journal_that_is_opened_again_goes_on_where_it_ended(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    write(path, RECORDS[:2])
    starts = write(path, RECORDS[2:])
    assert starts[0] > 0
    assert list(read(path)) == RECORDS


def test_records_are_on_disk_when_append_returns(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path)
    journal.append(RECORDS)
    assert list(read(path)) == RECORDS
    assert first_of(path).stat().st_size == journal.size_bytes
    journal.close()


def test_a_last_record_torn_at_any_byte_is_cut_and_the_rest_stays(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    for last in range(len(RECORDS)):
        first_of(path).unlink(missing_ok=True)
        starts = write(path, RECORDS[: last + 1])
        whole = first_of(path).read_bytes()
        for size in range(starts[-2], starts[-1]):
            first_of(path).write_bytes(whole[:size])
            assert list(read(path)) == RECORDS[:last]
            assert first_of(path).stat().st_size == size, "reading changes nothing"
            assert recovered(path) == RECORDS[:last]
            assert first_of(path).read_bytes() == whole[: starts[-2]]


def test_what_is_appended_after_a_cut_is_read(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    starts = write(path, RECORDS)
    first_of(path).write_bytes(first_of(path).read_bytes()[: starts[-1] - 1])
    assert recovered(path) == RECORDS[:-1]
    write(path, RECORDS[-1:])
    assert list(read(path)) == RECORDS


def test_a_last_record_with_a_wrong_checksum_counts_as_torn(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    starts = write(path, RECORDS)
    data = bytearray(first_of(path).read_bytes())
    data[-1] ^= 1
    first_of(path).write_bytes(data)
    assert recovered(path) == RECORDS[:-1]
    assert first_of(path).stat().st_size == starts[-2]


def test_a_first_record_that_is_torn_leaves_an_empty_journal(tmp_path: Path) -> None:
    write(tmp_path / "journal", RECORDS[:1])
    data = bytearray(first_of(tmp_path / "journal").read_bytes())
    data[-1] ^= 1
    first_of(tmp_path / "journal").write_bytes(data)
    assert recovered(tmp_path / "journal") == []
    assert first_of(tmp_path / "journal").stat().st_size == 0


def test_damage_to_any_byte_before_the_last_record_is_an_error_naming_where_it_is(
    tmp_path: Path,
) -> None:
    path = tmp_path / "journal"
    starts = write(path, RECORDS)
    whole = first_of(path).read_bytes()
    for place in range(starts[-2]):
        begin = max(start for start in starts if start <= place)
        for flip in (0x01, 0xFF):
            damaged = bytearray(whole)
            damaged[place] ^= flip
            first_of(path).write_bytes(damaged)
            with pytest.raises(DataError, match=f"damaged at byte {begin}:"):
                list(read(path))
            with pytest.raises(DataError, match=f"damaged at byte {begin}:"):
                recovered(path)
            assert first_of(path).read_bytes() == damaged, "nothing is cut off"


def test_a_record_of_another_release_is_an_error_that_names_its_byte(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    starts = write(path, RECORDS)
    body = msgspec.msgpack.encode({"type": "FromTheFuture"})
    with first_of(path).open("ab") as file:
        file.write(msgpack.packb([xxhash.xxh3_64_intdigest(body), body]))
    with pytest.raises(DataError, match=f"at byte {starts[-1]} that this release cannot read"):
        list(read(path))


def test_an_empty_journal_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    Journal(path).close()
    assert list(read(path)) == recovered(path) == []


def start_of_segment(journal: Journal, completed: int) -> SegmentStart:
    totals = GroupTotals()
    state = LedgerState(completed, completed, completed, (), {}, (), totals, (), ())
    return SegmentStart(journal.size_bytes, RunHeader("run", 1, TASK_KEY), state, {}, None)


def write_segments(folder: Path, count: int) -> list[JournalRecord]:
    """Segments of three records each, the start of the later ones with them; the last one is open."""
    journal = Journal(folder)
    written: list[JournalRecord] = []
    for number in range(count):
        if number:
            written.append(start_of_segment(journal, completed=10 * number))
            journal.begin_segment(written[-1])
        records: list[JournalRecord] = [
            GroupIssued(seq, seq, 0) for seq in range(10 * number, 10 * number + 3)
        ]
        journal.append(records)
        written += records
    journal.close()
    Journal(folder).close()  # compresses what is still to be compressed
    return written


def plain_bytes(closed: Path) -> bytes:
    plain: bytes = zstandard.ZstdDecompressor().decompressobj().decompress(closed.read_bytes())
    return plain


def test_closed_segments_are_compressed_and_the_whole_history_is_read(tmp_path: Path) -> None:
    written = write_segments(tmp_path / "journal", 4)
    assert list(read(tmp_path / "journal")) == written
    names = sorted(path.name for path in (tmp_path / "journal").iterdir())
    assert names == [
        "000000.msgpack.zst",
        "000001.msgpack.zst",
        "000002.msgpack.zst",
        "000003.msgpack",
    ]
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in (tmp_path / "journal").iterdir())


CLOSES_SEGMENTS = """import sys
from pathlib import Path
from prefixrl.common.host.memory_use import memory_now
from prefixrl.common.host.process import return_large_blocks
from prefixrl.common.journal.journal import Journal
return_large_blocks()
for number in range(4):
    Path(sys.argv[1], f"{number:06d}.msgpack").write_bytes(bytes(range(256)) * 2**14)
    Path(sys.argv[1], f"{number + 1:06d}.msgpack").touch()
    Journal(Path(sys.argv[1])).close()
    print(memory_now().share_bytes)
"""


def test_a_process_that_returns_large_blocks_keeps_no_memory_of_compressing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CLOSES_SEGMENTS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    held = [int(line) for line in done.stdout.split()]
    # The allocator maps the first one by itself, and learns from it to keep the later ones.
    assert max(held) - held[0] < 2**20


def test_a_segment_for_which_no_descriptor_is_free_begins_later_and_the_open_one_goes_on(
    tmp_path: Path,
) -> None:
    folder, full = tmp_path / "journal", FullDisk(tmp_path, "the journal")
    journal = Journal(folder)
    with no_descriptor():
        assert not full.takes(lambda: journal.begin_segment(start_of_segment(journal, 0)), 0.0)
        assert "a free descriptor to write the journal" in full.why
        journal.append(RECORDS[:1])
    start = start_of_segment(journal, 0)
    assert full.takes(lambda: journal.begin_segment(start), 60.0) and not full.why
    journal.append(RECORDS[1:3])
    journal.close()
    assert list(read(folder)) == [RECORDS[0], start, *RECORDS[1:3]]


def test_a_journal_whose_file_was_removed_or_replaced_says_so(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.check()
    first_of(tmp_path / "journal").rename(tmp_path / "kept")
    for _ in range(2):
        with pytest.raises(
            DataError, match=r"000000\.msgpack was removed or replaced while the run goes on"
        ):
            journal.check()
        first_of(tmp_path / "journal").touch()
    journal.close()


@pytest.mark.parametrize(("iteration", "first"), [(0, 0), (9, 0), (10, 3), (25, 7), (1000, 11)])
def test_a_restart_reads_from_the_newest_segment_that_begins_by_its_iteration(
    iteration: int, first: int, tmp_path: Path
) -> None:
    written = write_segments(tmp_path / "journal", 4)
    assert list(recover(tmp_path / "journal", iteration)) == written[first:]


def test_a_restart_goes_on_without_old_segments_and_only_the_history_names_them(
    tmp_path: Path,
) -> None:
    written = write_segments(tmp_path / "journal", 3)
    (tmp_path / "journal" / "000000.msgpack.zst").unlink()
    assert list(recover(tmp_path / "journal", 20)) == written[7:]
    with pytest.raises(DataError, match=r"000000\.msgpack\.zst is missing"):
        list(read(tmp_path / "journal"))
    with pytest.raises(
        DataError,
        match=r"000000\.msgpack\.zst is missing: every segment .* begins after iteration 9,",
    ):
        list(recover(tmp_path / "journal", 9))


def test_a_segment_that_is_missing_between_others_or_at_the_end_is_named(tmp_path: Path) -> None:
    write_segments(tmp_path / "journal", 4)
    (tmp_path / "journal" / "000001.msgpack.zst").rename(tmp_path / "1")
    with pytest.raises(DataError, match=r"000001\.msgpack\.zst is missing"):
        list(recover(tmp_path / "journal", 30))
    (tmp_path / "1").rename(tmp_path / "journal" / "000001.msgpack.zst")
    (tmp_path / "journal" / "000003.msgpack").unlink()
    with pytest.raises(
        DataError, match=r"000003\.msgpack is missing: the end of the journal is lost"
    ):
        Journal(tmp_path / "journal")


def test_a_closed_segment_that_ends_early_is_an_error_though_its_records_are_whole(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "journal"
    write_segments(folder, 3)
    closed = folder / "000001.msgpack.zst"
    plain = plain_bytes(closed)
    last = len(msgpack.packb([2**64 - 1, msgspec.msgpack.encode(GroupIssued(12, 12, 0))]))
    closed.write_bytes(zstandard.compress(plain[:-last]))
    with pytest.raises(
        DataError, match=r"segments before .*000002\.msgpack have .* the end of one is lost"
    ):
        list(read(folder))


def test_damage_to_any_byte_of_a_closed_segment_is_an_error_that_names_it(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    written = write_segments(folder, 2)
    closed = folder / "000000.msgpack.zst"
    whole = closed.read_bytes()
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 0x10
        closed.write_bytes(damaged)
        try:
            actual = list(read(folder))
        except DataError as error:
            assert "000000" in str(error) or "segments before" in str(error)
        else:
            assert actual == written, "a bit that the decoder does not read"


def test_a_writer_killed_between_closing_and_compressing_leaves_a_journal_that_is_read(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "journal"
    written = write_segments(folder, 3)
    closed = folder / "000001.msgpack.zst"
    (folder / "000001.msgpack").write_bytes(plain_bytes(closed))
    (folder / "000003.msgpack.partial").write_bytes(b"half a sta")
    (folder / "000000.msgpack.zst.partial").write_bytes(b"half")
    assert list(read(folder)) == written
    Journal(folder).close()
    assert sorted(path.name for path in folder.iterdir()) == [
        "000000.msgpack.zst",
        "000001.msgpack.zst",
        "000002.msgpack",
    ]
    assert list(read(folder)) == written


def test_a_segment_whose_start_finds_no_room_leaves_the_open_one_as_it_was(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1 << 20) as small:
        journal = Journal(small.path / "journal")
        journal.append([GroupIssued(0, 0, 0)])
        small.fill()
        with pytest.raises(OSError, match="No space left"):
            journal.begin_segment(
                msgspec.structs.replace(start_of_segment(journal, 1), digests={1: ("x" * 10_000,)})
            )
        small.make_room()
        journal.append([GroupIssued(1, 1, 0)])
        journal.close()
        assert list(read(small.path / "journal")) == [GroupIssued(0, 0, 0), GroupIssued(1, 1, 0)]


def test_a_segment_is_long_by_its_own_length_and_never_for_its_start_alone(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal", segment_bytes=100)
    journal.append(RECORDS)
    assert journal.is_long
    journal.begin_segment(
        msgspec.structs.replace(start_of_segment(journal, 1), digests={1: ("x" * 1000,)})
    )
    assert not journal.is_long, "live groups may be larger than a segment"
    journal.append(RECORDS * 10)
    assert journal.is_long
    journal.close()
