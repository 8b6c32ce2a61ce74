"""One child process of a launch: its output goes through the launch into its log.

    child ──stdout, stderr──▶ pipe ──▶ reader thread ──▶ <run directory>/logs/<name>.log
                                            └──▶ the newest output in memory: what a failure and the console show

A log that cannot be written, on a disk that is full, loses lines; the console still has them.
"""

import os
import queue
import re
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from prefixrl.common.host.exit_codes import printable
from prefixrl.common.host.process import RestartBudget
from prefixrl.deploy.view.stalls import Watched

WORKER_RESTARTS = 10
TAIL_LINES = 12
KEPT_BYTES = 1 << 16
BLOCK_BYTES = 1 << 16
LAST_OUTPUT_S = 2.0
MOST_LOG_BYTES = 64 << 20
"""Size from which a log becomes the old one, NAME.log.1, and another begins."""
MOST_NEWS = 20
"""Most lines that wait for the console. More lines at once say nothing new."""
_ERROR = re.compile(rb"\d\S+ \S+ ERROR\s+(.*)")


@dataclass
class Child:
    """One process and the way to start it again."""

    name: str
    command: list[str]
    log_path: Path
    environment: dict[str, str]
    budget: RestartBudget = field(default_factory=lambda: RestartBudget(WORKER_RESTARTS))
    process: "subprocess.Popen[bytes] | None" = field(default=None, repr=False)
    ended_s: float | None = None
    """Monotonic time at which its end was noticed."""
    is_drained: bool = False
    """True if the operator had it leave."""
    _reader: threading.Thread | None = field(default=None, repr=False)
    _recent: bytes = b""
    """The newest output since the last start."""
    _news: "queue.Queue[str]" = field(default_factory=lambda: queue.Queue(MOST_NEWS), repr=False)

    def start(self) -> None:
        """Start it; its output is appended to its log."""
        self.close()
        self.budget.started_s = time.monotonic()
        self.ended_s = None
        self._recent = b""
        output, write_end = os.pipe()
        try:
            # A session of its own: Ctrl-C reaches the launch alone, which stops its children in order.
            self.process = subprocess.Popen(
                self.command,
                stdout=write_end,
                stderr=write_end,
                env=self.environment,
                start_new_session=True,
            )
        except BaseException:
            os.close(output)
            raise
        finally:
            # The child alone holds this end: the reader sees its end by the end of the output.
            os.close(write_end)
        self._reader = threading.Thread(
            target=self._read, args=(output,), name=f"{self.name} log", daemon=True
        )
        self._reader.start()

    @property
    def code(self) -> int | None:
        """Exit code, None while it runs."""
        return self.process.poll() if self.process else None

    def tail(self) -> str:
        """Return the end of its output."""
        return printable("\n".join(self._output().splitlines()[-TAIL_LINES:]))

    def error(self) -> str:
        """Return the error message of its end, after the message of a lost server; "" without a message."""
        before, separator, message = f"\n{self._output()}".rpartition("\nerror: ")
        line = before.rpartition("\n")[2]
        cause = line.removeprefix("error: ") + "\n" if line.startswith("error: ") else ""
        return printable(cause + message.strip()) if separator else ""

    def news(self) -> list[str]:
        """Return its errors since the last call, for the console."""
        return [self._news.get_nowait() for _ in range(self._news.qsize())]

    def close(self) -> None:
        """Wait for the last output of a process that has ended."""
        if self._reader:
            self._reader.join(LAST_OUTPUT_S)

    def _output(self) -> str:
        if self.code is not None:
            self.close()
        return self._recent.decode(errors="replace")

    def _read(self, output: int) -> None:
        line = b""
        is_told = False
        # A pipe that is not read would stop the child: no fault of the log may end this loop.
        with os.fdopen(output, "rb", buffering=0) as pipe:
            while block := pipe.read(BLOCK_BYTES):
                try:
                    with self.log_path.open("ab", buffering=0) as log:
                        log.write(block)
                        if log.tell() > MOST_LOG_BYTES:
                            self.log_path.replace(f"{self.log_path}.1")
                except OSError as error:
                    if not is_told and not self._news.full():
                        self._news.put(
                            f"its log {self.log_path} cannot be written ({error.strerror}); lines are lost"
                        )
                    is_told = True
                self._recent = (self._recent + block)[-KEPT_BYTES:]
                *lines, line = (line + block).split(b"\n")
                line = line[-KEPT_BYTES:]
                for whole_line in lines:
                    if (match := _ERROR.match(whole_line)) and not self._news.full():
                        self._news.put(printable(match[1].decode(errors="replace")))


def running_processes(children: Sequence[Child]) -> list[Watched]:
    """Return the running children and the servers that they started."""
    processes = []
    for child in children:
        if child.process is None or child.code is not None:
            continue
        pid = child.process.pid
        processes.append(Watched(child.name, pid, _is_stopped(pid)))
        processes += _servers_of(pid)
    return processes


def _servers_of(pid: int) -> list[Watched]:
    """Return the servers that any thread of a process started, and those of its ranks."""
    servers: list[Watched] = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return servers  # it has ended
    children = b" ".join(_content(Path(f"/proc/{pid}/task/{each}/children")) for each in threads)
    for child_pid in map(int, children.split()):
        command = _content(Path(f"/proc/{child_pid}/cmdline")).decode(errors="replace")
        title = command.partition("\0")[0]
        if title.startswith("prefixrl-"):
            servers.append(
                Watched(title.removeprefix("prefixrl-"), child_pid, _is_stopped(child_pid))
            )
        if title.startswith("prefixrl-learner-"):
            servers += _servers_of(child_pid)
    return servers


def _content(path: Path) -> bytes:
    """Return a file of /proc, or b"" if its thread or process has ended."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _is_stopped(pid: int) -> bool:
    """Return True for a process that a signal stopped."""
    # The name in brackets may hold anything.
    return _content(Path(f"/proc/{pid}/stat")).rpartition(b") ")[2][:1] == b"T"
