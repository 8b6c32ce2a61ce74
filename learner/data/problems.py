"""The problems of a run: read from the sources of `[data]`, checked, kept in its directory.

data files ──▶ rows ──▶ problems ──▶ RUN/data/train.jsonl, eval.jsonl      read by every process of the run
                 └─ bad ones ──▶ RUN/bad_rows.jsonl
"""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, count, islice
from pathlib import Path

import msgspec

from prefixrl.common.config.data import EVAL_FILE, TRAIN_FILE, DataConfig, Source
from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import ConfigError, DataError
from prefixrl.common.run import json_lines
from prefixrl.learner.data import files
from prefixrl.learner.data.columns import MissingColumn, is_blank
from prefixrl.learner.data.doubts import doubts, plain
from prefixrl.learner.data.lengths import unaskable
from prefixrl.learner.data.order import Mixture
from prefixrl.learner.data.rows import Layout, is_wanted, layout, problem, settled
from prefixrl.learner.data.rows import Problem as Problem

log = logging.getLogger(__name__)

SHOWN_BAD_ROWS = 10
BAD_ROWS_FILE = "bad_rows.jsonl"
USUAL_COLUMNS = "'question' = 'answer'"
GUESSED_ROWS = 256
"""First rows that decide on columns and readings that no key names."""


class BadRow(msgspec.Struct, frozen=True):
    """A row that cannot be used, a line of `bad_rows.jsonl`; without a reason, the place of a good one."""

    source: str
    file: str
    row: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file} row {self.row}: {self.reason}"


@dataclass(frozen=True)
class ReadRow:
    """A row of a source, with its columns if it can be read."""

    origin: BadRow
    """Its file and number; without a reason where it is a problem."""
    problem: Problem | None
    values: Mapping[str, object] = field(default_factory=dict)


@dataclass
class SourceReport:
    """Counts of the rows of one source, and its bad rows."""

    label: str
    path: str
    rows: int = 0
    accepted: int = 0
    left_out: int = 0
    bad: list[BadRow] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    layout: Layout | None = None
    columns: list[str] = field(default_factory=list)
    """Names of the columns of its first row that say something."""

    def __str__(self) -> str:
        parts = [f"{self.accepted} problems of {self.rows} rows"]
        parts += [f"{self.left_out} left out by where and without"] if self.left_out else []
        parts += [f"{len(self.bad)} bad rows skipped"] if self.bad else []
        read_as = str(self.layout) if self.layout and self.layout.is_plain else ""
        parts += [f"read as {read_as}"] if read_as not in ("", USUAL_COLUMNS) else []
        return f"{self.label}: {', '.join(parts)}"


@dataclass(frozen=True)
class Loaded:
    """Problems source by source in the order of the config, with a report per source."""

    problems: list[Problem]
    sources: list[SourceReport]
    origins: dict[str, BadRow]
    """File and row number of each problem by prompt id, without a reason."""

    @property
    def bad(self) -> list[BadRow]:
        """Bad rows of all sources."""
        return [row for source in self.sources for row in source.bad]


def load(sources: Sequence[Source], data: DataConfig) -> list[Problem]:
    """Return the problems of some sources; see `read`."""
    return read(sources, data).problems


def read(sources: Sequence[Source], data: DataConfig) -> Loaded:
    """Read sources in turn; raise DataError for an unreadable or empty one, or bad rows."""
    loaded = Loaded([], [], {})
    for source, label in zip(sources, labels(sources), strict=True):
        report = SourceReport(label, source.path or "")
        loaded.sources.append(report)
        is_marked = len(sources) > 1 or source.name is not None
        for read_row in rows_of(source, data, report):
            row, parsed = read_row.origin, read_row.problem
            if parsed is None:
                report.bad.append(row)
                continue
            # Ids are often row numbers, which begin again in every source.
            if is_marked:
                parsed = msgspec.structs.replace(parsed, prompt_id=f"{label}:{parsed.prompt_id}")
            # Results are kept by id, so two problems of one id could not be told apart.
            if first := loaded.origins.get(parsed.prompt_id):
                reason = f"id {parsed.prompt_id!r} stands in {first.file} row {first.row} already"
                report.bad.append(msgspec.structs.replace(row, reason=reason))
                continue
            loaded.origins[parsed.prompt_id] = row
            loaded.problems.append(parsed)
            report.accepted += 1
        _check(report, data)
        # `_check` refused a source without problems: -0 would take the problems of all sources.
        problems = loaded.problems[-report.accepted :]
        if source.keep_system and not any(each.system for each in problems):
            raise DataError(
                f"keep_system has no effect: no row of {report.path} has a system turn; leave it out"
            )
        assert report.layout, "a source with a problem has been read"
        report.warnings = doubts(problems, source, report.layout, report.columns)
    return loaded


def labels(sources: Sequence[Source]) -> list[str]:
    """Return a name per source, with a number behind a name that an earlier source has."""
    label_names: list[str] = []
    for source in sources:
        names = (f"{source.label}-{number}" for number in count(2))
        label_names.append(
            next(name for name in chain([source.label], names) if name not in label_names)
        )
    return label_names


