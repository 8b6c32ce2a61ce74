"""Curves: columns as they are in metrics.jsonl, thinned without losing an extreme, read on from where they were."""

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixrl.common.errors import DataError
from prefixrl.common.run import json_lines
from prefixrl.common.run.documents import METRICS_FILE, alarm_spans, columns
from prefixrl.deploy.runs.curves import (
    GROUPS,
    LARGEST_AGE,
    MOST_POINTS,
    SINGLE,
    Curves,
    step_for,
    thinned,
)
from support.runs.metrics_lines import metrics_line, write_metrics

VALUES = st.lists(st.floats(-1e6, 1e6) | st.just(math.nan), max_size=200)


@given(VALUES, st.integers(0, 6), VALUES)
def test_a_bucket_keeps_mean_and_extremes_and_is_not_changed_by_later_values(
    values: list[float], power: int, later: list[float]
) -> None:
    step = 1 << power
    actual, longer = thinned(values, step), thinned(values + later, step)
    for place in range(len(actual.mean)):
        known = [each for each in values[place * step : (place + 1) * step] if not math.isnan(each)]
        got = [float(part[place]) for part in actual]
        expected = (
            [math.fsum(known) / len(known), min(known), max(known)] if known else [math.nan] * 3
        )
        assert got == pytest.approx(expected, abs=1e-6, nan_ok=True) and got[1:] == pytest.approx(
            expected[1:], nan_ok=True
        )
    full = len(values) // step
    assert all(
        np.array_equal(a[:full], b[:full], equal_nan=True)
        for a, b in zip(actual, longer, strict=True)
    )


@given(st.integers(0, 200_000))
def test_the_step_is_the_least_power_of_two_that_leaves_few_enough_points(rows: int) -> None:
    step = step_for(rows)
    assert -(-rows // step) <= MOST_POINTS and (step == 1 or -(-rows // (step // 2)) > MOST_POINTS)


def test_a_short_run_has_every_number_of_its_lines_and_a_viewer_goes_on_where_he_was(
    tmp_path: Path,
) -> None:
    lines = [metrics_line(n) for n in range(9)]
    write_metrics(tmp_path, lines[:6])
    curves = Curves(tmp_path)
    assert curves.read() and not curves.read()
    rows = [columns(line) for line in lines]
    expected = {
        name for row in rows for name in row if name in SINGLE or name.partition("/")[0] in GROUPS
    }
    json_lines.append(tmp_path / METRICS_FILE, lines[6:])
    assert curves.read()
    whole, end = (
        msgspec.json.decode(msgspec.json.encode(curves.document(since))) for since in (0, 6)
    )
    assert (
        whole["mean"].keys() == expected | {LARGEST_AGE}
        and whole["step"] == 1
        and "low" not in whole
    )
    for name in expected:
        assert whole["mean"][name] == [row.get(name) for row in rows]
        assert end["mean"][name] == whole["mean"][name][6:]
    assert (end["from"], end["iteration"]) == (6, [6, 7, 8])


def test_a_resumed_learner_writes_the_file_anew_and_a_torn_or_damaged_line_is_not_taken(
    tmp_path: Path,
) -> None:
    ringing = [
        msgspec.structs.replace(metrics_line(n), alarms={"ess": "old"} if n in (2, 3, 5) else {})
        for n in range(8)
    ]
    write_metrics(tmp_path, ringing)
    curves = Curves(tmp_path)
    assert curves.read() and curves.alarms.found == alarm_spans(ringing)
    assert [(each.first, each.last) for each in curves.alarms.found] == [(2, 3), (5, 5)]
    write_metrics(tmp_path, ringing[:4])
    assert (
        curves.read() and list(curves.iterations) == [0, 1, 2, 3] and len(curves.alarms.found) == 1
    )
    path = tmp_path / METRICS_FILE
    with path.open("ab") as file:
        file.write(b'{"iteration": 4')
    assert not curves.read()
    with path.open("ab") as file:
        file.write(b"\n")
    with pytest.raises(DataError, match="damaged behind byte"):
        curves.read()


def test_many_iterations_become_few_points_whose_lowest_and_highest_are_theirs(
    tmp_path: Path,
) -> None:
    write_metrics(tmp_path, [metrics_line(n, reward=n % 7) for n in range(1200)])
    curves = Curves(tmp_path)
    curves.read()
    document = curves.document()
    assert document["step"] == 4 and document["iteration"] == list(range(0, 1200, 4))
    assert (
        document["high"]["figures/reward"][0] == 3.03
        and document["low"]["figures/reward"][0] == 0.0
    )
    assert curves.document(1199)["from"] == 299 and curves.document(900)["from"] == 0, (
        "the step was another"
    )
