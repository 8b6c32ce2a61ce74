"""The functions of every job's script, in bash, with programs in place of SLURM's commands."""

import os
import subprocess
from importlib.resources import files
from pathlib import Path

import pytest

SCRIPT = """
run={folder} learner_names=learner.a,run.a restarts=0
{functions}
controller_s={controller_s}
start_rollout_0() {{ exit 4; }}
supervise rollout_0
"""
SQUEUE = """
case "$*" in *--jobs=*) echo RUNNING; exit 0 ;; esac
echo asked >>asked
[ "$(wc -l <asked)" -gt {failures} ] || {{ echo 'Unable to contact slurm controller' >&2; exit 1; }}
echo "{queued}"
"""
SCONTROL = """
[ "$1" = show ] && exit 0
echo "$*" >called
kill -KILL $PPID
"""


def supervised(folder: Path, failures: int, queued: str, controller_s: int) -> tuple[str, int, str]:
    """A worker that lost its learner, while squeue fails so many times: what was requeued, exit code, log."""
    texts = {"squeue": SQUEUE.format(failures=failures, queued=queued), "scontrol": SCONTROL}
    for name, text in (texts | {"sleep": "exec /bin/sleep 0.05", "scancel": ""}).items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o700)
    (folder / "slurm").mkdir()
    functions = (
        files("prefixrl.deploy.slurm")
        .joinpath("templates/supervise.sh")
        .read_text(encoding="utf-8")
    )
    script = SCRIPT.format(folder=folder, functions=functions, controller_s=controller_s)
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    called = folder / "called"
    return called.read_text().strip() if called.exists() else "", done.returncode, done.stderr


@pytest.mark.parametrize("failures", [0, 3])
def test_a_worker_whose_learner_is_queued_is_queued_again_also_if_the_controller_is_down_for_a_moment(
    failures: int, tmp_path: Path
) -> None:
    called, _, log = supervised(tmp_path, failures, "12", controller_s=60)
    assert called == "requeue 7", log
    assert log.count("squeue failed: asking again for 60 s") == min(failures, 1)


def test_a_worker_whose_learner_is_not_queued_ends(tmp_path: Path) -> None:
    called, code, log = supervised(tmp_path, 2, "", controller_s=60)
    assert (called, code) == ("", 4)
    assert "no learner of this run is queued" in log


def test_a_controller_that_never_answers_is_not_taken_for_an_empty_queue(tmp_path: Path) -> None:
    called, code, log = supervised(tmp_path, 10**6, "12", controller_s=1)
    assert (called, code) == ("", 4)
    assert "squeue gave no answer in 1 s" in log
    assert "whether a learner of this run is queued is not known" in log
    assert "no learner of this run" not in log