def rows_of(
    source: Source, data: DataConfig, report: SourceReport, needs_all: bool = True
) -> Iterator[ReadRow]:
    """Yield the rows of a source that are not left out, count all; `needs_all`: a row without a gold is bad."""
    excluded = _questions(source.without, data, report)
    shape = layout(source, data)
    shape = shape if needs_all else replace(shape, needed=frozenset())
    root, paths = _files(source)
    rows = files.rows(root, paths, shape.columns)
    # The first rows settle which columns are read, and are then read like all others.
    first = list(islice(rows, GUESSED_ROWS))
    report.layout = shape = settled(shape, [row.values for row in first if row.values is not None])
    for row in chain(first, rows):
        values = row.values or {}
        report.columns = report.columns or [
            name for name in row.columns or values if not is_blank(values.get(name, 0))
        ]
        report.rows += 1
        origin = BadRow(report.label, row.file, row.number, row.error)
        if row.values is None:
            yield ReadRow(origin, None)
            continue
        # Where the data has no ids, a row's number is its id; several files repeat numbers.
        in_file = f"{row.file}-{row.number}" if len(paths) > 1 else str(row.number)
        row_id = row.file if row.is_whole_file else in_file
        try:
            parsed = (
                problem(row.values, shape, row_id, report.label)
                if is_wanted(row.values, shape)
                else None
            )
        except (ValueError, RecursionError) as error:
            reason = str(error)
            if isinstance(error, MissingColumn):
                reason += f"; the row has {', '.join(sorted(row.columns or row.values))}"
                reason += "; question_column and answer_column name others" * shape.is_plain
            yield ReadRow(msgspec.structs.replace(origin, reason=reason), None, row.values)
            continue
        # The other source was read without an ending of its own, so this one's is left out too.
        if parsed is None or (
            excluded and plain(parsed.question.removesuffix(shape.ending(parsed.code))) in excluded
        ):
            report.left_out += 1
        else:
            yield ReadRow(origin, parsed, row.values)


def _files(source: Source) -> tuple[Path, list[Path]]:
    """Return the file or folder of a source, and its data files."""
    assert source.path is not None, "a resolved source"
    root, problem_set = files.local(source.path), source.problem_set
    subset = source.subset or (problem_set.subset if problem_set else "") or None
    other_subsets = problem_set.other_subsets if problem_set and not source.subset else ()
    # Each split that the user names must be there: of "train+validation" train alone may be half the data.
    for split in source.split.split("+") if source.split else ():
        files.data_files(root, subset, split, other_subsets)
    return root, files.data_files(
        root, subset, source.split or (problem_set.split if problem_set else None), other_subsets
    )


def input_files(sources: Sequence[Source]) -> list[Path]:
    """Return every file that some problems follow from, in a fixed order; raise as `read`."""
    return [
        path for source in sources for path in [*_files(source)[1], *input_files(source.without)]
    ]


def _questions(sources: Sequence[Source], data: DataConfig, report: SourceReport) -> frozenset[str]:
    """Return the questions of other sources; report their bad rows with this one's."""
    excluded: set[str] = set()
    for source in sources:
        other = replace(report, label=f"{report.label} without {source.label}", rows=0, bad=[])
        for row in rows_of(
            source.model_copy(update={"suffix": "", "task_suffix": None}), data, other
        ):
            if row.problem is None:
                other.bad.append(row.origin)
            else:
                excluded.add(plain(row.problem.question))
        report.bad += other.bad
    return frozenset(excluded)


def _check(report: SourceReport, data: DataConfig) -> None:
    """Raise DataError where a source has no problem, or bad rows that end the start."""
    lines = first_bad_rows(report.bad)
    if report.bad and data.on_bad_row == "stop":
        raise DataError(
            f"{report.path}: {len(report.bad)} bad rows; repair or remove them, or leave them out with "
            f'data.on_bad_row = "skip"{lines}'
        )
    if not report.accepted:
        reasons = f"; {len(report.bad)} bad rows{lines}" if report.bad else ""
        counts = f"{report.rows} rows, {report.left_out} left out by where and without"
        raise DataError(f"{report.path} holds no problem: {counts}{reasons}")


def read_all(config: RunConfig) -> tuple[Loaded, Loaded]:
    """Return training and held-out problems that fit into a prompt; DataError, ConfigError."""
    train = _fitting(read(config.data.train, config.data), config)
    mixture(config, train.problems)
    warmup, steps = config.algorithm.critic_warmup_steps, config.steps_in_all(len(train.problems))
    if warmup >= steps:
        raise ConfigError(
            f"algorithm.critic_warmup_steps = {warmup}: the run has {steps} optimiser steps, so the adapter would "
            f"never learn; lower it, or make the run longer (algorithm.iterations, data.epochs)"
        )
    return train, _fitting(read(config.data.eval, config.data), config)


