"""`prefixrl export`: what a table holds is what `metrics.jsonl` holds."""

import csv
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from pyarrow import parquet

from prefixrl.common.run.directory_format import write_format
from prefixrl.common.run.documents import METRICS_FILE, MetricsLine, columns
from prefixrl.deploy.__main__ import main
from support.runs.metrics_lines import metrics_line, write_metrics


def exported(run: Path, out: Path) -> Result:
    return CliRunner().invoke(main, ["export", str(run), "--out", str(out)], catch_exceptions=False)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    directory = tmp_path / "run"
    directory.mkdir()
    write_format(directory)
    write_metrics(directory, [metrics_line(iteration) for iteration in range(3)])
    return directory


def numbers(value: Any) -> list[float]:
    """Every number below a value of JSON, in order."""
    if isinstance(value, dict | list):
        return [
            each
            for part in (value.values() if isinstance(value, dict) else value)
            for each in numbers(part)
        ]
    return [float(value)] if isinstance(value, int | float) else []


def test_every_number_of_a_line_has_a_column_of_its_own() -> None:
    line = metrics_line(2)
    document = msgspec.json.decode(msgspec.json.encode(line))
    kept = {name: each for name, each in document.items() if name not in ("histograms", "engines")}
    actual = columns(line)
    assert sorted(actual.values()) == sorted(numbers(kept))
    assert actual["figures/reward"] == line.figures["reward"]
    assert actual["busy_fraction/scorer"] == 0.9
    assert actual["drift/1/rows"] == 8
    assert "probe_slope" not in actual


def test_a_csv_and_a_parquet_file_hold_the_lines_of_the_run(run: Path, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in (run / METRICS_FILE).read_text().splitlines()]
    expected = [columns(msgspec.convert(line, MetricsLine)) for line in lines]
    assert (
        exported(run, tmp_path / "table.csv").output
        == f"wrote 3 iterations to {tmp_path / 'table.csv'}\n"
    )
    with (tmp_path / "table.csv").open() as file:
        actual = [
            {name: float(text) for name, text in row.items() if text}
            for row in csv.DictReader(file)
        ]
    assert actual == expected
    exported(run, tmp_path / "table.parquet")
    rows = parquet.read_table(tmp_path / "table.parquet").to_pylist()
    assert [
        {name: each for name, each in row.items() if each is not None} for row in rows
    ] == expected


def test_another_kind_of_file_and_a_run_without_an_iteration_are_refused(
    run: Path, tmp_path: Path
) -> None:
    refused = exported(run, tmp_path / "table.xlsx")
    assert refused.exit_code == 2 and "ends in .csv or .parquet" in refused.output
    (run / METRICS_FILE).unlink()
    empty = exported(run, tmp_path / "table.csv")
    assert empty.exit_code == 2 and "no iteration is trained yet" in empty.output
    assert not (tmp_path / "table.csv").exists()


def test_a_place_that_cannot_be_written_is_one_message(run: Path, tmp_path: Path) -> None:
    refused = exported(run, tmp_path / "nowhere" / "table.csv")
    assert (
        refused.exit_code == 2 and "cannot be written: No such file or directory" in refused.output
    )
