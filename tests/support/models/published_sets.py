r"""Small files of our own problems, laid out as the problem sets are published: names, formats and columns.

Every set has some good rows, each with an answer that is right and one that is wrong, and rows that cannot be used.
"""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet

Values = dict[str, Any]


class Good(msgspec.Struct):
    """A row, and what a model may write for it."""

    values: Values
    right: str
    wrong: str


class Published(msgspec.Struct):
    """One set: its files, whose names tell their format, and what they hold."""

    files: tuple[str, ...]
    good: tuple[Good, ...]
    bad: tuple[tuple[Values, str], ...]
    """Rows that cannot be used, with a piece of the reason."""


PUBLISHED = msgspec.json.decode(
    Path(__file__).with_suffix(".json").read_bytes(), type=dict[str, Published]
)


def parquet(*names: str) -> Callable[[Path, list[Values]], None]:
    """One file, or the rows spread over several."""

    def write(folder: Path, rows: list[Values]) -> None:
        columns = {name for row in rows for name in row}
        whole = [{name: row.get(name) for name in columns} for row in rows]
        schema = pa.Table.from_pylist(whole).schema
        size = -(-len(rows) // len(names))
        for index, name in enumerate(names):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            part = whole[index * size : (index + 1) * size]
            pa.parquet.write_table(pa.Table.from_pylist(part, schema), path)

    return write


def jsonl(name: str) -> Callable[[Path, list[Values]], None]:
    def write(folder: Path, rows: list[Values]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    return write


def csv_file(name: str) -> Callable[[Path, list[Values]], None]:
    def write(folder: Path, rows: list[Values]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), restval="")
            writer.writeheader()
            writer.writerows(rows)

    return write


def publish(name: str, folder: Path) -> Path:
    """Write a set, good rows first, into a folder of its own; for `math_filtered` also what it leaves out."""
    published = PUBLISHED[name]
    rows = [good.values for good in published.good] + [values for values, _ in published.bad]
    writers = {".parquet": parquet, ".jsonl": jsonl, ".csv": csv_file}
    writers[Path(published.files[0]).suffix](*published.files)(folder / name, rows)
    return folder / name
