"""Uploads: every complete checkpoint reaches the command once, failures are told, counted and tried again."""

import errno
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from prefixrl.common.config.run import CheckpointConfig
from prefixrl.common.errors import ConfigError, Halted
from prefixrl.common.journal.crash_points import FOLDER_VARIABLE, VARIABLE
from prefixrl.common.run import json_lines
from prefixrl.common.run.directory_format import checkpoints
from prefixrl.common.run.documents import UPLOADS_FILE, UploadLine
from prefixrl.learner.run import uploads as module
from prefixrl.learner.run.stop import StopSignal
from prefixrl.learner.run.uploads import Uploads, check_command, counts
from support.fakes import wait_until
from support.processes import is_alive
from support.runs.small_disk import small_disk

COPY = 'cp -r "$1" "$0/"; echo "copied $(basename $1)"'
Start = Callable[..., Uploads]


def shell(script: str, *arguments: object) -> tuple[str, ...]:
    return ("sh", "-c", script, *map(str, arguments))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Uploads] = []

    def begin(command: tuple[str, ...], upload_s: float = 60.0) -> Uploads:
        started.append(Uploads(tmp_path, CheckpointConfig(upload=command, upload_s=upload_s)))
        return started[-1]

    (tmp_path / "there").mkdir()
    yield begin
    for uploads in started:
        uploads.close()


def save(directory: Path, iteration: int, content: str = "{}") -> None:
    folder = directory / f"checkpoints/step_{iteration:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").write_text(content)


def lines(directory: Path) -> list[tuple[int, int | None]]:
    return [
        (line.iteration, line.exit_code)
        for line in json_lines.read(directory / UPLOADS_FILE, UploadLine)
    ]


def wait(uploads: Uploads) -> None:
    uploads.wait(StopSignal(), 0)


def test_every_checkpoint_is_uploaded_once_also_over_two_starts(
    tmp_path: Path, start: Start
) -> None:
    save(tmp_path, 1)
    uploads = start(shell(COPY, tmp_path / "there"))
    save(tmp_path, 3)
    (tmp_path / "checkpoints/.step_00000005.partial").mkdir()
    wait(uploads)
    uploads.close()
    save(tmp_path, 5)
    save(tmp_path, 1, '{"trained": "anew"}')
    wait(start(shell(COPY, tmp_path / "there")))
    assert lines(tmp_path) == [(1, 0), (3, 0), (1, 0), (5, 0)]
    assert sorted(path.name for path in (tmp_path / "there").iterdir()) == [
        f"step_0000000{n}" for n in (1, 3, 5)
    ]
    assert (
        json_lines.read(tmp_path / UPLOADS_FILE, UploadLine)[0].last_line == "copied step_00000001"
    )


def test_a_failure_is_told_counted_and_tried_again(
    tmp_path: Path, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1)
    script = 'test -e "$0/allowed" || { echo "no room"; exit 3; }'
    uploads = start(shell(script, tmp_path / "there"))
    wait(uploads)
    assert lines(tmp_path)[-1] == (1, 3) and not caplog.text.count("is uploaded")
    errors = [each.getMessage() for each in caplog.records if each.levelno == logging.ERROR]
    assert (
        "checkpoint 1 failed with exit code 3 after" in errors[0]
        and ": no room; it is tried again" in errors[0]
    )
    (tmp_path / "there/allowed").touch()
    wait(uploads)
    assert lines(tmp_path)[-1] == (1, 0)
    actual = counts(tmp_path)
    assert actual["done"] == 1 and actual["failed"] == len(lines(tmp_path)) - 1


@pytest.mark.slow
def test_an_upload_that_hangs_is_ended_with_all_that_it_started(
    tmp_path: Path, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1)
    uploads = start(
        shell(
            'trap "" TERM; sleep 1000 & echo $! > "$0/pid"; echo begun; wait', tmp_path / "there"
        ),
        0.5,
    )
    began_s = time.monotonic()
    wait_until(lambda: bool(lines(tmp_path)), "the deadline")
    assert time.monotonic() - began_s < 30 and lines(tmp_path)[0] == (1, None)
    assert "was ended (checkpoint.upload_s) after" in caplog.text and ": begun;" in caplog.text
    wait_until(
        lambda: not is_alive(int((tmp_path / "there/pid").read_text())), "the end of its child"
    )
    uploads.close()


def test_the_checkpoint_that_is_being_uploaded_is_named_and_a_stop_cuts_it_off(
    tmp_path: Path, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 4)
    uploads = start(shell('touch "$0/begun"; exec sleep 1000', tmp_path / "there"))
    wait_until((tmp_path / "there/begun").exists, "the upload")
    with uploads.paused() as running:
        assert running == {4}
    uploads.warn_of_removed([2])
    uploads.close()
    assert not lines(tmp_path) and "the upload of checkpoint 4 is cut off" in caplog.text
    assert "checkpoint 2 was removed before it was uploaded" in caplog.text


