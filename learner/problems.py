"""The problems of a run: read from wherever `[data]` says, checked row by row, kept in the run directory.

data files ──▶ rows ──▶ problems ──▶ RUN/data/train.jsonl, eval.jsonl      what every process of the run reads
                 └─ bad ones ──▶ RUN/bad_rows.jsonl
"""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from prefixrl.common.config import RunConfig
from prefixrl.common.data_section import EVAL_FILE, TRAIN_FILE, DataConfig, Source
from prefixrl.common.errors import DataError
from prefixrl.common.process import write_atomically
from prefixrl.learner.broker.prompts import Mixture
from prefixrl.learner.data import files
from prefixrl.learner.data.lengths import too_long
from prefixrl.learner.data.rows import Problem as Problem
from prefixrl.learner.data.rows import is_wanted, layout, problem

log = logging.getLogger(__name__)

SHOWN_BAD_ROWS = 10
BAD_ROWS_FILE = "bad_rows.jsonl"


class BadRow(msgspec.Struct, frozen=True):
    """A row that cannot be used, a line of `bad_rows.jsonl`."""

    source: str
    file: str
    row: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file} row {self.row}: {self.reason}"


@dataclass(frozen=True)
class ReadRow:
    """A row of a source."""

    place: BadRow
    """Where it stands; without a reason where it is a problem."""
    problem: Problem | None
    values: Mapping[str, object] = field(default_factory=dict)
    """Its columns as they are; none where it cannot be read."""


@dataclass
class SourceReport:
    """What became of the rows of one source."""

    label: str
    path: str
    rows: int = 0
    kept: int = 0
    left_out: int = 0
    """By `where` and `without`."""
    bad: list[BadRow] = field(default_factory=list)

    def __str__(self) -> str:
        parts = [f"{self.kept} problems of {self.rows} rows"]
        parts += [f"{self.left_out} left out by where and without"] if self.left_out else []
        parts += [f"{len(self.bad)} bad rows skipped"] if self.bad else []
        return f"{self.label}: {', '.join(parts)}"


@dataclass(frozen=True)
class Loaded:
    """Problems source by source in the order of the config, and what became of the other rows."""

    problems: list[Problem]
    sources: list[SourceReport]
    places: dict[str, BadRow]
    """By prompt id: where a problem stands, without a reason."""

    @property
    def bad(self) -> list[BadRow]:
        """Of all sources."""
        return [row for source in self.sources for row in source.bad]


# --- reading ---------------------------------------------------------------------------------------------------------


def load(sources: Sequence[Source], data: DataConfig) -> list[Problem]:
    """The problems of some sources; see `read`."""
    return read(sources, data).problems


def read(sources: Sequence[Source], data: DataConfig) -> Loaded:
    """Read sources one after the other.

    Raises:
        DataError: a source cannot be read or holds no problem; with `data.on_bad_row = "stop"` also bad rows, up to ten with
            their reasons.
    """
    loaded = Loaded([], [], {})
    for source, label in zip(sources, labels(sources), strict=True):
        report = SourceReport(label, source.path or "")
        loaded.sources.append(report)
        is_marked = len(sources) > 1 or source.name is not None
        for found in rows_of(source, data, report):
            row, each = found.place, found.problem
            if each is None:
                report.bad.append(row)
                continue
            if is_marked:
                each = msgspec.structs.replace(each, prompt_id=f"{label}:{each.prompt_id}")
            if each.prompt_id in loaded.places:
                first = loaded.places[each.prompt_id]
                reason = f"id {each.prompt_id!r} stands in {first.file} row {first.row} already"
                report.bad.append(msgspec.structs.replace(row, reason=reason))
                continue
            loaded.places[each.prompt_id] = row
            loaded.problems.append(each)
            report.kept += 1
        _complain(report, data)
    return loaded


