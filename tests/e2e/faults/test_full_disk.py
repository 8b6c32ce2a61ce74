"""A real run whose disk fills up: it waits, says so, loses nothing, and goes on."""

import json
import re
import signal
import time
from pathlib import Path

import pytest

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
from support.runs.small_disk import small_disk

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

DISK_BYTES = 20 << 20
LONGER = (*SMALL, "algorithm.iterations=24")


@pytest.mark.nightly
def test_a_run_waits_for_room_and_trains_every_group_once(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", DISK_BYTES) as disk:
        directory = disk.path / "run"
        with launched(directory, *LONGER) as launch:
            wait_for(lambda: trained_iterations(directory) >= 3, "three iterations")
            disk.fill()
            wait_for(lambda: "room on the disk" in status(directory)["waiting_for"], "the reason")
            before = trained_iterations(directory)
            time.sleep(5.0)
            assert trained_iterations(directory) <= before + 1, (
                "nothing is trained that is not written"
            )
            disk.make_room()
            output, _ = launch.communicate(timeout=240)
            assert launch.returncode == 0, output
            assert "waiting for room on the disk of" in output
        with launched(directory, *LONGER) as again:  # it is finished: the books, once more
            check_books(finish(again, directory), directory)


@pytest.mark.nightly
def test_a_stop_on_a_full_disk_tells_what_is_lost_and_the_next_start_goes_on(
    tmp_path: Path,
) -> None:
    with small_disk(tmp_path / "disk", DISK_BYTES) as disk:
        directory = disk.path / "run"
        settings = (*LONGER, "checkpoint.every=100")
        with launched(directory, *settings) as launch:
            wait_for(lambda: trained_iterations(directory) >= 2, "two iterations")
            disk.fill()
            wait_for(lambda: "room on the disk" in status(directory)["waiting_for"], "the reason")
            launch.send_signal(signal.SIGINT)
            output, _ = launch.communicate(timeout=120)
            assert launch.returncode == 5, output
            assert re.search(
                "could not be written|neither this nor a checkpoint can be written", output
            )
            assert "the next start begins at iteration 0" in output
        assert not list((directory / "checkpoints").glob(".*"))
        disk.make_room()
        with launched(directory, *settings) as again:
            check_books(finish(again, directory), directory)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("room_bytes", "told"), [(4 << 20, "has no room for the run"), (0, "the disk is full|no room")]
)
def test_a_run_without_room_is_refused_before_it_starts(
    tmp_path: Path, room_bytes: int, told: str
) -> None:
    with small_disk(tmp_path / "disk", DISK_BYTES) as disk:
        disk.fill(room_bytes)
        with launched(disk.path / "run", *LONGER) as launch:
            output, _ = launch.communicate(timeout=120)
        assert launch.returncode == 2, output
        assert re.search(told, output), output
        assert "Traceback" not in output


TOLD = {
    "journal": "the journal cannot be written",
    "metrics.jsonl": "metrics.jsonl cannot be written",
    "weights": r"weights/? .*cannot be written|version \d+ cannot be written",
    "evaluations": "cannot be written; make room there",
    "checkpoints": "could not be written",
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", TOLD)
def test_one_writer_alone_without_room_says_so_and_loses_nothing(name: str, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    with small_disk(tmp_path / "disk", DISK_BYTES) as disk:
        if "." not in name:
            (disk.path / name).mkdir()
        (directory / name).symlink_to(disk.path / name)
        with launched(directory, *LONGER, "evaluation.every=2") as launch:
            wait_for(lambda: trained_iterations(directory) >= 3, "three iterations")
            disk.fill()
            wait_for(lambda: re.search(TOLD[name], logs(directory)), "the reason")
            disk.make_room()
            output, _ = launch.communicate(timeout=240)
            assert launch.returncode == 0, output + logs(directory)
        said = output + logs(directory)
        assert re.search(TOLD[name], said), said
        assert "Traceback" not in said
        (directory / "report.html").unlink()
        (directory / "report.html").mkdir()  # no file can take its place
        with launched(
            directory, *LONGER, "evaluation.every=2"
        ) as again:  # it is finished: the books, once more
            output, _ = again.communicate(timeout=240)
            assert again.returncode == 0 and "no report: " in output, output
            check_books(json.loads((directory / "summary.json").read_text()), directory)
        assert trained_iterations(directory) == 24


@pytest.mark.nightly
def test_a_summary_alone_without_room_says_so_and_is_written_once_there_is_some(
    tmp_path: Path,
) -> None:
    with small_disk(tmp_path / "disk", DISK_BYTES) as disk:
        directory = disk.path / "run"
        directory.mkdir()
        for name in (
            "journal",
            "weights",
            "evaluations",
            "checkpoints",
            "logs",
            "metrics.jsonl",
            "advantages.jsonl",
        ):
            if "." not in name:
                (tmp_path / name).mkdir()
            (directory / name).symlink_to(tmp_path / name)
        with launched(directory, *LONGER) as launch:
            wait_for(lambda: trained_iterations(directory) >= 3, "three iterations")
            disk.fill()
            wait_for(lambda: "summary cannot be written" in logs(directory), "the reason")
            assert trained_iterations(directory) == 24 and not (directory / "summary.json").exists()
            disk.make_room()
            check_books(finish(launch, directory), directory)
