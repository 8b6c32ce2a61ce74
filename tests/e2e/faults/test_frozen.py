"""Processes of a launch that a signal stopped are named, and the run goes on; so it does when the clock jumps."""

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from prefixrl.common.journal.crash_points import FOLDER_VARIABLE, VARIABLE
from support.processes import titled
from support.runs.run_helper import (
    SMALL,
    check_books,
    finish,
    launched,
    logs,
    status,
    trained_iterations,
    wait_for,
)

pytestmark = pytest.mark.timeout(900)
ENDLESS = (
    *SMALL,
    "algorithm.iterations=100000",
    "launch.scorers=2",
    "checkpoint.every=0",
    "broker.silence_s=4",
)
JUMPING = """
import os, time
from pathlib import Path
folder, true_s, true_ns = Path(__file__).parent, time.time, time.time_ns
(folder / str(os.getpid())).touch()
ahead_s = lambda: int((folder / "ahead_s").read_text())
time.time = lambda: true_s() + ahead_s()
time.time_ns = lambda: true_ns() + ahead_s() * 10**9
"""


def process_of(launch: "subprocess.Popen[str]", name: str) -> psutil.Process:
    """A process below the launch by its title: `scorer` is the first of them."""
    return titled(launch.pid, f"prefixrl-{name}")[0]


def console(launch: "subprocess.Popen[str]", until: str) -> str:
    """Read the console until a line has these words."""
    assert launch.stdout is not None
    for line in launch.stdout:
        if until in line:
            return line
    raise AssertionError(f"the launch ended without {until!r}")


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(each, marks=pytest.mark.nightly) for each in ("scorer", "rollout")),
        *(pytest.param(each, marks=pytest.mark.chaos) for each in ("broker", "weights", "learner")),
    ],
)
def test_a_process_that_is_stopped_for_long_is_named_and_the_run_goes_on(
    name: str, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    with launched(directory, *ENDLESS) as launch:
        wait_for(lambda: trained_iterations(directory) >= 3, "the third iteration")
        victim, workers = process_of(launch, name), len(status(directory)["workers"])
        victim.suspend()
        said = console(launch, "was stopped by a signal")
        assert (
            f"(pid {victim.pid})" in said
            and f"`kill -CONT {victim.pid}` lets it go on" in said
            and name in said
        )
        before = trained_iterations(directory)
        if name == "scorer":
            wait_for(lambda: trained_iterations(directory) > before + 5, "training without it")
            assert len(status(directory)["workers"]) == workers - 1
        if name == "rollout":
            time.sleep(60)
        victim.send_signal(signal.SIGCONT)
        assert f"(pid {victim.pid})" in console(launch, "goes on after")
        wait_for(lambda: trained_iterations(directory) > before + 10, "more iterations")
        wait_for(lambda: len(status(directory)["workers"]) == workers, "all workers")
        assert victim.is_running()


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("point", "name"), [("scores.judged:3:hang", "scorer"), ("prefixes.sampled:3:hang", "rollout")]
)
def test_a_worker_that_hangs_while_its_heart_beats_is_named_and_another_does_its_work(
    point: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "run"
    monkeypatch.setenv(VARIABLE, point)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    with launched(directory, *ENDLESS, "broker.stall_s=6", "launch.rollouts=2") as launch:
        line = console(launch, "gave up")
        assert f"gave up {name}-" in line and "no progress for " in line
        before = trained_iterations(directory)
        wait_for(lambda: trained_iterations(directory) > before + 5, "training without it")


@pytest.mark.chaos
def test_a_stall_ends_the_launch_where_it_is_to_and_the_culprit_is_named(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    settings = ("launch.stall_s=12", "launch.on_stall=end", "launch.stop_s=5")
    with launched(directory, *ENDLESS, *settings) as launch:
        wait_for(lambda: trained_iterations(directory) >= 3, "the third iteration")
        process_of(launch, "learner").suspend()
        output, _ = launch.communicate(timeout=120)
    assert launch.returncode == 5, output
    assert (
        "makes no progress for 1" in output
        and "(launch.on_stall)" in output
        and "the last event: " in output
    )


@pytest.mark.nightly
def test_a_clock_that_jumps_by_a_day_forward_and_back_costs_no_lease_and_no_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, clock = tmp_path / "run", tmp_path / "clock"
    clock.mkdir()
    (clock / "ahead_s").write_text("0")
    (clock / "sitecustomize.py").write_text(JUMPING)
    monkeypatch.setenv("PYTHONPATH", f"{clock}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with launched(
        directory, *SMALL, "algorithm.iterations=24", "broker.silence_s=20", "evaluation.every=2"
    ) as launch:
        for ahead_s in (86400, -86400, 0):
            before = trained_iterations(directory)
            wait_for(
                lambda before=before: trained_iterations(directory) >= before + 4,
                f"training before {ahead_s} s",
            )
            if ahead_s > 0:
                running = {
                    process_of(launch, name).pid
                    for name in ("learner", "broker", "weights", "rollout", "scorer")
                }
                assert running <= {
                    int(path.name) for path in clock.iterdir() if path.name.isdigit()
                }
            (clock / "new").write_text(str(ahead_s))
            (clock / "new").replace(clock / "ahead_s")
        summary = finish(launch, directory)
    check_books(summary, directory)
    assert summary["groups"]["trained"] == summary["groups"]["issued"] and "gave up" not in logs(
        directory
    )
