"""The page of figures says what the benchmarks' files say."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from benchmarks.page import RESULTS, gpu_parts, names, page
from benchmarks.results import ROOT, Figure, Report


def test_the_committed_page_is_the_one_of_the_committed_figures() -> None:
    assert (ROOT / "benchmarks/RESULTS.md").read_text(encoding="utf-8") == page(RESULTS), (
        "python -m benchmarks --page"
    )


def test_every_committed_file_of_figures_is_of_a_benchmark_that_can_be_run_again() -> None:
    reports = [
        msgspec.json.decode(path.read_bytes(), type=Report) for path in RESULTS.glob("*.json")
    ]
    assert {report.benchmark for report in reports} <= {*names(), *gpu_parts()}


def test_a_figure_stands_with_what_it_is_compared_with_its_ratio_and_its_spread(
    tmp_path: Path,
) -> None:
    figure = Figure(
        "speed",
        "rows/s",
        12.0,
        3,
        (11.0, 13.0),
        8.0,
        "one thread",
        1.5,
        "median",
        "smallest and largest",
    )
    alone = Figure("memory", "MiB", 40.25, 1, (40.25, 40.25))
    report = Report("padding", True, {}, [figure, alone], None, "0123456789abcdef-dirty", 61.0)
    report.write(tmp_path / "padding.json")
    written = page(tmp_path)
    assert (
        "| speed | 12 rows/s, median | one thread: 8 | 1.5 | 3 | 11 to 13 (smallest and largest) |"
        in written
    )
    assert "| memory | 40.25 MiB | | | 1 | |" in written
    assert (
        "`python -m benchmarks.padding --quick --json FILE`; padding.json, commit `0123456789-dirty`"
        in written
    )
    assert "Prompts are lognormal" in written


def test_figures_too_many_for_the_page_are_on_one_of_their_own(tmp_path: Path) -> None:
    Report(
        "padding", False, {}, [Figure("memory", "MiB", 1.0, 1, (1.0, 1.0))] * 51, None, "unknown"
    ).write(tmp_path / "padding.json")
    (tmp_path / "padding.md").touch()
    assert "51 figures: [results/padding.md](results/padding.md)." in page(tmp_path)


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | environment,
        check=False,
    )


@pytest.mark.nightly
def test_a_benchmark_that_the_machine_lacks_something_for_is_left_out_with_the_reason_and_the_remedy(
    tmp_path: Path,
) -> None:
    without = run("--quick", "--only", "broker_peers", PATH=str(tmp_path))
    assert without.returncode == 0, without.stdout
    assert (
        "broker_peers: left out: there is no redis-server on the PATH; install it" in without.stdout
    )


@pytest.mark.nightly
def test_a_benchmark_runs_by_its_name_and_an_unknown_one_is_refused_with_those_there_are() -> None:
    done = run("--quick", "--only", "padding")
    assert done.returncode == 0 and "padding: done" in done.stdout
    assert "## Padding in one iteration" in (ROOT / "runs/benchmarks/RESULTS.md").read_text(
        encoding="utf-8"
    )
    refused = run("--only", "speed")
    assert (
        refused.returncode == 2 and "there is no benchmark ['speed']; there are" in refused.stderr
    )
