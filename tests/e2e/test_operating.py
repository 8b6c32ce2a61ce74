"""A launched run in the hands of its operator: listed, drained, watched, stopped."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from prefixrl.common.run.documents import END_FILE
from support.processes import is_alive
from support.runs.run_helper import SMALL, child, launched, logs, trained_iterations, wait_for

pytestmark = pytest.mark.slow
TWO_SCORERS = (*SMALL, "launch.scorers=2", "algorithm.iterations=2000")


def prefixrl(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "prefixrl.deploy", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def test_a_worker_is_drained_for_good_and_the_run_stops_in_order(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    with launched(directory, *TWO_SCORERS) as process:
        wait_for(lambda: trained_iterations(directory) >= 2, "training")
        watching = subprocess.Popen(
            [sys.executable, "-m", "prefixrl.deploy", "status", str(directory), "--watch"],
            stdout=subprocess.PIPE,
            text=True,
        )
        rows = [
            json.loads(line)
            for line in prefixrl("workers", directory, "--json").stdout.splitlines()
        ]
        assert [each["name"] for each in rows] == ["rollout-0", "scorer-0", "scorer-1"]
        pid = rows[-1]["pid"]
        drained = prefixrl("workers", directory, "drain", "scorer-1")
        assert drained.returncode == 0, drained.stdout + drained.stderr
        wait_for(lambda: not is_alive(pid), "the scorer's end")
        before = trained_iterations(directory)
        wait_for(lambda: trained_iterations(directory) > before + 3, "training with one scorer")

        stopped = prefixrl("stop", directory)
        assert stopped.returncode == 0, stopped.stdout + stopped.stderr + logs(directory)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert (
        "was drained and stays away" in output
        and "the learner was asked to stop; run `prefixrl launch" in output
    )
    end: dict[str, Any] = json.loads((directory / END_FILE).read_text())
    assert end["exit_code"] == 143
    done = trained_iterations(directory)
    said = f"stopped at iteration {done} of 2000, and saved; `"
    assert f"{said}prefixrl resume {directory}` resumes it" in stopped.stdout
    seen, _ = watching.communicate(timeout=60)
    assert watching.returncode == 0 and said in seen and "/2000 " in seen.splitlines()[0]
    assert prefixrl("status", directory).stdout.startswith(said)
    assert (directory / f"checkpoints/step_{done:08d}").is_dir()
    assert (
        f"stopped as asked after {done} iterations" in prefixrl("logs", directory, "learner").stdout
    )


@pytest.mark.nightly
def test_a_run_stops_in_its_last_evaluation_too(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    with launched(
        directory, *SMALL, "algorithm.iterations=3", "evaluation.problems=512"
    ) as process:
        wait_for(lambda: trained_iterations(directory) >= 1, "training")
        scorer = child(process, "prefixrl-scorer")
        assert scorer
        wait_for(lambda: trained_iterations(directory) == 3, "the end of training")
        scorer.send_signal(signal.SIGSTOP)
        stopped = prefixrl("stop", directory, "--timeout", "120")
        assert stopped.returncode == 0, stopped.stdout + stopped.stderr + logs(directory)
        assert "stopped at iteration 3 of 3" in stopped.stdout, stopped.stdout
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 130, output


@pytest.mark.nightly
def test_a_killed_learner_that_is_not_started_again_is_named_as_killed(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    with launched(directory, *TWO_SCORERS) as process:
        wait_for(lambda: (directory / "checkpoints/step_00000002").is_dir(), "a checkpoint")
        # Everything at once, as a host that goes down.
        for each in [
            *psutil.Process(process.pid).children(recursive=True),
            psutil.Process(process.pid),
        ]:
            each.kill()
        process.wait(30)
    actual = prefixrl("status", directory)
    assert actual.returncode == 0, actual.stderr
    assert (
        actual.stdout.startswith("killed at iteration ")
        and "from its newest checkpoint (" in actual.stdout
    )
