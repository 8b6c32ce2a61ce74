"""Rows of data files, folders and hub datasets; one that cannot be read carries an error."""

import codecs
import csv
import gzip
import io
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec
import zstandard

from prefixrl.common.config.data import HUB
from prefixrl.common.config.foreign.files import kind_of
from prefixrl.common.errors import DataError
from prefixrl.common.host.hub import dataset_folder

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow")
_FORM = re.compile(
    r"(?:(\.(?:jsonl|ndjson|json|csv|tsv))(?:\.gz|\.zst)?|(\.(?:parquet|arrow)))$", re.IGNORECASE
)
SPLITS = ("train", "test", "validation", "valid", "val", "dev")
"""Names of splits, with which names of files and folders begin."""
NO_DATA = frozenset(
    {"state.json", "dataset_info.json", "dataset_dict.json", "dataset_infos.json", "package.json"}
)
"""JSON files that describe a dataset and hold no rows."""
MOST_CSV_FIELD_BYTES = 2**24


@dataclass(frozen=True)
class FileRow:
    """One row with its file and number."""

    file: str
    """Relative to the source."""
    number: int
    """Counted from 1; in a file of lines the number of the line."""
    values: dict[str, object] | None
    """None where it cannot be read, for the reason in `error`."""
    error: str = ""
    is_whole_file: bool = False
    """The file holds this one row: its name is as good as an id."""
    columns: Sequence[str] = ()
    """Names of all columns of the file, where not all of them are read."""


class _DataFile(msgspec.Struct):
    filename: str


class _Saved(msgspec.Struct):
    """The part of a `state.json` that names the data of its folder."""

    data_files: list[_DataFile] = msgspec.field(name="_data_files")


def local(path: str) -> Path:
    """Return the file or folder on this host; fetch a hub dataset if needed, or raise DataError."""
    return Path(dataset_folder(path.removeprefix(HUB)) if path.startswith(HUB) else path)


def data_files(
    root: Path, subset: str | None, split: str | None, other_subsets: tuple[str, ...] = ()
) -> list[Path]:
    """Return a source's files in a fixed order; raise DataError for no file or an unclear split.

    A file belongs to the split that its name or a folder above it begins with; where no file names a split, all belong.
    Files with one of `other_subsets` as a word of their path are left out where there are other files.
    """
    if root.is_file():
        return [root]
    if not root.is_dir():
        kind = kind_of(root) if root.exists() else ""
        raise DataError(
            f"cannot read {root}: {f'it is {kind}, not a file' if kind else 'No such file or directory'}"
        )
    paths = sorted(
        path
        for path in root.rglob("*")
        if _kind_of(path) is not None
        and path.name not in NO_DATA
        and not any(part.startswith(".") for part in path.relative_to(root).parts)
    )
    paths = _without_caches(paths)
    # Where every path has such a word, it tells no subsets apart, and all files stay.
    paths = [
        each
        for each in paths
        if not {*re.split(r"[-_./]", str(each.relative_to(root)))} & {*other_subsets}
    ] or paths
    # Likewise a folder whose paths do not name the subset holds that subset alone.
    paths = [
        each
        for each in paths
        if subset in (each.name.partition(".")[0], *each.relative_to(root).parts)
    ] or paths
    # Rows of all splits together would train on those that are meant for evaluation.
    splits = {_split_of(path, root) for path in paths} - {""}
    if split is None and len(splits) > 1:
        raise DataError(
            f"{root} has the splits {', '.join(sorted(splits))}: choose, split = {min(splits)!r} or split = "
            f"{'+'.join(sorted(splits))!r}"
        )
    if split is not None and splits:
        paths = [path for path in paths if _split_of(path, root) in split.split("+")]
    if not paths:
        present = ", ".join(sorted(each.name for each in root.iterdir())[:20]) or "nothing"
        present += "; where one of these holds the problems, give it as path" * any(
            map(_kind_of, root.iterdir())
        )
        raise DataError(
            f"{root} holds no data for split {split or 'any'}, subset {subset or 'any'}; looked for "
            f"{', '.join(SUFFIXES)} files. It has {present}"
        )
    return paths


