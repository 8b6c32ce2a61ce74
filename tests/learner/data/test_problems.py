"""Data files as people have them, good and bad."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixrl.common.config.data import DataConfig, Source
from prefixrl.common.errors import DataError
from prefixrl.learner.data.problems import SHOWN_BAD_ROWS, Problem, load, shared

STOP: dict[str, Any] = {"train": "unused", "on_bad_row": "stop"}
COLUMNS = DataConfig(**STOP)
GOOD = {"id": "a", "question": "1 + 1 =", "answer": "2"}


def read(folder: Path, *rows: Any, data: DataConfig = COLUMNS) -> list[Problem]:
    """Load rows, each an object to be written as JSON or bytes to be written as they are."""
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path = folder / "data.jsonl"
    path.write_bytes(b"\n".join(lines))
    return load([Source(path=str(path))], data)


text = st.text(min_size=1).filter(str.strip)


@given(rows=st.lists(st.tuples(text, text, text), min_size=1, unique_by=lambda row: row[0]))
def test_what_is_written_is_read(rows: list[tuple[str, str, str]], tmp_path_factory: pytest.TempPathFactory) -> None:
    names = ("id", "question", "answer")
    written = [dict(zip(names, row, strict=True)) for row in rows]
    assert read(tmp_path_factory.mktemp("p"), *written) == [Problem(*row, source="data") for row in rows]


def test_numbers_are_taken_as_text_and_exactly(tmp_path: Path) -> None:
    big = 123456789012345678901234567890
    (problem,) = read(tmp_path, {"id": 7, "question": "?", "answer": big})
    assert (problem.prompt_id, problem.gold) == ("7", str(big))
    (problem,) = read(tmp_path, {"id": 7, "question": "?", "answer": 0})
    assert problem.gold == "0"


def test_empty_lines_and_carriage_returns_are_passed_over(tmp_path: Path) -> None:
    line = json.dumps(GOOD).encode() + b"\r"
    assert len(read(tmp_path, b"", line, b"   ", b"")) == 1


def test_columns_have_the_names_of_the_config(tmp_path: Path) -> None:
    columns = DataConfig(**STOP, id_column="n", question_column="q", answer_column="a", family_column="kind")
    row = {"n": 1, "q": "one?", "a": "1", "kind": "sum", "more": None}
    assert read(tmp_path, row, data=columns) == [Problem("1", "one?", "1", "sum", source="data")]


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        (b"{", "row 2: "),
        (b"[1, 2]", "row 2: Expected `object`, got `array`"),
        (b'{"id": "\xff"}', r"row 2: .*; is the file UTF-8\?"),
        (b'{\x00"\x00', r"row 2: .*; is the file UTF-8\?"),
        (b'{"id": NaN}', "row 2: JSON is malformed"),
        ({"id": "b", "answer": "2"}, "row 2: no column 'question'; the row has answer, id"),
        ({**GOOD, "id": None}, "row 2: column 'id' is None"),
        ({**GOOD, "id": "b", "answer": True}, "row 2: column 'answer' is True"),
        ({**GOOD, "id": "b", "answer": ["2"]}, r"row 2: column 'answer' is \['2'\]"),
        ({**GOOD, "id": "b", "question": "  "}, "row 2: column 'question' is '  '"),
        (GOOD, r"row 2: id 'a' stands in data.jsonl row 1 already"),
    ],
)
def test_a_bad_row_is_named_with_its_reason(tmp_path: Path, row: Any, complaint: str) -> None:
    with pytest.raises(DataError, match=complaint) as caught:
        read(tmp_path, GOOD, row)
    assert str(tmp_path / "data.jsonl") in str(caught.value)


def test_row_numbers_count_empty_lines(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="row 4: "):
        read(tmp_path, GOOD, b"", b"", b"{")


def test_many_bad_rows_are_counted_and_the_first_ten_shown(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        read(tmp_path, *[b"{"] * 25)
    message = str(caught.value)
    assert "25 bad rows" in message and message.endswith("and 15 more")
    assert message.count("jsonl row ") == SHOWN_BAD_ROWS


def test_a_file_without_a_problem_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no problem"):
        read(tmp_path, b"", b"")


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read .*nowhere.jsonl: No such file"):
        load([Source(path=str(tmp_path / "nowhere.jsonl"))], COLUMNS)


def test_copies_of_a_question_are_known_whatever_their_spacing_but_not_by_digits_run_together() -> None:
    train = [Problem(str(number), text, "1") for number, text in enumerate(("plus 1 11", "Is  x+1\n=2 ?"))]
    held = [Problem(str(number), text, "1") for number, text in enumerate(("plus 11 1", "plus  1 11", "Is x + 1 = 2?"))]
    assert shared(train, held) == 2
