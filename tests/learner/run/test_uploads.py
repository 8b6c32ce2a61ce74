"""Uploads: every complete checkpoint reaches the command once, failures are told, counted and tried again."""

import errno
import logging
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from prefixrl.common.config.run import CheckpointConfig
from prefixrl.common.errors import ConfigError
from prefixrl.common.journal.crash_points import FOLDER_VARIABLE, VARIABLE
from prefixrl.common.run import json_lines
from prefixrl.common.run.directory_format import checkpoints
from prefixrl.common.run.documents import UPLOADS_FILE, UploadLine
from prefixrl.learner.run import uploads as module
from prefixrl.learner.run.uploads import Uploads, check_command, counts
from support.fakes import wait_until
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


def is_running(pid: str) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and ") Z" not in stat.read_text()


def wait(uploads: Uploads) -> None:
    uploads.wait(lambda: None)


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
    found = counts(tmp_path)
    assert found["done"] == 1 and found["failed"] == len(lines(tmp_path)) - 1


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
        lambda: not is_running((tmp_path / "there/pid").read_text().strip()), "the end of its child"
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
    uploads.tell_removed([2])
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
Uploads(Path(sys.argv[1]), CheckpointConfig(upload=tuple(sys.argv[2:]))).wait(lambda: None)
"""


@pytest.mark.parametrize("point", ["upload.begun", "upload.done"])
def test_a_learner_that_is_killed_takes_its_upload_along_and_the_next_repeats_it(
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
        wait_until(
            lambda: not Path(f"/proc/{(tmp_path / 'once').read_text().strip()}").exists(), "its end"
        )
    (tmp_path / "once").write_text("killed before it began")
    assert subprocess.run(command, env=environment).returncode == 0
    assert lines(tmp_path) == [(2, 0)]
    assert set((tmp_path / "there").read_text().split()) == {
        str(tmp_path / "checkpoints/step_00000002")
    }


@pytest.mark.parametrize("end", ["\\n", "\\r"])
def test_an_upload_that_prints_without_measure_goes_on_and_little_of_it_is_kept(
    tmp_path: Path, start: Start, end: str
) -> None:
    save(tmp_path, 1)
    printing = f"import sys; sys.stdout.write('copied a part{end}' * 1_000_000); sys.stdout.write('the end{end}')"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    uploads = start((sys.executable, "-c", f"{printing}; sys.exit(1)"))
    wait(uploads)
    (line, *_) = json_lines.read(tmp_path / UPLOADS_FILE, UploadLine)
    assert (line.exit_code, line.last_line) == (1, "the end")
    output = (tmp_path / module.LOG_FILE).read_bytes()
    assert (
        output.startswith(b"copied a part")
        and len(output) <= len(lines(tmp_path)) * module.LOGGED_BYTES
    )
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 30_000, "KiB"


def test_a_log_of_uploads_that_has_grown_long_gives_way_to_a_new_one(
    tmp_path: Path, start: Start
) -> None:
    path = tmp_path / module.LOG_FILE
    path.parent.mkdir()
    for iteration in range(1, 4):
        path.write_bytes(b"x" * (module.MOST_LOG_BYTES + 1))
        save(tmp_path, iteration)
        uploads = start(shell('echo "$1"'))
        wait(uploads)
        uploads.close()
        assert path.stat().st_size < 1000
    assert sorted(each.name for each in path.parent.iterdir()) == ["upload.log", "upload.log.1"]


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

    def hopeless() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        uploads.wait(hopeless)


def test_a_learner_that_is_killed_takes_along_all_that_its_upload_started(tmp_path: Path) -> None:
    save(tmp_path, 2)
    # A pipeline of two more processes; the last word is that of the shell, once they are there.
    script = 'sleep 1000 | cat & ps -o pid= --ppid $$ > "$0/pids"; echo $$ >> "$0/pids"; touch "$0/begun"; wait'
    learner = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path), *shell(script, tmp_path)]
    )
    wait_until((tmp_path / "begun").exists, "the upload")
    pids = (tmp_path / "pids").read_text().split()
    learner.kill()
    learner.wait()
    wait_until(lambda: not any(is_running(pid) for pid in pids), "the end of the pipeline")


def test_a_log_that_cannot_be_written_holds_up_no_upload(tmp_path: Path, start: Start) -> None:
    (tmp_path / module.LOG_FILE).mkdir(parents=True)
    save(tmp_path, 1)
    wait(start(shell("head -c 1000000 /dev/zero; echo; echo copied")))
    assert lines(tmp_path) == [(1, 0)]


def test_an_upload_that_cannot_be_noted_for_want_of_room_is_told_and_done_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        save(disk.path, 1)
        disk.fill()
        for made_room in (False, True):
            uploads = Uploads(disk.path, CheckpointConfig(upload=("true",), upload_s=60.0))
            uploads.wait(lambda: None)
            uploads.close()
            assert counts(disk.path) == ({"done": 1} if made_room else {})
            if not made_room:
                assert "checkpoint 1 failed or could not be noted: [Errno 28]" in caplog.text
                disk.make_room()
