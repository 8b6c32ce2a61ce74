"""Crash points kill a process once; each stands in the code in one place, and costs nothing where none is asked for."""

import re
import signal
import subprocess
import sys
from pathlib import Path

from prefixrl.common.journal.crash_points import FOLDER_VARIABLE, POINTS, VARIABLE
from support.fakes import wait_until
from support.paths import ROOT

PROGRAM = """
from prefixrl.common.journal.crash_points import crash_point

for _ in range(3):
    crash_point("journal.synced")
"""


def run(wanted: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    environment = {"PATH": "", VARIABLE: wanted, FOLDER_VARIABLE: str(folder)}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True
    )


def test_a_process_is_killed_at_the_passage_that_is_asked_for_and_no_other_after_it(
    tmp_path: Path,
) -> None:
    assert run("journal.synced:4", tmp_path).returncode == 0
    assert run("checkpoint.begun,journal.synced:3", tmp_path).returncode == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == ["journal.synced"]
    assert run("journal.synced:3", tmp_path).returncode == 0
    assert run("", tmp_path).returncode == 0


def test_a_process_hangs_where_it_is_to_hang(tmp_path: Path) -> None:
    environment = {"PATH": "", VARIABLE: "journal.synced:2:hang", FOLDER_VARIABLE: str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], env=environment)
    wait_until(lambda: (tmp_path / "journal.synced").exists(), "the point")
    assert process.poll() is None
    process.kill()
    process.wait()


def test_a_point_that_is_none_is_refused_by_name(tmp_path: Path) -> None:
    result = run("journal.lost", tmp_path)
    assert (
        result.returncode != 0
        and "names 'journal.lost'; the points are journal.begun," in result.stderr
    )


def test_every_point_stands_in_the_code_in_one_place() -> None:
    folders = [ROOT / name for name in ("common", "learner", "rollout", "scorer", "deploy")]
    code = "".join(path.read_text() for folder in folders for path in folder.rglob("*.py"))
    assert sorted(re.findall(r'crash_point\("([a-z.]+)"\)', code)) == sorted(POINTS)
