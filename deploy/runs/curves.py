"""Curves of a run: the numbers of metrics.jsonl as columns that grow with the file, thinned for drawing.

    metrics.jsonl ── what was added ──▶ columns ── buckets of 2^k iterations ──▶ mean, low, high

A bucket that is full stays as it is, so that a viewer who has the beginning needs only the end.
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from math import nan
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from prefixrl.common.errors import DataError
from prefixrl.common.run.documents import METRICS_FILE, AlarmSpans, MetricsLine
from prefixrl.common.run.json_lines import AddedLines

MOST_POINTS = 500
GROUPS = (
    "figures",
    "busy_fraction",
    "tokens_per_s",
    "waited_for_s",
    "waiting_rows",
    "statuses",
    "pools",
)
SINGLE = ("mean_age", "trained_s", "waited_s", "publish_s", "since_start_s", "engine_mismatch")
LARGEST_AGE = "largest age"


class Thinned(NamedTuple):
    """Values of the buckets of a column; a bucket without any is nan."""

    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def thinned(values: Sequence[float] | np.ndarray, step: int) -> Thinned:
    """Return mean, lowest and highest of every `step` successive values; the last bucket may have fewer. Pure."""
    column = np.asarray(values, np.float64)
    if not column.size:
        return Thinned(column, column, column)
    begins = np.arange(0, column.size, step)
    is_there = ~np.isnan(column)
    counts = np.add.reduceat(is_there, begins, dtype=np.int64)
    sums = np.add.reduceat(np.where(is_there, column, 0.0), begins)
    means = np.divide(sums, counts, out=np.full(begins.size, nan), where=counts > 0)
    return Thinned(means, np.fmin.reduceat(column, begins), np.fmax.reduceat(column, begins))


def step_for(rows: int) -> int:
    """Return the smallest power of two of which `MOST_POINTS` buckets hold so many rows."""
    return 1 << (max(0, rows - 1) // MOST_POINTS).bit_length()


class Curves:
    """The columns of one run's metrics.jsonl, as far as it was read."""

    def __init__(self, directory: Path) -> None:
        self._added = AddedLines(directory / METRICS_FILE, begin_anew=self._begin_anew)
        self.generation = 0
        """Number of times that the file was replaced."""
        self._begin_anew()

    def _begin_anew(self) -> None:
        self.generation += 1
        self.iterations = array("q")
        self._columns: dict[str, array[float]] = {}
        self.alarms = AlarmSpans()

    def read(self) -> bool:
        """Read what was added, all of it where a resumed learner wrote the file anew; return True for any change.

        Raises DataError for a damaged line.
        """
        before = self.generation, self._added.offset
        for text in self._added.blocks():
            self._add(text)
        return before != (self.generation, self._added.offset)

    def _add(self, text: bytes) -> None:
        try:
            lines: list[Any] = _DECODER.decode_lines(text)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise DataError(
                f"{self._added.path} is damaged behind byte {self._added.offset}: {error}"
            ) from None
        rows = len(self.iterations)
        for name, values in _columns_of(lines):
            column = self._columns.setdefault(name, array("d"))
            column.extend([nan] * (rows - len(column)))
            column.extend(values)
        self.iterations.extend([line.iteration for line in lines])
        for line in lines:
            self.alarms.add(line.iteration, line.alarms)

    def document(self, since: int = 0) -> dict[str, object]:
        """Return the points starting at the bucket that contains row `since`.

        Return all points if the bucket size has changed.
        """
        rows = len(self.iterations)
        step = step_for(rows)
        first = 0 if since and step_for(since) != step else since // step
        begin = first * step
        document: dict[str, object] = {
            "step": step,
            "from": first,
            "iteration": self.iterations[begin::step].tolist(),
        }
        if not rows:
            return document
        points = {}
        for name, column in self._columns.items():
            whole = np.pad(column, (0, rows - len(column)), constant_values=nan)
            points[name] = thinned(whole[begin:], step)
        # A bucket of one row has no range.
        for field in ("mean",) if step == 1 else Thinned._fields:
            document[field] = {
                name: getattr(point, field).tolist() for name, point in points.items()
            }
        return document


_DRAWN = ("iteration", "ages", "alarms", *GROUPS, *SINGLE)
_FIELDS = [
    (each.name, each.type) for each in msgspec.structs.fields(MetricsLine) if each.name in _DRAWN
]
# To decode the whole of every line takes three times as long.
_DECODER = msgspec.json.Decoder(msgspec.defstruct("CurveLine", _FIELDS))


def _columns_of(lines: Sequence[Any]) -> Iterator[tuple[str, list[float]]]:
    """Yield the columns of successive lines under the names that `columns` gives them."""
    for group in GROUPS:
        rows: list[Mapping[str, float]] = [getattr(line, group) for line in lines]
        for key in dict.fromkeys(chain.from_iterable(rows)):
            yield f"{group}/{key}", [row.get(key, nan) for row in rows]
    for name in SINGLE:
        yield name, [getattr(line, name) for line in lines]
    yield LARGEST_AGE, [max(map(float, line.ages), default=0.0) for line in lines]
