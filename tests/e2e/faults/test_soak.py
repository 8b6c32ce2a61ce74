"""Workers, brokers and learners are killed at random: the history has no fault.

The soak is a process of its own: what it forks must find `benchmarks` at the root, which is not on the tests' path.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.results import ROOT
from prefixrl.deploy.runs.inspect import checked

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(400)]


def test_whoever_is_killed_every_group_is_trained_once_within_the_window(tmp_path: Path) -> None:
    figures = tmp_path / "soak.json"
    command = [
        sys.executable,
        "-m",
        "benchmarks.soak",
        "--quick",
        "--json",
        str(figures),
        "--folder",
        str(tmp_path),
    ]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=390, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads(figures.read_text())
    value = {each["name"]: each["value"] for each in report["figures"]}
    assert report["details"]["faults"] == []
    assert value["samples trained"] >= 12_000
    assert value["kills: scorer"] and value["kills: learner"]
    assert checked(tmp_path / "run").endswith("no fault")
