"""After a crash the journal holds everything acknowledged and nothing torn; no damage is passed over in silence."""

from pathlib import Path

import msgpack
import msgspec
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from prefixrl.common.errors import DataError
from prefixrl.common.run.journal import Journal, read, recover
from prefixrl.common.run.records import (
    BatchFormed,
    GroupEnded,
    GroupIssued,
    GroupScored,
    JournalRecord,
    RunHeader,
    VersionPublished,
)
from prefixrl.common.wire.messages import GroupPrefixes, Prompt, Row, ScoredGroup, Verdict, VersionSpan, WeightsNote
from prefixrl.common.wire.packing import pack_logprobs, pack_tokens

GROUP = ScoredGroup(
    prefixes=GroupPrefixes(
        seq=0,
        prompt=Prompt("p0", "1 + 1 =", "2"),
        seed=9,
        prompt_tokens=pack_tokens([1]),
        rows=(
            Row(
                tokens=pack_tokens([1, 2]),
                logprobs=pack_logprobs([-1.0, -2.0]),
                finish="eos",
                spans=(VersionSpan(0, "d0", 2),),
            ),
        ),
    ),
    version=0,
    weights_digest="d0",
    verdicts=(Verdict(reward=1.0, status="ok", extracted="2", finish="eos", completion_tokens=4, elapsed_ms=5),),
    scorer="scorer-0",
)
RECORDS: list[JournalRecord] = [
    RunHeader("run", 1),
    VersionPublished(WeightsNote(0, "d0", b"", b"")),
    GroupIssued(0, 0, 0),
    GroupScored(GROUP),
    BatchFormed(0, (0,)),
    GroupEnded(seq=1, state="expired", cause="lost", requeued=True),
]


def write(path: Path, records: list[JournalRecord]) -> list[int]:
    """Write records one by one; the byte each begins at, and the end."""
    journal = Journal(path)
    starts = [journal.offset_bytes]
    for record in records:
        journal.append([record])
        starts.append(journal.offset_bytes)
    journal.close()
    assert starts[-1] == path.stat().st_size
    return starts


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
    | st.builds(RunHeader, st.text(), numbers)
)


@given(records=st.lists(any_record))
def test_records_are_read_as_they_were_written(
    records: list[JournalRecord], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("j") / "journal"
    journal = Journal(path)
    journal.append(records)
    journal.close()
    size = path.stat().st_size
    assert list(read(path)) == list(recover(path)) == records
    assert path.stat().st_size == size


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
    assert path.stat().st_size == journal.offset_bytes
    journal.close()


def test_a_last_record_torn_at_any_byte_is_cut_and_the_rest_stays(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    for last in range(len(RECORDS)):
        path.unlink(missing_ok=True)
        starts = write(path, RECORDS[: last + 1])
        whole = path.read_bytes()
        for size in range(starts[-2], starts[-1]):
            path.write_bytes(whole[:size])
            assert list(read(path)) == RECORDS[:last]
            assert path.stat().st_size == size, "reading changes nothing"
            assert list(recover(path)) == RECORDS[:last]
            assert path.read_bytes() == whole[: starts[-2]]


def test_what_is_appended_after_a_cut_is_read(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    starts = write(path, RECORDS)
    path.write_bytes(path.read_bytes()[: starts[-1] - 1])
    assert list(recover(path)) == RECORDS[:-1]
    write(path, RECORDS[-1:])
    assert list(read(path)) == RECORDS


def test_a_last_record_with_a_wrong_checksum_counts_as_torn(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    starts = write(path, RECORDS)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert list(recover(path)) == RECORDS[:-1]
    assert path.stat().st_size == starts[-2]


def test_damage_to_any_byte_before_the_last_record_is_an_error_naming_where_it_is(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    starts = write(path, RECORDS)
    whole = path.read_bytes()
    for place in range(starts[-2]):
        begin = max(start for start in starts if start <= place)
        for flip in (0x01, 0xFF):
            damaged = bytearray(whole)
            damaged[place] ^= flip
            path.write_bytes(damaged)
            with pytest.raises(DataError, match=f"damaged at byte {begin}:"):
                list(read(path))
            with pytest.raises(DataError, match=f"damaged at byte {begin}:"):
                list(recover(path))
            assert path.read_bytes() == damaged, "nothing is cut off"


def test_a_record_of_another_release_is_an_error_that_names_its_byte(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    starts = write(path, RECORDS)
    body = msgspec.msgpack.encode({"type": "FromTheFuture"})
    with path.open("ab") as file:
        file.write(msgpack.packb([xxhash.xxh3_64_intdigest(body), body]))
    with pytest.raises(DataError, match=f"at byte {starts[-1]} that this release cannot read"):
        list(read(path))


def test_an_empty_journal_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    Journal(path).close()
    assert list(read(path)) == list(recover(path)) == []