def test_a_command_that_is_not_there_is_refused(tmp_path: Path) -> None:
    check_command(CheckpointConfig())
    check_command(CheckpointConfig(upload=("sh", "-c", "true")))
    with pytest.raises(ConfigError, match="there is no program 'uploda' on this host"):
        check_command(CheckpointConfig(upload=("uploda", "s3://models")))


PROGRAM = """
import sys
from pathlib import Path
from prefixrl.common.config.run import CheckpointConfig
from prefixrl.learner.run.uploads import Uploads
from prefixrl.learner.run.stop import StopSignal
Uploads(Path(sys.argv[1]), CheckpointConfig(upload=tuple(sys.argv[2:]))).wait(StopSignal(), 0)
"""


@pytest.mark.parametrize("point", ["upload.begun", "upload.done"])
def test_the_upload_of_a_learner_that_is_killed_is_repeated_by_the_next(
    tmp_path: Path, point: str
) -> None:
    save(tmp_path, 2)
    (tmp_path / "crashed").mkdir()
    # The first one would take for ever, unless it is to end.
    slow = (
        ""
        if point == "upload.done"
        else 'test -e "$0/once" || { echo $$ > "$0/once"; exec sleep 1000; };'
    )
    command = [
        sys.executable,
        "-c",
        PROGRAM,
        str(tmp_path),
        *shell(f'{slow} echo "$1" >> "$0/there"', tmp_path),
    ]
    environment = {**os.environ, VARIABLE: point, FOLDER_VARIABLE: str(tmp_path / "crashed")}
    assert subprocess.run(command, env=environment).returncode == -signal.SIGKILL
    assert not lines(tmp_path)
    if (tmp_path / "once").exists():
        os.kill(int((tmp_path / "once").read_text()), signal.SIGKILL)
    (tmp_path / "once").write_text("killed before it began")
    assert subprocess.run(command, env=environment).returncode == 0
    assert lines(tmp_path) == [(2, 0)]
    assert set((tmp_path / "there").read_text().split()) == {
        str(tmp_path / "checkpoints/step_00000002")
    }


@pytest.mark.parametrize("end", ["\\n", "\\r"])
def test_the_last_line_is_noted_and_the_log_holds_the_newest_upload_alone(
    tmp_path: Path, start: Start, end: str
) -> None:
    printing = f"sys.stdout.write('copied a part{end}' * 1000 + 'the end{end}')"
    for iteration in (1, 2):
        save(tmp_path, iteration)
        uploads = start((sys.executable, "-c", f"import sys; {printing}; sys.exit(0)"))
        wait(uploads)
        uploads.close()
    line = json_lines.read(tmp_path / UPLOADS_FILE, UploadLine)[-1]
    assert (line.exit_code, line.last_line) == (0, "the end")
    assert (tmp_path / module.LOG_FILE).read_bytes().count(b"copied a part") == 1000


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (SystemExit(), ""),
        (MemoryError("no memory"), "uploads failed; they are tried again with the next checkpoint"),
        (
            OSError(errno.ESTALE, "Stale file handle"),
            "cannot be listed: [Errno 116] Stale file handle; tried again",
        ),
    ],
)
def test_a_fault_of_the_thread_ends_neither_a_wait_nor_later_uploads(
    fault: BaseException,
    words: str,
    tmp_path: Path,
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    uploads, faults = start(shell(COPY, tmp_path / "there")), [fault]
    wait(uploads)

    def looked(directory: Path) -> dict[int, Path]:
        if faults:
            raise faults.pop()
        return checkpoints(directory)

    monkeypatch.setattr(module, "checkpoints", looked)
    save(tmp_path, 1)
    wait(uploads)
    assert words in caplog.text and lines(tmp_path) == []
    wait(uploads)
    assert lines(tmp_path) == [(1, 0)]


def test_a_wait_that_is_hopeless_ends(tmp_path: Path, start: Start) -> None:
    save(tmp_path, 1)
    uploads = start(shell("exec sleep 1000"))

    with pytest.raises(Halted, match="stopped as asked after 1 iterations"):
        uploads.wait(StopSignal(lambda: True), 1)


def test_an_upload_that_cannot_be_noted_for_want_of_room_is_told_and_done_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        save(disk.path, 1)
        disk.fill()
        for made_room in (False, True):
            uploads = Uploads(disk.path, CheckpointConfig(upload=("true",), upload_s=60.0))
            uploads.wait(StopSignal(), 0)
            uploads.close()
            assert counts(disk.path) == ({"done": 1} if made_room else {})
            if not made_room:
                assert "checkpoint 1 failed or could not be noted: [Errno 28]" in caplog.text
                disk.make_room()
