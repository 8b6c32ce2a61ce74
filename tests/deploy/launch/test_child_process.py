"""A child's output reaches its log, and the console even where no log can be written."""

import os
import subprocess
import sys
from pathlib import Path

import psutil

from prefixrl.deploy.launch.child_process import KEPT_BYTES, Child, running_processes
from support.fakes import wait_until
from support.runs.small_disk import small_disk

LOGS = """
import logging, sys
from prefixrl.common.host.process import start_logging
start_logging("prefixrl-learner")
logging.getLogger("a").info("all is well")
logging.getLogger("a").error("the disk is full")
print("error: it could not go on")
sys.exit(2)
"""


def child(folder: Path, code: str) -> Child:
    return Child("learner", [sys.executable, "-c", code], folder / "learner.log", dict(os.environ))


def ended(one: Child) -> int:
    one.start()
    return (wait_until(lambda: one.code is not None, "its end") and one.code) or 0


def test_output_is_in_the_log_and_errors_are_news(tmp_path: Path) -> None:
    one = child(tmp_path, LOGS)
    assert ended(one) == 2
    assert one.error() == "it could not go on"
    assert one.news() == ["prefixrl-learner the disk is full"]
    assert one.news() == []
    assert one.tail().splitlines() == one.log_path.read_text().splitlines()


def test_the_reason_of_a_server_that_ended_is_told_before_that_it_did(tmp_path: Path) -> None:
    one = child(
        tmp_path, "print('it works\\nerror: the journal is lost\\nerror: the broker ended')"
    )
    assert ended(one) == 0
    assert one.error() == "the journal is lost\nthe broker ended"


def test_a_console_on_a_full_disk_ends_no_run(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-c",
        """import click, sys
from pathlib import Path
from prefixrl.common.host.process import patient_console
from prefixrl.deploy.view.live_view import View
with patient_console():
    with View(Path(sys.argv[1])) as view:
        view.announce("all is well")
    click.echo("told")
    click.echo("told", err=True)
Path(sys.argv[1]).touch()
""",
        str(tmp_path / "it came through"),
    ]
    with open("/dev/full", "wb") as full:
        assert subprocess.run(command, stdout=full, stderr=full, check=False).returncode == 0
    assert (tmp_path / "it came through").exists()


def test_a_log_on_a_full_disk_stops_nobody_and_the_failure_is_still_told(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        disk.fill()
        one = child(disk.path, f"print('x' * {4 * KEPT_BYTES})\n{LOGS}")
        assert ended(one) == 2
        assert one.error() == "it could not go on"
        lost = f"its log {one.log_path} cannot be written (No space left on device); lines are lost"
        assert one.news() == [lost, "prefixrl-learner the disk is full"]


def test_of_an_endless_output_the_end_is_kept(tmp_path: Path) -> None:
    one = child(tmp_path, f"print('x' * {4 * KEPT_BYTES})\nprint('the end')")
    assert ended(one) == 0
    assert one.tail().endswith("the end")
    assert one.log_path.stat().st_size > 4 * KEPT_BYTES


def test_what_an_earlier_start_said_is_not_the_error_of_this_one(tmp_path: Path) -> None:
    one = child(
        tmp_path,
        "import os; print('error: the first' if not os.path.exists('x') else ''); open('x', 'w')",
    )
    one.environment["PWD"] = str(tmp_path)
    one.command = [
        sys.executable,
        "-c",
        f"import os; os.chdir({str(tmp_path)!r}); {one.command[2]}",
    ]
    ended(one)
    assert one.error() == "the first"
    ended(one)
    assert one.error() == ""


def test_a_flood_of_errors_holds_nobody_up(tmp_path: Path) -> None:
    flood = "for i in range(1000): print('2026-11-23 10:00:00,000 ERROR   learner', i)"
    one = child(tmp_path, flood)
    assert ended(one) == 0
    assert len(one.news()) <= 20
    assert len(one.log_path.read_text().splitlines()) == 1000


RANKS = """
import subprocess, sys, threading, time

def start(title, code):
    subprocess.Popen([title, "-c", code, sys.executable], executable=sys.executable)

idle = "import time; time.sleep(600)"
rank = f"import subprocess, sys; subprocess.Popen(['prefixrl-broker', '-c', {idle!r}], executable=sys.argv[1]); {idle}"

def threaded():
    start("prefixrl-learner-0", rank)
    time.sleep(600)

threading.Thread(target=threaded, daemon=True).start()
start("prefixrl-weights", idle)
time.sleep(600)
"""


def test_servers_that_a_rank_or_a_thread_started_are_among_the_running_processes(
    tmp_path: Path,
) -> None:
    one = child(tmp_path, RANKS)
    one.start()
    assert one.process
    try:
        names = {"learner", "learner-0", "weights", "broker"}
        wait_until(
            lambda: {each.name for each in running_processes([one])} == names, "all processes"
        )
    finally:
        for process in psutil.Process(one.process.pid).children(recursive=True):
            process.kill()
        one.process.kill()
        one.process.wait()
