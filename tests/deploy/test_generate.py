"""What `prefixrl generate` hands on: whole lines, as they come, and what of them failed."""

import io
import json
from pathlib import Path

import pytest

from prefixrl.deploy.generate import SHOWN_FAILURES, Copy


def line(row: int, status: str = "ok") -> bytes:
    said = {"file": "f", "row": row, "sample": 0, "status": status, "reason": f"because {row}"}
    return json.dumps(said).encode() + b"\n"


def test_only_whole_lines_are_copied_and_each_once(tmp_path: Path) -> None:
    out = io.BytesIO()
    copy = Copy(tmp_path / "answers.jsonl", out)
    copy.more()
    assert out.getvalue() == b"", "there is nothing yet"
    with (tmp_path / "answers.jsonl").open("wb", buffering=0) as file:
        file.write(line(1) + line(2)[:9])
        copy.more()
        assert out.getvalue() == line(1)
        file.write(line(2)[9:])
        copy.more()
        copy.more()
    assert out.getvalue() == line(1) + line(2)
    assert (copy.lines, copy.failed) == (2, 0)


def test_failures_are_counted_and_the_first_ones_told_with_row_and_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = ["bad_row", "failed", "error", "no_gold", "no_answer", *["bad_row"] * SHOWN_FAILURES]
    lines = [line(row, kind) for row, kind in enumerate(kinds, start=1)]
    (tmp_path / "answers.jsonl").write_bytes(b"".join(lines))
    copy = Copy(tmp_path / "answers.jsonl", io.BytesIO())
    copy.more()
    assert (copy.lines, copy.failed) == (len(kinds), 3 + SHOWN_FAILURES)
    told = capsys.readouterr().err.splitlines()
    assert told[:3] == [
        "f row 1: bad row: because 1", "f row 2: no answer: because 2", "f row 3: no verdict: because 3"
    ]  # fmt: skip
    assert len(told) == SHOWN_FAILURES + 1 and "more rows failed" in told[-1]


def test_a_reader_that_has_gone_ends_the_copying(tmp_path: Path) -> None:
    class Gone(io.BytesIO):
        def write(self, given: object) -> int:
            raise BrokenPipeError

    (tmp_path / "answers.jsonl").write_bytes(line(1))
    copy = Copy(tmp_path / "answers.jsonl", Gone())
    copy.more()
    assert copy.is_closed
    copy.more()