def _without_caches(paths: list[Path]) -> list[Path]:
    """Leave out copies of rows: Arrow files that a `state.json` beside them does not name; raise DataError."""
    for folder in {path.parent for path in paths if _kind_of(path) == ".arrow"}:
        state = folder / "state.json"
        if not state.exists():
            continue
        try:
            data_names = {
                each.filename
                for each in msgspec.json.decode(state.read_bytes(), type=_Saved).data_files
            }
        except (OSError, ValueError, RecursionError, msgspec.MsgspecError) as error:
            raise DataError(
                f"{state} should name the data files of its folder: {error}; write the folder again by save_to_disk"
            ) from None
        if absent := sorted(data_names - {path.name for path in folder.iterdir()}):
            raise DataError(
                f"{state} names {absent[0]!r}, which is not there: copy the whole folder"
            )
        # Arrow files that the state does not name are caches: they would give rows a second time.
        paths = [
            path
            for path in paths
            if path.parent != folder or _kind_of(path) != ".arrow" or path.name in data_names
        ]
    return paths


def _kind_of(path: Path) -> str | None:
    """Return the suffix that names the form of a file, in small letters; None if the file is not read."""
    form = _FORM.search(path.name)
    return (form[1] or form[2]).lower() if form else None


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file, unpack it if it is packed."""
    packing = path.suffix.lower()
    with path.open("rb") as file:
        if packing == ".gz":
            yield cast(BinaryIO, gzip.GzipFile(fileobj=file))
        elif packing == ".zst":
            yield io.BufferedReader(
                zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
            )
        else:
            yield file


def _split_of(path: Path, root: Path) -> str:
    """Return the split that a file or the nearest folder above it names, "" where none does."""
    for part in reversed(path.relative_to(root).parts):
        word = re.split(r"[-_.\[\d]", part, maxsplit=1)[0]
        if word in SPLITS:
            return word
    return ""


def rows(root: Path, files: list[Path], columns: frozenset[str]) -> Iterator[FileRow]:
    """Yield every row of the files (of columnar files only `columns`); raise DataError."""
    for path in files:
        name = path.name if path == root else path.relative_to(root).as_posix()
        try:
            kind = _kind_of(path)
            if kind is None:
                raise DataError(
                    f"{path} is a file of no known kind; known: {', '.join(SUFFIXES)}; .jsonl.gz, …"
                )
            if kind in (".parquet", ".arrow"):
                yield from _columnar(path, name, columns)
            else:
                yield from {".json": _json, ".csv": _csv, ".tsv": _csv}.get(kind, _lines)(
                    path, name
                )
        except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
            raise DataError(
                f"cannot read {path}: {getattr(error, 'strerror', None) or error}"
            ) from None


def _lines(path: Path, name: str) -> Iterator[FileRow]:
    decoder = msgspec.json.Decoder(dict[str, object])
    with _opened(path) as file:
        for number, raw_line in enumerate(file, start=1):
            line = raw_line.removeprefix(codecs.BOM_UTF8) if number == 1 else raw_line
            if line.strip():
                try:
                    yield FileRow(name, number, decoder.decode(line))
                except (ValueError, RecursionError, msgspec.MsgspecError) as error:
                    yield FileRow(name, number, None, f"{error}{_encoding_of(line)}")


def _encoding_of(line: bytes) -> str:
    """Return a question about the encoding of a bad line, "" where it is UTF-8."""
    try:
        return "; is the file UTF-8?" if b"\0" in line else line.decode()[:0]
    except UnicodeDecodeError:
        return "; is the file UTF-8?"


def _json(path: Path, name: str) -> Iterator[FileRow]:
    """Yield the rows of an array of objects, or one object as one row."""
    try:
        with _opened(path) as file:
            content = file.read().removeprefix(codecs.BOM_UTF8)
        document = msgspec.json.decode(content)
    except (ValueError, RecursionError, msgspec.MsgspecError) as error:
        if next(_lines(path, name), FileRow(name, 1, None)).values is not None:
            yield from _lines(path, name)  # JSONL under another suffix
            return
        yield FileRow(name, 1, None, str(error))
        return
    if isinstance(document, dict):
        yield FileRow(name, 1, document, is_whole_file=True)
    elif not isinstance(document, list):
        yield FileRow(name, 1, None, f"expected an object or an array, got {document!r:.60}")
    else:
        for number, item in enumerate(document, start=1):
            reason = "" if isinstance(item, dict) else f"expected an object, got {item!r:.60}"
            yield FileRow(name, number, None if reason else item, reason)


def _csv(path: Path, name: str) -> Iterator[FileRow]:
    """Yield the rows below a header, numbered by row: a quoted field may hold line ends.

    Raise DataError for a row that a wrong quote makes longer than a line: it may have swallowed most of the file.
    """
    csv.field_size_limit(MOST_CSV_FIELD_BYTES)
    # A byte that is not UTF-8 becomes a surrogate: it costs its row, and the others are read.
    with _opened(path) as file:
        text = io.StringIO(file.read().decode("utf-8-sig", errors="surrogateescape"), newline="")
    reader = csv.reader(text, delimiter="\t" if _kind_of(path) == ".tsv" else ",", strict=True)
    try:
        header = next(reader, [])
        reason = _undecodable(header)
    except csv.Error as error:
        header, reason = [], _quoting(error)
    if reason:
        yield FileRow(name, 1, None, f"the header, and so the file, cannot be read: {reason}")
        return
    for number in count(1):
        line = reader.line_num + 1
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if reader.line_num > line:
                raise DataError(
                    f"{path}: row {number} takes the lines {line} to {reader.line_num} and cannot be read, so that "
                    f"others may be lost with it: {_quoting(error)}; close every quote, and double those within a text"
                ) from None
            yield FileRow(name, number, None, _quoting(error))
            continue
        if reason := _undecodable(fields):
            yield FileRow(name, number, None, reason)
        elif len(fields) == len(header):
            yield FileRow(name, number, dict(zip(header, fields, strict=True)))
        elif fields:
            yield FileRow(
                name, number, None, f"{len(fields)} fields, the header names {len(header)} columns"
            )


def _undecodable(fields: list[str]) -> str:
    """Return the reason why fields of a CSV file are no text, "" where they are."""
    try:
        return ",".join(fields).encode(errors="surrogateescape").decode()[:0]
    except UnicodeDecodeError as error:
        return f"{error}; is the file UTF-8?"


def _quoting(error: csv.Error) -> str:
    return str(error).replace(
        "unexpected end of data", "a quote that opens in this row is never closed"
    )


def _columnar(path: Path, name: str, columns: frozenset[str]) -> Iterator[FileRow]:
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise DataError(
            f"{path} needs pyarrow, which is not installed: pip install 'prefixrl[parquet]', or give the data as JSONL"
        ) from None
    number = 0
    try:
        for batch, columns_of_file in _batches(pyarrow, path, columns):
            for values, reason in _values(batch):
                number += 1
                yield FileRow(name, number, values, reason, columns=columns_of_file)
    except pyarrow.ArrowException as error:
        yield FileRow(name, number + 1, None, f"the file cannot be read from here on: {error}")


def _values(batch: Any) -> Iterator[tuple[dict[str, object] | None, str]]:
    """Yield each row's values, or the reason why it has none: not UTF-8, a date out of range."""
    try:
        rows = batch.to_pylist()
    except (ValueError, OverflowError) as error:
        if batch.num_rows == 1:
            yield None, str(error)
            return
        # One value spoils its batch: row by row the others can be read.
        for index in range(batch.num_rows):
            yield from _values(batch.slice(index, 1))
        return
    yield from ((values, "") for values in rows)


def _batches(pyarrow: Any, path: Path, columns: frozenset[str]) -> Iterator[tuple[Any, list[str]]]:
    """Yield batches of rows, each with the names of all columns of the file."""
    if _kind_of(path) == ".arrow":
        with path.open("rb") as file, pyarrow.ipc.open_stream(file) as stream:
            yield from ((batch, stream.schema.names) for batch in stream)
        return
    with pyarrow.parquet.ParquetFile(path) as file:
        file_columns = file.schema_arrow.names
        batches = file.iter_batches(
            batch_size=1024, columns=[column for column in file_columns if column in columns]
        )
        yield from ((batch, file_columns) for batch in batches)
