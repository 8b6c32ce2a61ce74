"""Data files as people have them, good and bad."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixrl.common.config.data import DataConfig, Source
from prefixrl.common.errors import DataError
from prefixrl.learner.data.problems import SHOWN_BAD_ROWS, Loaded, Problem, count_shared, load
from prefixrl.learner.data.problems import read as read_sources

STOP: dict[str, Any] = {"train": "unused", "on_bad_row": "stop"}
COLUMNS = DataConfig(**STOP)
GOOD = {"id": "a", "question": "1 + 1 =", "answer": "2"}
DEEP = b'{"question": "?", "answer": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


def read(folder: Path, *rows: Any, data: DataConfig = COLUMNS) -> list[Problem]:
    """Load rows, each an object to be written as JSON or bytes to be written as they are."""
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path = folder / "data.jsonl"
    path.write_bytes(b"\n".join(lines))
    return load([Source(path=str(path))], data)


def read_file(path: Path, **keys: Any) -> Loaded:
    """Read one file, its bad rows left out."""
    return read_sources([Source(path=str(path), **keys)], DataConfig(train="unused"))


def told(loaded: Loaded) -> list[tuple[int, str]]:
    """Numbers and reasons of the bad rows."""
    return [(row.row, row.reason) for row in loaded.bad]


text = st.text(min_size=1).filter(str.strip)


@given(rows=st.lists(st.tuples(text, text, text), min_size=1, unique_by=lambda row: row[0]))
def test_what_is_written_is_read(
    rows: list[tuple[str, str, str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    names = ("id", "question", "answer")
    written = [dict(zip(names, row, strict=True)) for row in rows]
    asked = read(
        tmp_path_factory.mktemp("p"), *written, data=DataConfig(**STOP, answer_reading="as_it_is")
    )
    assert asked == [Problem(*row, source="data") for row in rows]


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
    columns = DataConfig(
        **STOP, id_column="n", question_column="q", answer_column="a", family_column="kind"
    )
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
        (DEEP, "row 2: maximum recursion depth exceeded"),
        ({"id": "b", "answer": "2"}, "row 2: no column 'question'; the row has answer, id"),
        ({**GOOD, "id": [1, 2]}, r"row 2: column 'id' is \[1, 2\]"),
        ({**GOOD, "id": "b", "answer": True}, "row 2: column 'answer' is True"),
        (
            {**GOOD, "id": "b", "answer": ["2", "3"]},
            r"row 2: column 'answer' is \['2', '3'\].*\"joined\" takes a list",
        ),
        ({**GOOD, "id": "b", "answer": "NaN"}, "the answer is 'NaN', as of a missing value"),
        ({**GOOD, "id": "b", "question": "  "}, "row 2: column 'question' is '  '"),
        (GOOD, r"row 2: id 'a' stands in data.jsonl row 1 already"),
    ],
)
def test_a_bad_row_is_named_with_its_reason(tmp_path: Path, row: Any, complaint: str) -> None:
    with pytest.raises(DataError, match=complaint) as caught:
        read(tmp_path, GOOD, row)
    assert str(tmp_path / "data.jsonl") in str(caught.value)


def test_a_json_file_that_is_too_deep_is_a_bad_row(tmp_path: Path) -> None:
    (tmp_path / "data.json").write_bytes(b"[" + DEEP + b"]")
    with pytest.raises(DataError, match=r"data\.json row 1: maximum recursion depth exceeded"):
        read_file(tmp_path / "data.json")


def test_a_value_that_can_just_be_decoded_is_a_bad_row_however_deep_it_is(tmp_path: Path) -> None:
    deep = [
        b'{"question": "?", "answer": ' + b"[" * depth + b"]" * depth + b"}"
        for depth in range(700, 1100)
    ]
    (tmp_path / "data.jsonl").write_bytes(b"\n".join([json.dumps(GOOD).encode(), *deep]))
    loaded = read_file(tmp_path / "data.jsonl")
    assert (len(loaded.problems), len(loaded.bad)) == (1, len(deep))


def test_rows_of_a_csv_file_that_are_not_utf_8_are_bad_and_no_others(tmp_path: Path) -> None:
    path = tmp_path / "excel.csv"
    path.write_bytes(
        "id,question,answer\na,What does a café pay?,5 €\nb,1 + 1 =,2\n".encode("cp1252")
    )
    loaded = read_file(path)
    assert loaded.problems == [Problem("b", "1 + 1 =", "2", source="excel")]
    ((row, reason),) = told(loaded)
    assert row == 1 and "byte 0xe9" in reason and reason.endswith("; is the file UTF-8?")
    # The two bytes of one character, in two fields: joined without a comma they would be text.
    path.write_bytes(b"id,question,answer\na,1 + 1 = \xc3,\xa9\nb,1 + 1 =,2\n")
    assert [row for row, _ in told(read_file(path))] == [1]
    path.write_bytes("id,question,answer,année\na,1 + 1 =,2,3\n".encode("cp1252"))
    with pytest.raises(
        DataError, match=r"row 1: the header, and so the file, .* 0xe9 .*; is the file UTF-8\?"
    ):
        read_file(path)


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        pytest.param(
            '"2 + 2 =,4\n3 + 3 =,6\n4 + 4 =,8\n',
            "a quote that opens in this row is never closed",
            id="never closed",
        ),
        pytest.param(
            '"2 + 2 =,4\n3 + 3 =,6\n"4 + 4 =",8\n5 + 5 =,10\n',
            "',' expected after '\"'",
            id="closed by a later row",
        ),
    ],
)
def test_a_quote_of_a_csv_file_that_swallows_rows_ends_the_start(
    broken: str, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "data.csv"
    path.write_text(f'question,answer\n"1 + 1\n=",2\n{broken}')
    with pytest.raises(
        DataError, match=r"data\.csv: row 2 takes the lines 4 to 6 and cannot be read"
    ) as caught:
        read_file(path)
    assert reason in str(caught.value)


def test_a_quote_that_swallows_no_other_row_costs_its_own(tmp_path: Path) -> None:
    path = tmp_path / "data.csv"
    path.write_text('question,answer\n"1 "+" 1 =",2\n1 + 1 =,2\n"2 + 2 =,4\n')
    loaded = read_file(path)
    assert loaded.problems == [Problem("2", "1 + 1 =", "2", source="data")]
    assert told(loaded) == [
        (1, "',' expected after '\"'"),
        (3, "a quote that opens in this row is never closed"),
    ]


def test_a_text_of_a_parquet_file_that_is_not_utf_8_costs_its_row(tmp_path: Path) -> None:
    texts = pa.array([b"1 + 1 =", b"5 \x80 =", b"2 + 2 ="])
    questions = pa.StringArray.from_buffers(3, texts.buffers()[1], texts.buffers()[2])
    pa.parquet.write_table(
        pa.table({"question": questions, "answer": ["2", "?", "4"]}), tmp_path / "data.parquet"
    )
    loaded = read_file(tmp_path / "data.parquet")
    assert [(each.prompt_id, each.gold) for each in loaded.problems] == [("1", "2"), ("3", "4")]
    ((row, reason),) = told(loaded)
    assert row == 2 and "byte 0x80" in reason


def test_numbers_of_a_parquet_file_that_are_not_finite_are_bad_rows(tmp_path: Path) -> None:
    answers = [0.5, float("nan"), float("inf"), float("-inf")]
    table = pa.table({"question": ["?"] * 4, "answer": answers})
    pa.parquet.write_table(table, tmp_path / "data.parquet")
    loaded = read_file(tmp_path / "data.parquet")
    assert [each.gold for each in loaded.problems] == ["0.5"]
    expected = "column 'answer' is {}; expected text or a finite number"
    assert told(loaded) == [
        (row, expected.format(value)) for row, value in ((2, "nan"), (3, "inf"), (4, "-inf"))
    ]


def test_a_column_that_a_parquet_file_lacks_is_told_with_those_it_has(tmp_path: Path) -> None:
    pa.parquet.write_table(
        pa.table({"sum": ["2"], "terms": ["1 + 1 ="]}), tmp_path / "data.parquet"
    )
    with pytest.raises(
        DataError, match="row 1: no column 'question'; the row has sum, terms; question_column"
    ):
        read_file(tmp_path / "data.parquet")


def test_a_dot_in_the_name_of_a_parquet_column_is_as_good_as_a_column_within_another(
    tmp_path: Path,
) -> None:
    flat = pa.table({"question": ["1 + 1 ="], "extra.answer": ["2"]})
    nested = pa.table({"question": ["1 + 1 ="], "extra": [{"answer": "2"}]})
    for columns in (flat, nested):
        pa.parquet.write_table(columns, tmp_path / "data.parquet")
        (problem,) = read_file(tmp_path / "data.parquet", answer_column="extra.answer").problems
        assert problem.gold == "2"


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


def test_copies_of_a_question_are_known_whatever_their_spacing_but_not_by_digits_run_together() -> (
    None
):
    train = [
        Problem(str(number), text, "1")
        for number, text in enumerate(("plus 1 11", "Is  x+1\n=2 ?"))
    ]
    held = [
        Problem(str(number), text, "1")
        for number, text in enumerate(("plus 11 1", "plus  1 11", "Is x + 1 = 2?"))
    ]
    assert count_shared(train, held) == 2
