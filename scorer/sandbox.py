"""Runs a program that a model wrote: no network, nothing to read but the system, nothing to write but scratch.

    source, stdin ──▶ run ──▶ Finished: exited | killed | timeout | flood, stdout, stderr
                           └─▶ SandboxError: nothing is known

Linux namespaces, a seccomp filter and resource limits, without any other program's help (`sandbox_child.py`). Where the host
cannot isolate, `SandboxError` says why and nothing is run: a failure of the sandbox is never a failure of the program.
"""

import contextlib
import fcntl
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Literal

import msgspec

from prefixrl.common.messages import Fault

_CHILD = f"import sys; sys.path.append({str(Path(__file__).parent)!r}); import sandbox_child; sandbox_child.main()"
"""Imported and not run by its path: its compiled code is then kept, which saves a third of its start."""
PYTHON = os.path.realpath(sys.executable)
GRACE_S = 0.25
"""The watcher inside keeps the time; it is killed from here when it has not by then."""
START_S = 5.0
"""For building the namespaces, on a busy machine."""
OVERRAN = "the sandbox did not end the program in time"
_READ_BYTES = 65_536


class SandboxError(Exception):
    """The program was not run, or how it ended is not known; the message says why."""

    def __init__(self, message: str, fault: Fault = "sandbox failed") -> None:
        super().__init__(message)
        self.fault: Fault = fault


class Limits(msgspec.Struct, frozen=True):
    """What one program may use."""

    wall_ms: int = 5_000
    cpu_s: int = 5
    memory_bytes: int = 512 * 2**20
    """Address space of each process."""
    processes: int = 4
    """And threads; one of them is the sandbox's own."""
    file_bytes: int = 2**20
    scratch_bytes: int = 16 * 2**20
    open_files: int = 64
    output_bytes: int = 2**20
    """Of stdout and stderr together; a program that writes more is ended."""


class Finished(msgspec.Struct, frozen=True):
    """How a program ended."""

    status: Literal["exited", "killed", "timeout", "flood"]
    """`killed`: by a signal, its own or that of a limit. `flood`: it wrote too much."""
    code: int
    """Exit code, or number of the signal."""
    stdout: bytes
    stderr: bytes


def run(source: str, stdin: bytes = b"", limits: Limits | None = None) -> Finished:
    """Run a Python program to its end; the standard library is all it can import. Blocks.

    Raises:
        SandboxError: the host cannot isolate, or the sandbox failed.
    """
    limits = limits or Limits()
    with contextlib.ExitStack() as open_files:
        given = open_files.enter_context(_stdin(source, stdin))
        hear, told = os.pipe()
        open_files.callback(os.close, hear)
        try:
            process = _start(given, told, limits)
        finally:
            os.close(told)
        open_files.callback(_end, process)
        outputs, is_flood = _collect(process, limits)
        if is_flood:
            return Finished("flood", 0, *outputs)
        return _finished(os.read(hear, _READ_BYTES), outputs)


def probe() -> str | None:
    """Why this host cannot isolate, or None; three attacks are tried."""
    attacks = (
        "import socket; socket.socket()",
        "open('/etc/passwd').read()",
        "open('/escaped', 'w')",
    )
    try:
        for attack in attacks:
            finished = run(attack)
            if (finished.status, finished.code) == ("exited", 0):
                return f"{attack!r} succeeded inside the sandbox"
    except SandboxError as error:
        return str(error)
    return None


# The source comes first on stdin, its length before it: no file is needed, and none is left.
_BOOT = (
    "import os,sys\n"
    "def _read(n):\n"
    "    data=b''\n"
    "    while len(data)<n:\n"
    "        data+=os.read(0,n-len(data))\n"
    "    return data\n"
    "_source=_read(int(_read(12))).decode()\n"
    "del _read,os,sys\n"
    "exec(compile(_source,'program.py','exec'),{'__name__':'__main__'})\n"
)


@contextlib.contextmanager
def _stdin(source: str, stdin: bytes) -> Iterator[int]:
    """A file in memory, sealed: the program cannot write to it."""
    body = source.encode("utf-8", "replace")
    descriptor = os.memfd_create("program", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with os.fdopen(os.dup(descriptor), "wb") as file:
            file.write(b"%012d" % len(body) + body + stdin)
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)


def _start(given: int, told: int, limits: Limits) -> "subprocess.Popen[bytes]":
    libraries = [str(Path(sys.base_prefix).resolve())]
    inner = [PYTHON, "-I", "-S", "-B", "-X", "utf8", "-c", _BOOT]
    outer = [PYTHON, "-I", "-S", "-c", _CHILD, str(os.getpid()), str(told)]
    allowed = [f"{name}={value}" for name, value in msgspec.structs.asdict(limits).items()]
    command = [*outer, *allowed, *libraries, "--", *inner]
    try:
        return subprocess.Popen(
            command, stdin=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={"LANG": "C.UTF-8"},
            pass_fds=(told,), start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise SandboxError(f"the sandbox cannot be started: {error}") from error


def _collect(process: "subprocess.Popen[bytes]", limits: Limits) -> tuple[list[bytes], bool]:
    """What it wrote until it ended; True when that was too much, and it was ended for it."""
    pipes: list[IO[bytes]] = [pipe for pipe in (process.stdout, process.stderr) if pipe]
    found = {pipe: bytearray() for pipe in pipes}
    deadline = time.monotonic() + START_S + limits.wall_ms / 1000 + GRACE_S
    with selectors.DefaultSelector() as selector:
        for pipe in pipes:
            selector.register(pipe, selectors.EVENT_READ)
        while selector.get_map():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise SandboxError(OVERRAN, "sandbox overran")
            for key, _ in selector.select(left_s):
                pipe = key.fileobj  # type: ignore[assignment]
                data = os.read(pipe.fileno(), _READ_BYTES)
                found[pipe] += data
                if not data:
                    selector.unregister(pipe)
            if sum(map(len, found.values())) > limits.output_bytes:
                return [bytes(found[pipe][: limits.output_bytes]) for pipe in pipes], True
    return [bytes(found[pipe]) for pipe in pipes], False


def _end(process: "subprocess.Popen[bytes]") -> None:
    # The watcher reaps what it started; whoever kills it leaves that to the machine's first process.
    process.terminate()
    try:
        process.wait(GRACE_S + START_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for pipe in (process.stdout, process.stderr):
        if pipe:
            pipe.close()


def _finished(said: bytes, outputs: list[bytes]) -> Finished:
    kind, _, rest = said.decode(errors="replace").strip().partition(" ")
    match kind:
        case "exit":
            return Finished("exited", int(rest), *outputs)
        case "signal":
            return Finished("killed", int(rest), *outputs)
        case "timeout":
            return Finished("timeout", 0, *outputs)
        case "refused":
            raise SandboxError(f"this host cannot isolate programs: {rest}", "sandbox refused")
    tail = outputs[1][-500:].decode(errors="replace")
    raise SandboxError(f"the sandbox ended without a word: {tail}")
