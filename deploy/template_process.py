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
from prefixrl.common.process import deaf_children
from prefixrl.deploy.template import MOST_BYTES, Answer, Ended, Fork, Forked, Imported, NotForked

MODULES = (
    "prefixrl.common.engines.embedded.continuous",
    "prefixrl.common.engines.embedded.fixed_rows",
    "prefixrl.common.engines.vllm_setup",
    "transformers.models.auto.tokenization_auto",
    "prefixrl.rollout.start",
    "prefixrl.scorer.start",
    "prefixrl.scorer.loop",
    "prefixrl.common.worker.join",
)
"""Imports of workers with an embedded engine; by name, since these are processes of their own."""
TELL_S = 10.0
"""Longest wait for the code of a worker that has ended; a template that a signal stopped tells none."""
ANSWER_S = 30.0
"""Longest wait for a fork, on a machine that does much else."""
LOAD_S = 120.0
"""Longest wait for the imports."""


def is_forked(config: RunConfig, role: str, has_gpus: bool) -> bool:
    """Return True if workers of a role hold a model in their own process, and nothing but that."""
    if role == "scorer" and (config.mode == "direct" or config.scorer.prm is not None):
        return False
    section = config.rollout if role == "rollout" else config.scorer
    # With a GPU, `auto` may be vLLM, which starts processes of its own.
    is_certain = section.engine == "auto" and (not has_gpus or section.device == "cpu" or config.bitwise)
    return section.engine == "transformers" or is_certain


def is_possible() -> bool:
    """Return True where processes can be held by descriptors, as since Linux 5.3."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


class WorkerTemplate:
    """The template as the launch sees it."""

    def __init__(self, environment: dict[str, str], modules: Sequence[str] = MODULES) -> None:
        """Start it; `environment`: that of workers, as far as all have it in common."""
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "prefixrl.deploy.template", str(theirs.fileno()), *modules]
        # A batch system sends its signals to every process of the job: workers are to finish what they have.
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
        self._codes: dict[int, int] = {}
        """Exit codes by id; one that was asked for is forgotten, since ids are used again."""
        self._news: list[str] = []
        self._load_deadline_s = time.monotonic() + LOAD_S
        self._is_ready = self.is_lost = False

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def is_loading(self) -> bool:
        """True until it can fork."""
        self._read(0.0)
        if not self._is_ready and time.monotonic() > self._load_deadline_s:
            self._lose(f"had not ended its imports after {LOAD_S:.0f} s")
        return not self._is_ready and not self.is_lost

    def news(self) -> list[str]:
        """Return what went wrong since the last call, for the console."""
        news, self._news = self._news, []
        return news

    def fork(self, arguments: list[str], environment: dict[str, str], output: int) -> "ForkedWorker | None":
        """Start a worker, `python -m ARGUMENTS`; None where it has to start by itself."""
        request = msgspec.msgpack.encode(Fork(arguments, environment))
        try:
            socket.send_fds(self._link, [request], [output])
        except ConnectionError:
            pass  # it has ended, as is read after what it still told
        except OSError as error:
            self._say_not_forked(str(error))
            return None
        deadline_s = time.monotonic() + ANSWER_S
        while not self.is_lost and (left_s := deadline_s - time.monotonic()) > 0.0:
            match self._read(left_s):
                case Forked(pid):
                    return ForkedWorker(pid, self)
                case NotForked(why):
                    self._say_not_forked(why)
                    return None
        self._lose(f"did not answer within {ANSWER_S:.0f} s")
        return None

    def _say_not_forked(self, why: str) -> None:
        self._news.append(f"the worker template (process {self.pid}) cannot fork ({why}): a worker starts by itself")

    def code_of(self, pid: int) -> int | None:
        """Return the exit code of a worker whose end was told."""
        self._read(0.0)
        return self._codes.pop(pid, None)

    def _read(self, timeout_s: float) -> Forked | NotForked | None:
        """Take what it has said; return its answer to a request."""
        while not self.is_lost and _is_readable(self._link.fileno(), timeout_s):
            timeout_s = 0.0
            try:
                data = self._link.recv(MOST_BYTES)
            except OSError:
                data = b""
            if not data:
                self._lose_ended()
                break
            match msgspec.msgpack.decode(data, type=Answer):
                case Imported():
                    self._is_ready = True
                case Ended(pid, code):
                    self._codes[pid] = code
                case Forked() | NotForked() as answer:
                    return answer
        return None

    def lose_silent(self) -> None:
        """End it because it does not tell of a worker's end."""
        self._lose(f"did not tell of a worker's end within {TELL_S:.0f} s")

    def _lose_ended(self) -> None:
        code: int | None = None
        with suppress(subprocess.TimeoutExpired):  # what it held is closed: it is about to be gone
            code = self._process.wait(TELL_S)
        self._lose("closed its socket" if code is None else f"ended with exit code {code}")

    def _lose(self, why: str) -> None:
        """End it and say so, once."""
        if not self.is_lost:
            forked = "the workers forked from it end with it, and " if self._is_ready else ""
            what = f"{forked}workers start by themselves from now on"
            self._news.append(f"the worker template (process {self.pid}) {why}: {what}")
            self.close()

    def close(self) -> None:
        """End it, and with it every worker that still runs."""
        self.is_lost = True
        self._process.kill()
        self._process.wait()
        self._link.close()


class ForkedWorker:
    """A worker that the template forked: what a launch needs of `subprocess.Popen`."""

    def __init__(self, pid: int, template: WorkerTemplate) -> None:
        self.pid, self._template = pid, template
        self._code: int | None = None
        # Ids are used again; a descriptor stays with its process. One that has ended already has told its code.
        self._handle: int | None = None
        with suppress(ProcessLookupError):
            self._handle = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Return its exit code, None while it runs."""
        if self._code is None and self._has_ended(0.0):
            self._code = self._template.code_of(self.pid)
            if self._code is None and self._template.is_lost:
                self._code = -signal.SIGKILL  # as it ended with the template
            if self._code is not None and self._handle is not None:
                os.close(self._handle)
                self._handle = None
        return self._code

    def _has_ended(self, timeout_s: float | None) -> bool:
        return self._handle is None or _is_readable(self._handle, timeout_s)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; subprocess.TimeoutExpired as there."""
        if not self._has_ended(timeout):
            raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout or 0.0)
        deadline_s = time.monotonic() + TELL_S
        while (code := self.poll()) is None:
            if time.monotonic() > deadline_s:
                self._template.lose_silent()
            time.sleep(0.001)  # its end is about to be told
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal unless it has ended."""
        if self.poll() is None and self._handle is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


def _is_readable(descriptor: int, timeout_s: float | None) -> bool:
    """Return True once there is something to read; `select` takes no descriptor above 1,023."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000.0))
