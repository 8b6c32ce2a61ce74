"""A run through crash points and kills is bitwise the run that was left alone: `benchmarks/kills.py`, in small.

One that is killed goes on wherever it is started again, and leaves nothing in temporary folders.
"""

import contextlib
import json
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from support.paths import ROOT
from support.runs.run_helper import (
    SMALL,
    check_books,
    command,
    launched,
    logs,
    trained_iterations,
    wait_for,
)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_parameters_after_crashes_are_those_of_the_run_that_was_left_alone(tmp_path: Path) -> None:
    figures = tmp_path / "kills.json"
    small = [sys.executable, "-m", "benchmarks.kills", "--quick", "--json", str(figures)]
    done = subprocess.run(small, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    actual = {each["name"]: each["value"] for each in json.loads(figures.read_text())["figures"]}
    assert (
        actual["disturbed runs at S = 0"]
        == actual["of them bitwise equal to the one left alone"]
        >= 2
    )
    assert actual["crash points reached"] == 4 and actual["SIGKILLs at random times"] >= 1


@pytest.mark.nightly
def test_a_killed_run_goes_on_under_another_host_name_and_leaves_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, temporary = tmp_path / "run", tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    renamed = ("unshare", "--uts", "sh", "-c", 'hostname elsewhere && exec "$@"', "sh")
    if subprocess.run([*renamed, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to rename a host")
    with launched(directory, *SMALL) as launch:
        wait_for(lambda: trained_iterations(directory) >= 3, "three iterations")
        for process in (
            psutil.Process(launch.pid),
            *psutil.Process(launch.pid).children(recursive=True),
        ):
            with contextlib.suppress(psutil.NoSuchProcess):  # it died with its parent
                process.kill()
    assert list(temporary.glob("prefixrl*")) != [], "what a killed run leaves"
    done = subprocess.run(
        [*renamed, *command(directory, *SMALL)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr + logs(directory)
    check_books(json.loads((directory / "summary.json").read_text()), directory)
    hosts = [
        json.loads(line)["host"] for line in (directory / "starts.jsonl").read_text().splitlines()
    ]
    assert hosts == [socket.gethostname(), "elsewhere"] and list(temporary.glob("prefixrl*")) == []
