"""The file that shows an iteration in one process: it trains, and trains well."""

import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import ROOT

PROGRAM = ROOT / "deploy" / "examples" / "minimal.py"
RUN_FILE = PROGRAM.parent / "arithmetic" / "run.toml"
MOST_LINES = 200
"""A reader takes it in at one sitting."""


def held_out(directory: Path, *settings: str) -> list[float]:
    """Run the file; return the accuracies that it prints."""
    command = [sys.executable, str(PROGRAM), str(RUN_FILE), f"directory={directory}", *settings]
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    lines = finished.stdout.splitlines()
    return [float(line.rpartition(" ")[2]) for line in lines if line.startswith("held out")]


def test_it_is_short() -> None:
    assert len(PROGRAM.read_text().splitlines()) <= MOST_LINES


@pytest.mark.slow
def test_it_trains_a_few_iterations(tmp_path: Path) -> None:
    before, after = held_out(
        tmp_path,
        "algorithm.iterations=2",
        "algorithm.groups_per_iteration=4",
        "algorithm.samples_per_prompt=2",
    )
    assert 0.0 < before < 0.5 and 0.0 < after < 0.5


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_it_trains_the_arithmetic_example_to_nine_of_ten(tmp_path: Path) -> None:
    before, after = held_out(tmp_path)
    assert before < 0.5 and after > 0.9