def labels(sources: Sequence[Source]) -> list[str]:
    """A name per source, a number behind those that would be the same."""
    found: list[str] = []
    for source in sources:
        others = sum(each == source.label or each.startswith(f"{source.label}-") for each in found)
        found.append(f"{source.label}-{others + 1}" if source.label in found else source.label)
    return found


def rows_of(
    source: Source, data: DataConfig, report: SourceReport, needs_all: bool = True
) -> Iterator[ReadRow]:
    """Every row of a source in its order, but for those that `where` and `without` leave out; counted in the report.

    `needs_all`: a row without a gold answer, or without an id or family that has a column, is a bad one; else all it needs is a
    question, and the gold answer of its problem may be "".
    """
    excluded = _questions(source.without, data, report)
    shape = layout(source, data)
    if not needs_all:
        shape = replace(shape, must_have_answer=False, must_have_id=False, must_have_family=False)
    root, found = _files(source)
    for row in files.rows(root, found, shape.columns):
        report.rows += 1
        place = BadRow(report.label, row.file, row.number, row.error)
        if row.values is None:
            yield ReadRow(place, None)
            continue
        in_file = f"{row.file}-{row.number}" if len(found) > 1 else str(row.number)
        row_id = row.file if row.is_whole_file else in_file
        try:
            if not is_wanted(row.values, shape):
                report.left_out += 1
                continue
            each = problem(row.values, shape, row_id, report.label)
        except ValueError as error:
            yield ReadRow(msgspec.structs.replace(place, reason=str(error)), None, row.values)
            continue
        if excluded and _plain(each.question.removesuffix(shape.suffix)) in excluded:
            report.left_out += 1
            continue
        yield ReadRow(place, each, row.values)


def _files(source: Source) -> tuple[Path, list[Path]]:
    """File or folder of a source, and the data files of it."""
    assert source.path is not None, "a resolved source"
    root, known = files.local(source.path), source.problem_set
    subset = source.subset or (known.subset if known else "") or None
    return root, files.data_files(root, subset, source.split or (known.split if known else None))


def input_files(sources: Sequence[Source]) -> list[Path]:
    """Every file that the problems of some sources follow from, in a fixed order; raises DataError as `read`."""
    return [
        path for source in sources for path in [*_files(source)[1], *input_files(source.without)]
    ]


def _questions(sources: Sequence[Source], data: DataConfig, report: SourceReport) -> frozenset[str]:
    """What other sources ask; their bad rows are reported with this one's."""
    found: set[str] = set()
    for source in sources:
        other = replace(report, label=f"{report.label} without {source.label}", rows=0, bad=[])
        bare = source.model_copy(update={"suffix": ""})
        for row in rows_of(bare, data, other):
            if row.problem is None:
                other.bad.append(row.place)
            else:
                found.add(_plain(row.problem.question))
        report.bad += other.bad
    return frozenset(found)


def _plain(question: str) -> str:
    """A question without its spacing, which differs between copies of a set."""
    return "".join(question.split())


def _complain(report: SourceReport, data: DataConfig) -> None:
    shown = "".join(f"\n  {row}" for row in report.bad[:SHOWN_BAD_ROWS])
    rest = len(report.bad) - SHOWN_BAD_ROWS
    shown += f"\n  and {rest} more" if rest > 0 else ""
    if report.bad and data.on_bad_row == "stop":
        raise DataError(
            f"{report.path}: {len(report.bad)} bad rows; mend or remove them, or leave them out with data.on_bad_row = "
            f'"skip"{shown}'
        )
    if not report.kept:
        reasons = f"; {len(report.bad)} bad rows{shown}" if report.bad else ""
        raise DataError(
            f"{report.path} holds no problem: {report.rows} rows, {report.left_out} left out by where and without{reasons}"
        )


# --- the problems of a run -------------------------------------------------------------------------------------------


def read_all(config: RunConfig) -> tuple[Loaded, Loaded]:
    """Training and held-out problems, those left out that no prompt has room for.

    Raises:
        DataError: as `read`.
    """
    train = _fitting(read(config.data.train, config.data), config)
    mixture(config, train.problems)
    return train, _fitting(read(config.data.eval, config.data), config)


