"""Lines of a file that somebody appends to: the last may be torn, no other."""

import logging
from pathlib import Path

import msgspec
import pytest

from prefixrl.common.errors import DataError
from prefixrl.common.run import json_lines


class Line(msgspec.Struct):
    """A line."""

    iteration: int
    text: str = ""


WHOLE = b'{"iteration":0}\n{"iteration":1,"text":"so"}\n'


@pytest.mark.parametrize(
    "torn",
    [
        b'{"iteration":2,"te',
        b'{"iteration":2,"text":"\xc3',
        b"\0" * 20,
        b'{"iteration":2,"text":"\xff"}',
    ],
)
def test_a_last_line_that_is_torn_is_left_out_with_a_warning(
    tmp_path: Path, torn: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(WHOLE + torn)
    with caplog.at_level(logging.WARNING):
        assert json_lines.read(path, Line) == [Line(0), Line(1, "so")]
    assert f"{path}: left out the last line" in caplog.text


def test_whole_lines_are_read_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "lines.jsonl"
    assert json_lines.read(path, Line) == []
    path.write_bytes(WHOLE.rstrip(b"\n"))
    assert json_lines.read(path, Line) == [Line(0), Line(1, "so")]
    assert not caplog.records


@pytest.mark.parametrize(
    "torn", [b'{"iteration":2,"te', b"\0" * 20, b'{"iteration":2,"text":"\xc3']
)
def test_what_is_appended_behind_a_torn_line_is_read(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(WHOLE + torn)
    json_lines.append(path, [Line(2)])
    json_lines.append(path, [Line(3)])
    assert json_lines.read(path, Line) == [Line(0), Line(1, "so"), Line(2), Line(3)]


def test_a_whole_line_without_its_end_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(WHOLE.rstrip(b"\n"))
    json_lines.append(path, [Line(2)])
    assert json_lines.read(path, Line) == [Line(0), Line(1, "so"), Line(2)]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (b'{"iterat\n' + WHOLE, 1),
        (WHOLE + b"\0\0\n" + WHOLE, 3),
        (WHOLE + b'{"iteration":null}\n', 3),
    ],
)
def test_damage_elsewhere_is_named_by_file_and_line(
    tmp_path: Path, text: bytes, number: int
) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(text)
    with pytest.raises(DataError, match=rf"lines\.jsonl line {number} is damaged"):
        json_lines.read(path, Line)
