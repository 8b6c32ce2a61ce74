"""`prefixrl export`: the metrics of a run as one table, a row per iteration."""

import csv
from itertools import chain
from pathlib import Path

import click

from prefixrl.common.errors import ConfigError
from prefixrl.common.run.directory_format import check_format
from prefixrl.common.run.documents import columns, metrics_of
from prefixrl.deploy.runs.checkpoints import run_directory_argument

Table = tuple[list[str], list[dict[str, float]]]


@click.command("export")
@run_directory_argument
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, help="A .csv or .parquet file."
)
def export_command(run_directory: Path, out: Path) -> None:
    """Write the metrics of the run in RUN_DIRECTORY as a table, a row per iteration."""
    click.echo(f"wrote {export(run_directory, out)} iterations to {out}")


def table(directory: Path) -> Table:
    """Return all iterations; raises ConfigError if none is trained, DataError if damaged."""
    check_format(directory)
    rows = list(map(columns, metrics_of(directory)))
    if not rows:
        raise ConfigError(f"{directory}: no iteration is trained yet, so there are no metrics")
    return list(dict.fromkeys(chain.from_iterable(rows))), rows


def export(directory: Path, out: Path) -> int:
    """Write `out`, .csv or .parquet, and return its rows' number; absent values are empty."""
    if out.suffix not in (".csv", ".parquet"):
        raise ConfigError(f"--out {out}: name a file that ends in .csv or .parquet")
    names, rows = table(directory)
    try:
        _write(out, names, rows)
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written: {error.strerror}") from None
    return len(rows)


def _write(out: Path, names: list[str], rows: list[dict[str, float]]) -> None:
    if out.suffix == ".csv":
        with out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(rows)
        return
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise ConfigError(
            "Parquet needs pyarrow: pip install 'prefixrl[parquet]', or write .csv"
        ) from None
    arrow_table = pyarrow.table({name: [row.get(name) for row in rows] for name in names})
    parquet.write_table(arrow_table, str(out))
