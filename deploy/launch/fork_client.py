"""The template of a launch, and the workers forked from it, as the launch sees them."""

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from prefixrl.common.config.run import RunConfig
from prefixrl.common.host.process import adopting_orphans, deaf_children
from prefixrl.deploy.launch.fork_server import MOST_BYTES, Answer, Fork, Forked, Imported, NotForked

MODULES = (
    "prefixrl.common.engines.embedded.continuous",
    "prefixrl.common.engines.embedded.fixed_rows",
    "prefixrl.common.engines.vllm.setup",
    "transformers.models.auto.tokenization_auto",
    "prefixrl.rollout.start",
    "prefixrl.scorer.start",
    "prefixrl.scorer.loop",
    "prefixrl.common.worker.join",
)
"""Imports of workers with an embedded engine; by name, since these are processes of their own."""
ANSWER_S = 30.0
"""Longest wait for a fork, on a machine that does much else."""
LOAD_S = 120.0
"""Longest wait for the imports."""
LEAST_TICK_S, MOST_TICK_S = 0.001, 0.05
"""Time between two looks whether a worker that is waited for has ended: it doubles."""


def is_forked(config: RunConfig, role: str, has_gpus: bool) -> bool:
    """Return True if workers of a role hold a model in their own process, and nothing but that."""
    if role == "scorer" and (config.mode == "direct" or config.scorer.prm is not None):
        return False
    section = config.rollout if role == "rollout" else config.scorer
    # With a GPU, `auto` may be vLLM, which starts processes of its own.
    is_certain = section.engine == "auto" and (not has_gpus or section.device == "cpu" or config.bitwise)
    return section.engine == "transformers" or is_certain


def is_possible() -> bool:
    """Return True where a launch can adopt what is forked, as on Linux, and learn its end."""
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        return False  # whoever started the launch has the kernel forget how children end
    try:
        with adopting_orphans():
            return True
    except OSError:
        return False


class WorkerTemplate:
    """The template as the launch sees it."""

    def __init__(self, environment: dict[str, str], modules: Sequence[str] = MODULES) -> None:
        """Start it; `environment`: that of workers, as far as all have it in common."""
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "prefixrl.deploy.launch.fork_server", str(theirs.fileno()), *modules]
        # A batch system sends its signals to every process of the job: what is to be forked later is not to be lost.
        with theirs, deaf_children():
            # What keeps it from importing keeps workers that start by themselves, and those say so in their logs.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._news: list[str] = []
        self._asked = 0
        self._load_deadline_s = time.monotonic() + LOAD_S
        self._is_ready = self.is_lost = False

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def is_loading(self) -> bool:
        """True until it can fork."""
        if not self._is_ready and not self.is_lost:
            self._is_ready = isinstance(self._read(0.0), Imported)
            if not self._is_ready and time.monotonic() > self._load_deadline_s:
                self._lose(f"had not ended its imports after {LOAD_S:.0f} s")
        return not self._is_ready and not self.is_lost

    def news(self) -> list[str]:
        """Return what went wrong since the last call, for the console."""
        if self._is_ready and not self.is_lost:
            self._read(0.0)  # its end
        news, self._news = self._news, []
        return news

    def fork(self, arguments: list[str], environment: dict[str, str], output: int) -> "ForkedWorker | None":
        """Start `python -m ARGUMENTS` as a child; None where it has to start by itself."""
        word, begin = os.pipe()
        try:
            with adopting_orphans():
                self._asked += 1
                request = Fork(self._asked, arguments, environment)
                pid = self._ask(msgspec.msgpack.encode(request), [output, word])
            if pid is None:
                return None
            os.write(begin, b"!")
            return ForkedWorker(pid)
        finally:
            os.close(word)
            os.close(begin)

    def _ask(self, request: bytes, descriptors: list[int]) -> int | None:
        """Return the id of a worker that waits for the word to begin."""
        try:
            socket.send_fds(self._link, [request], descriptors)
        except ConnectionError:
            pass  # it has ended, as the next read finds
        except OSError as error:
            self._say_not_forked(str(error))
            return None
        deadline_s = time.monotonic() + ANSWER_S
        while True:
            match self._read(deadline_s - time.monotonic()):
                case Imported():
                    self._is_ready = True
                case Forked(self._asked, pid):
                    return pid
                case NotForked(self._asked, why):
                    self._say_not_forked(why)
                    return None
                case None:
                    self._lose(f"did not answer within {ANSWER_S:.0f} s")
                    return None

    def _say_not_forked(self, why: str) -> None:
        self._news.append(f"the worker template (process {self.pid}) cannot fork ({why}): a worker starts by itself")

    def _read(self, timeout_s: float) -> Answer | None:
        """Return what it says within a time; lose it if it has ended."""
        if self.is_lost or not _is_readable(self._link.fileno(), timeout_s):
            return None
        data = b""
        with suppress(OSError):
            data = self._link.recv(MOST_BYTES)
        if data:
            answer: Answer = msgspec.msgpack.decode(data, type=Answer)
            return answer
        with suppress(subprocess.TimeoutExpired):  # what it held is closed: it is about to be gone
            self._process.wait(ANSWER_S)
        code = self._process.returncode
        self._lose("closed its socket" if code is None else f"ended with exit code {code}")
        return None

    def _lose(self, why: str) -> None:
        """End it and say so, once."""
        if not self.is_lost:
            self._news.append(
                f"the worker template (process {self.pid}) {why}: workers start by themselves from now on"
            )
            self.close()

    def close(self) -> None:
        """End it; what it forked stays."""
        self.is_lost = True
        self._process.kill()
        self._process.wait()
        self._link.close()


class ForkedWorker:
    """A forked worker, a child of this process: what a launch needs of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return its exit code, None while it runs."""
        if self._code is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; subprocess.TimeoutExpired as there."""
        deadline_s, tick_s = None if timeout is None else time.monotonic() + timeout, LEAST_TICK_S
        while (code := self.poll()) is None:
            if deadline_s is not None and time.monotonic() > deadline_s:
                raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout or 0.0)
            time.sleep(tick_s)
            tick_s = min(2.0 * tick_s, MOST_TICK_S)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal unless it has ended; until its code is read, its id is no other's."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


def _is_readable(descriptor: int, timeout_s: float | None) -> bool:
    """Return True once there is something to read; `select` takes no descriptor above 1,023."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000.0))