def count_shared(train: Sequence[Problem], held_out: Sequence[Problem]) -> int:
    """Return how many held-out questions stand in the training data too, whatever their spacing."""
    trained = {plain(each.question) for each in train}
    return sum(plain(each.question) in trained for each in held_out)


def shared_lines(train: Loaded, held_out: Loaded) -> list[str]:
    """Return a warning where held-out questions are trained too."""
    if not (both := count_shared(train.problems, held_out.problems)):
        return []
    return [
        f"{both} of {len(held_out.problems)} questions of data.eval are in data.train too, so that its accuracy is "
        f"partly that of training; take another split, or leave them out with `without`"
    ]


def _fitting(loaded: Loaded, config: RunConfig) -> Loaded:
    reasons = unaskable(loaded.problems, config)
    if not reasons:
        return loaded
    reports = {report.label: report for report in loaded.sources}
    for prompt_id, reason in reasons.items():
        origin = loaded.origins[prompt_id]
        reports[origin.source].bad.append(msgspec.structs.replace(origin, reason=reason))
        reports[origin.source].accepted -= 1
    for report in loaded.sources:
        _check(report, config.data)
    return replace(
        loaded, problems=[each for each in loaded.problems if each.prompt_id not in reasons]
    )


def keep(directory: Path, train: Loaded, held_out: Loaded) -> list[Problem]:
    """Write problems and bad rows to a run directory; return the run's training problems."""
    (directory / TRAIN_FILE).parent.mkdir(exist_ok=True)
    # A resumed run keeps those it began with: the journal names them by their index.
    if not (directory / TRAIN_FILE).exists():
        json_lines.write(directory / TRAIN_FILE, train.problems)
    json_lines.write(directory / EVAL_FILE, held_out.problems)
    _report(directory, train, held_out)
    for warning in shared_lines(train, held_out):
        log.warning("%s", warning)
    return _read(directory / TRAIN_FILE)


def keep_missing(config: RunConfig) -> None:
    """Read and keep the problems that a run directory does not hold; raise as `read`."""
    directory = Path(config.directory)
    (directory / TRAIN_FILE).parent.mkdir(exist_ok=True)
    read_now = []
    for name, sources in ((TRAIN_FILE, config.data.train), (EVAL_FILE, config.data.eval)):
        if not (directory / name).exists():
            read_now.append(loaded := _fitting(read(sources, config.data), config))
            json_lines.write(directory / name, loaded.problems)
    _report(directory, *read_now)


def _report(directory: Path, *read_now: Loaded) -> None:
    """Log a line per source and write the bad rows to a file."""
    bad = [row for loaded in read_now for row in loaded.bad]
    json_lines.write(directory / BAD_ROWS_FILE, bad)
    for report in (each for loaded in read_now for each in loaded.sources):
        log.info("%s", report)
        for warning in report.warnings:
            log.warning("%s: %s", report.label, warning)
    if bad:
        log.warning(
            "%d bad rows are skipped (all in %s)%s",
            len(bad),
            directory / BAD_ROWS_FILE,
            first_bad_rows(bad),
        )


def first_bad_rows(bad: Sequence[object]) -> str:
    """Return lines on the first bad rows."""
    more = [f"and {len(bad) - SHOWN_BAD_ROWS} more"] if len(bad) > SHOWN_BAD_ROWS else []
    return "".join(f"\n  {row}" for row in [*bad[:SHOWN_BAD_ROWS], *more])


def mixture(config: RunConfig, train: Sequence[Problem]) -> Mixture | None:
    """Return the mixture by `data.weights`, if any; raise DataError if it leaves a source out."""
    if (weights := config.data.weights) is None:
        return None
    counts = Counter(each.source for each in train)
    try:
        return Mixture([counts[label] for label in labels(config.data.train)], weights)
    except ValueError as error:
        raise DataError(f"data.train: {error}") from None


def as_asked(config: RunConfig, loaded: Sequence[Problem]) -> list[Problem]:
    """Return training problems about as often as an epoch asks them."""
    mixed = mixture(config, loaded)
    if mixed is None:
        return list(loaded)
    starts = accumulate(mixed.sizes, initial=0)
    shares = zip(starts, mixed.sizes, mixed.counts, strict=False)
    return [
        loaded[start + each * size // asked]
        for start, size, asked in shares
        for each in range(asked)
    ]


def training(config: RunConfig) -> list[Problem]:
    """Return the training problems of a run; before its start, from the sources."""
    return _of_run(config, TRAIN_FILE, config.data.train)


def held_out(config: RunConfig) -> list[Problem]:
    """Return the held-out problems of a run."""
    return _of_run(config, EVAL_FILE, config.data.eval)


def _of_run(config: RunConfig, name: str, sources: Sequence[Source]) -> list[Problem]:
    path = Path(config.directory) / name
    return _read(path) if path.exists() else load(sources, config.data)


def _read(path: Path) -> list[Problem]:
    return msgspec.json.Decoder(Problem).decode_lines(path.read_bytes())
