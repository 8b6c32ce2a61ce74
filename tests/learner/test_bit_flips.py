"""Two thousand flipped bits in the files of a run: each is noticed by name or changes nothing, and none is a fault."""

import logging
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from prefixrl.common.errors import DataError
from prefixrl.common.journal import journal
from prefixrl.common.journal.records import (
    GroupIssued,
    GroupTotals,
    JournalRecord,
    LedgerState,
    RunHeader,
    SegmentStart,
)
from prefixrl.learner.models.model import Models
from prefixrl.learner.training import checkpoint
from prefixrl.learner.training.checkpoint import TrainerState, read_manifest
from support.models.tiny_model import DEEPSPEED_WARNINGS, run_config, save_model, with_tokenizer

pytestmark = [*DEEPSPEED_WARNINGS, pytest.mark.nightly]
Figure = Callable[[str, object], None]
FLIPS = 1000
"""In each of the two."""


def flip(path: Path, random_: random.Random) -> bytes:
    """Flip one bit; return what the file held."""
    whole = path.read_bytes()
    changed = bytearray(whole)
    changed[random_.randrange(len(whole))] ^= 1 << random_.randrange(8)
    path.write_bytes(changed)
    return whole


@pytest.mark.nightly
def test_a_run_falls_back_by_name_from_a_checkpoint_with_any_bit_flipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, record_property: Figure
) -> None:
    adapter = save_model(tmp_path / "adapter", is_tied=True)
    with_tokenizer(adapter)
    config, folder, random_ = run_config(adapter), tmp_path / "checkpoints", random.Random(1)
    models = Models.load(config, 0, 1, config.adapter.model)
    for iteration in (1, 2):
        newest = checkpoint.save(folder, models, TrainerState(iteration, iteration, world_size=1))
    files = sorted(path for path in newest.rglob("*") if path.is_file())
    manifest, seen = read_manifest(newest), Counter[str]()
    for _ in range(FLIPS):
        # Small files as often as large ones: they hold what is hardest to replace.
        path = random_.choice(files)
        whole = flip(path, random_)
        caplog.clear()
        actual = checkpoint.latest(folder)
        if actual == newest:
            assert path.name == "manifest.json" and read_manifest(newest) == manifest, path
            seen["a space of the manifest"] += 1
        else:
            assert actual is not None and actual.name == "step_00000001"
            assert f"skipping the checkpoint {newest}" in caplog.text
            seen["the older checkpoint"] += 1
        path.write_bytes(whole)
    assert checkpoint.latest(folder) == newest
    record_property("figure", f"checkpoint, {FLIPS} flipped bits: {dict(seen)}")
    assert seen["the older checkpoint"] > 0.9 * FLIPS


def test_no_flipped_bit_of_a_journal_is_read_as_something_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, record_property: Figure
) -> None:
    caplog.set_level(logging.WARNING)
    folder, random_, seen = tmp_path / "journal", random.Random(2), Counter[str]()
    written = write_journal(folder)
    files = sorted(folder.iterdir())
    for _ in range(FLIPS):
        path = random_.choice(files)
        whole = flip(path, random_)
        caplog.clear()
        try:
            actual = list(journal.recover(folder, 0))
        except DataError as error:
            assert str(folder) in str(error)
            seen["refused by name"] += 1
        else:
            if actual == written:
                assert path.suffix == ".zst", "only the frame of zstd has bits that say nothing"
                seen["a bit without a meaning"] += 1
            else:
                assert (
                    actual == written[:-1] and f"{path} ends in an incomplete record" in caplog.text
                )
                seen["the last record, taken as torn"] += 1
        path.write_bytes(whole)
    assert list(journal.recover(folder, 0)) == written
    record_property("figure", f"journal, {FLIPS} flipped bits: {dict(seen)}")
    assert seen["refused by name"] > 0.8 * FLIPS


def write_journal(folder: Path) -> list[JournalRecord]:
    """Write three segments of forty records."""
    header, written = RunHeader("run", 1, b"k" * 32), list[JournalRecord]()
    totals = GroupTotals()
    file = journal.Journal(folder)
    for number in range(3):
        if number:
            state = LedgerState(number, 40 * number, 40 * number, (), {}, (), totals, (), ())
            start = SegmentStart(file.size_bytes, header, state, {}, None)
            file.begin_segment(start)
            written.append(start)
        records = [GroupIssued(seq, seq, 0) for seq in range(40 * number, 40 * (number + 1))]
        file.append(records)
        written += records
    file.close()
    journal.Journal(folder).close()
    return written
