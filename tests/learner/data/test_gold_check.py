"""Gold answers that cannot be verified are named, by a real process beside the run, and stop nothing."""

import logging
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from prefixrl.learner.data.gold_check import FILE, GoldCheck
from prefixrl.learner.data.problems import Problem
from support.runs.small_disk import small_disk

GOLDS = {
    "a": "7",
    "b": r"2\sqrt{3}",
    "c": r"\frac{}{",
    "d": "B",
    "e": r"\frac{}{",
    "f": "x+1",
    "g": "12:00",
    "h": "blue",
}
PATIENCE_S = 120


def until_written(path: Path) -> bytes:
    deadline = time.monotonic() + PATIENCE_S
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} was never written"
        time.sleep(0.05)
    return path.read_bytes()


def test_every_bad_row_is_named_with_its_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    problems = [Problem(name, "?", gold) for name, gold in GOLDS.items()]
    with caplog.at_level(logging.WARNING):
        check = GoldCheck(problems, tmp_path, 30)
        try:
            actual = until_written(tmp_path / FILE)
            check._thread.join(PATIENCE_S)
        finally:
            check.close()
    rows = [msgspec.json.decode(line) for line in actual.splitlines()]
    assert [row["id"] for row in rows] == ["c", "e"]
    assert {row["reason"] for row in rows} == {"not equal to itself (parse_fail)"}
    assert "2 gold answers do not verify against themselves" in caplog.text


def test_findings_that_find_no_room_are_told_and_end_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        disk.fill()
        check = GoldCheck([Problem("c", "?", GOLDS["c"])], disk.path, 30)
        check._thread.join(PATIENCE_S)
        check.close()
        assert [each.name for each in disk.path.iterdir()] == ["ballast"]
    assert (
        f"{FILE} cannot be written: [Errno 28]" in caplog.text
        and "1 gold answers do not verify" in caplog.text
    )


def test_a_run_that_ends_first_takes_the_check_with_it(tmp_path: Path) -> None:
    check = GoldCheck([Problem("a", "?", r"\int_0^1 x^x dx")], tmp_path, 600)
    process = psutil.Process(check._process.pid)
    check.close()
    assert not process.is_running()
    assert not (tmp_path / FILE).exists()