def _fitting(loaded: Loaded, config: RunConfig) -> Loaded:
    reasons = too_long(loaded.problems, config)
    if not reasons:
        return loaded
    reports = {report.label: report for report in loaded.sources}
    for prompt_id, reason in reasons.items():
        place = loaded.places[prompt_id]
        reports[place.source].bad.append(msgspec.structs.replace(place, reason=reason))
        reports[place.source].kept -= 1
    for report in loaded.sources:
        _complain(report, config.data)
    return replace(
        loaded, problems=[each for each in loaded.problems if each.prompt_id not in reasons]
    )


def keep(directory: Path, train: Loaded, held: Loaded) -> list[Problem]:
    """Write the problems and the bad rows to a run directory; returns the training problems in force.

    A run that goes on keeps the training problems it began with: the journal names them by their place.
    """
    (directory / TRAIN_FILE).parent.mkdir(exist_ok=True)
    if not (directory / TRAIN_FILE).exists():
        _write(directory / TRAIN_FILE, train.problems)
    _write(directory / EVAL_FILE, held.problems)
    _report(directory, train, held)
    return _read(directory / TRAIN_FILE)


def keep_missing(config: RunConfig) -> None:
    """Read and keep those problems that a run directory does not hold; raises DataError as `read`."""
    directory = Path(config.directory)
    (directory / TRAIN_FILE).parent.mkdir(exist_ok=True)
    read_now = []
    for name, sources in ((TRAIN_FILE, config.data.train), (EVAL_FILE, config.data.eval)):
        if not (directory / name).exists():
            read_now.append(loaded := _fitting(read(sources, config.data), config))
            _write(directory / name, loaded.problems)
    _report(directory, *read_now)


def _report(directory: Path, *read_now: Loaded) -> None:
    """Log what became of the rows and write the bad ones down."""
    bad = [row for loaded in read_now for row in loaded.bad]
    _write(directory / BAD_ROWS_FILE, bad)
    for report in (each for loaded in read_now for each in loaded.sources):
        log.info("%s", report)
    if bad:
        shown = "".join(f"\n  {row}" for row in bad[:SHOWN_BAD_ROWS])
        log.warning(
            "%d bad rows are skipped (all in %s)%s", len(bad), directory / BAD_ROWS_FILE, shown
        )


def keep_none(directory: Path) -> None:
    """Make a directory that of a run without problems: one whose broker is only asked."""
    (directory / TRAIN_FILE).parent.mkdir(exist_ok=True)
    _write(directory / TRAIN_FILE, ())


def mixture(config: RunConfig, train: Sequence[Problem]) -> Mixture | None:
    """The weights of the sources whose problems `train` holds one source after the other; None without weights.

    Raises:
        DataError: a source has so little weight that nothing of it would be trained.
    """
    weights = config.data.weights
    if weights is None:
        return None
    counts = Counter(each.source for each in train)
    try:
        return Mixture([counts[label] for label in labels(config.data.train)], weights)
    except ValueError as error:
        raise DataError(f"data.train: {error}") from None


def training(config: RunConfig) -> list[Problem]:
    """The training problems of a run, in the order of the config; of one that no learner began, as they can be read now."""
    kept = Path(config.directory) / TRAIN_FILE
    return _read(kept) if kept.exists() else load(config.data.train, config.data)


def held_out(config: RunConfig) -> list[Problem]:
    """The held-out problems of a run."""
    kept = Path(config.directory) / EVAL_FILE
    return _read(kept) if kept.exists() else load(config.data.eval, config.data)


def _write(path: Path, rows: Sequence[Problem] | Sequence[BadRow]) -> None:
    write_atomically(path, "".join(msgspec.json.encode(row).decode() + "\n" for row in rows))


def _read(path: Path) -> list[Problem]:
    decoder = msgspec.json.Decoder(Problem)
    with path.open("rb") as file:
        return [decoder.decode(line) for line in file]
