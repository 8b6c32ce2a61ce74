"""A run through crash points and kills is bitwise the run that was left alone: `benchmarks/kills.py`, in small."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import ROOT


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_parameters_after_crashes_are_those_of_the_run_that_was_left_alone(tmp_path: Path) -> None:
    figures = tmp_path / "kills.json"
    command = [sys.executable, "-m", "benchmarks.kills", "--quick", "--json", str(figures)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    found = {each["name"]: each["value"] for each in json.loads(figures.read_text())["figures"]}
    assert found["disturbed runs at S = 0"] == found["of them bitwise equal to the one left alone"] >= 2
    assert found["crash points reached"] == 4 and found["SIGKILLs at random times"] >= 1
