"""The conduct that all processes of a run share."""

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from prefixrl.common.host.process import end_children, write_atomically
from support.fakes import wait_until


def test_a_file_is_on_disk_before_its_name_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.json"
    path.write_text("before")
    synced: list[tuple[str, str]] = []

    def fsync(descriptor: int) -> None:
        what = os.readlink(f"/proc/self/fd/{descriptor}")
        synced.append(("folder" if what == str(tmp_path) else "file", path.read_text()))

    monkeypatch.setattr(os, "fsync", fsync)
    write_atomically(path, "after")
    assert synced == [("file", "before"), ("folder", "after")]
    assert [each.name for each in tmp_path.iterdir()] == ["config.json"]


HOSTILE = (
    "node7\x1b]0;owned\x07\x9b31m\r\u202e\u200f\u061c\n"
    "2026-11-22 00:00:00 ERROR   prefixrl-broker the run is over"
)


def test_a_limit_of_open_files_that_is_too_low_is_a_sentence() -> None:
    ended = subprocess.run(
        [
            "bash",
            "-c",
            'ulimit -n 40; exec "$0" -m prefixrl.learner.broker $PPID . {}',
            sys.executable,
        ],
        capture_output=True,
        text=True,
    )
    assert (
        ended.returncode == 2 and "error: a process may have 40 files open here" in ended.stderr
    ), ended.stderr


def test_a_peers_text_reaches_neither_terminal_nor_log_raw() -> None:
    child = subprocess.run(
        [
            sys.executable,
            "-c",
            "import logging; from prefixrl.common.host.process import start_logging, exit_codes\n"
            "from prefixrl.common.errors import Refusal\n"
            f"start_logging('prefixrl-broker'); logging.getLogger('x').warning('gave up %s', {HOSTILE!r})\n"
            f"with exit_codes(): raise Refusal({HOSTILE!r})",
        ],
        capture_output=True,
        check=False,
    )
    text = child.stderr.decode()
    assert not set(text) & set("\x1b\x07\x9b\r\u202e\u200f\u061c")
    log, _, error = text.partition("error: ")
    assert "gave up node7\\u001b]0;owned\\u0007\\u009b31m\\u000d\\u202e" in log
    assert len([line for line in log.splitlines() if not line.startswith(" ")]) == 1, (
        "no forged record"
    )
    assert error.startswith("node7\\u001b")


WITHOUT_REAL_TIME_SIGNALS = """
import signal, subprocess, sys, time
del signal.SIGRTMIN, signal.SIGRTMAX
from prefixrl.common.host.process import END_SIGNAL, end_children, stop_event
if len(sys.argv) > 1:
    stop = stop_event([END_SIGNAL])
    print("ready", flush=True)
    stop.wait()
    sys.exit(7)
child = subprocess.Popen([sys.executable, __file__, "child"], stdout=subprocess.PIPE)
child.stdout.readline()
end_children([child], 20.0, number=END_SIGNAL)
print(child.returncode)
"""


def test_children_are_ended_where_there_are_no_real_time_signals(tmp_path: Path) -> None:
    (tmp_path / "parent.py").write_text(WITHOUT_REAL_TIME_SIGNALS)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "parent.py")], capture_output=True, text=True, check=False
    )
    assert done.stdout == "7\n", done.stderr


class Reaped:
    """A child that ends, and is reaped by its parent, the moment its patience is over."""

    def __init__(self) -> None:
        done = subprocess.Popen([sys.executable, "-c", ""])
        done.wait()
        self.pid, self._is_over = done.pid, False

    def poll(self) -> int | None:
        return 0 if self._is_over else None

    def wait(self, timeout: float | None = None) -> int:
        if timeout is not None:
            self._is_over = True
            raise subprocess.TimeoutExpired("child", timeout)
        return 0

    def send_signal(self, sig: int, /) -> None:
        pass

    def kill(self) -> None:
        pass


def test_a_child_that_ended_just_now_keeps_no_other_from_its_end() -> None:
    deaf = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint(flush=True)\ntime.sleep(300)"
    command = [sys.executable, "-c", deaf]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as other:
        assert other.stdout
        other.stdout.readline()
        end_children([Reaped(), other], 0.0, with_groups=True)
        assert other.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("end", "code"),
    [("pass", 0), ("sys.exit()", 0), ("sys.exit(5)", 5), ("raise Halted('x')", 143)],
)
def test_a_process_that_is_not_taken_apart_ends_with_its_code_after_its_exit_functions(
    end: str, code: int
) -> None:
    program = (
        "import atexit, sys\nfrom prefixrl.common.errors import Halted\n"
        "from prefixrl.common.host.process import no_teardown\n"
        f"atexit.register(print, 'exit functions ran')\nwith no_teardown(): {end}"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (code, "exit functions ran\n")


def test_a_fault_of_a_process_that_is_not_taken_apart_keeps_its_stack_trace() -> None:
    program = (
        "import sys\nfrom prefixrl.common.host.process import no_teardown\n"
        "class Held:\n    def __del__(self): sys.stderr.write('leaked\\n' * 100)\n"
        "held = Held()\nwith no_teardown(): 1 / 0"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1 and done.stderr.endswith("ZeroDivisionError: division by zero\n")


HANGS_UP = """
import sys, time
from prefixrl.common.host.process import stop_event
stop = stop_event()
open(sys.argv[2], "w").close()
stop.wait(float(sys.argv[3]))
print("a last word to the terminal", flush=True)
with open(sys.argv[1], "w") as file:
    file.write("saved" if stop.is_set() else "went on")
"""


@pytest.mark.parametrize("ignored", [False, True])
def test_a_closed_terminal_asks_to_stop_unless_nohup_is_in_between(
    tmp_path: Path, ignored: bool
) -> None:
    terminal, inner = pty.openpty()

    def begin() -> None:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)

    output = subprocess.DEVNULL if ignored else inner  # nohup gives it another
    files = str(tmp_path / "said"), str(tmp_path / "ready")
    command = [sys.executable, "-c", HANGS_UP, *files, "1.0" if ignored else "60.0"]
    child = subprocess.Popen(command, stdin=inner, stdout=output, stderr=output, preexec_fn=begin)
    os.close(inner)
    wait_until((tmp_path / "ready").exists, "the first line")
    os.close(terminal)
    assert child.wait(60.0) == 0
    assert (tmp_path / "said").read_text() == ("went on" if ignored else "saved")
