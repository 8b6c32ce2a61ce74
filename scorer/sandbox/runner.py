"""The sandbox from outside: no network, read-only system, one scratch folder to write.

    source, stdin ──▶ run ──▶ ProgramRun: exited | killed | timeout | flood, stdout, stderr
                           └─▶ SandboxError: the result is unknown

Linux namespaces, a seccomp filter and resource limits, without the help of another program
(`child.py`). If the host cannot isolate, `SandboxError` names the reason and nothing is run: a
fault of the sandbox is never one of the program.
"""

import contextlib
import fcntl
import functools
import importlib.util
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

from prefixrl.common.wire.messages.groups import Fault

_CHILD = f"import sys; sys.path.append({str(Path(__file__).parent)!r}); import child; child.main()"
"""Code that imports the child instead of running its file: the compiled code is kept, a third of the start saved."""
_BOOT = Path(__file__).with_name("boot.py").read_text(encoding="utf-8")
PYTHON = os.path.realpath(sys.executable)
GRACE_S = 0.25
"""Time after the limit at which the watcher inside, which enforces the limit, is killed from here."""
START_S = 5.0
"""Time to build the namespaces on a busy machine."""
OVERRAN = "the sandbox did not end the program in time"
_READ_BYTES = 65_536


class SandboxError(Exception):
    """The program was not run, or its end is unknown; the message gives the reason."""

    def __init__(self, message: str, fault: Fault = "sandbox failed") -> None:
        super().__init__(message)
        self.fault: Fault = fault


class ProgramLimits(msgspec.Struct, frozen=True):
    """The resources of one program."""

    wall_ms: int = 5_000
    cpu_s: int = 5
    memory_bytes: int = 512 * 2**20
    """Address space of each process."""
    processes: int = 4
    """Processes and threads; one of them is the sandbox's own."""
    file_bytes: int = 2**20
    scratch_bytes: int = 16 * 2**20
    open_files: int = 64
    output_bytes: int = 2**20
    """Limit for stdout and stderr together; a program that writes more is ended."""


class ProgramRun(msgspec.Struct, frozen=True):
    """The end of a program."""

    status: Literal["exited", "killed", "timeout", "flood"]
    """`killed`: by a signal that it sent itself or a limit sent. `flood`: it wrote too much."""
    code: int
    """Exit code, or number of the signal."""
    stdout: bytes
    stderr: bytes


def run(
    source: str,
    stdin: bytes = b"",
    limits: ProgramLimits | None = None,
    packages: tuple[str, ...] = (),
) -> ProgramRun:
    """Run a Python program to its end, with the standard library and packages; blocks; raises SandboxError."""
    limits = limits or ProgramLimits()
    with contextlib.ExitStack() as open_files:
        input_file = open_files.enter_context(_stdin(source, stdin))
        status, child_status = os.pipe()
        open_files.callback(os.close, status)
        try:
            process = open_files.enter_context(
                _start(input_file, child_status, limits, _folders(packages))
            )
        finally:
            # The child alone holds this end from here on: reading the status ends when it ends.
            os.close(child_status)
        # However this function ends, no process of the program outlives it.
        open_files.callback(_end, process)
        outputs, is_flood = _collect(process, limits)
        if is_flood:
            return ProgramRun("flood", 0, *outputs)
        return _finished(os.read(status, _READ_BYTES), outputs)


@functools.cache
def _folders(packages: tuple[str, ...]) -> tuple[Path, ...]:
    """Return the folders of packages, and of the libraries that their wheels brought."""
    specs = [importlib.util.find_spec(name) for name in packages]
    folders = [
        Path(folder) for spec in specs if spec for folder in spec.submodule_search_locations or ()
    ]
    libraries = [folder.with_name(f"{folder.name}.libs") for folder in folders]
    return (*folders, *(library for library in libraries if library.is_dir()))


def probe(packages: tuple[str, ...] = ()) -> str | None:
    """Return why this host cannot isolate, or None; three attacks are tried, and the import of packages."""
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
        for name in packages:
            if (finished := run(f"import {name}", packages=packages)).code != 0:
                return f"a program cannot import {name}: {finished.stderr[-300:].decode(errors='replace').strip()}"
    except SandboxError as error:
        return str(error)
    return None


@contextlib.contextmanager
def _stdin(source: str, stdin: bytes) -> Iterator[int]:
    """Make a sealed file in memory: the program cannot write to it."""
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


def _start(
    input_file: int, status: int, limits: ProgramLimits, folders: tuple[Path, ...]
) -> "subprocess.Popen[bytes]":
    libraries = [str(Path(sys.base_prefix).resolve()), *map(str, folders)]
    sites = {str(folder.parent) for folder in folders}
    inner = [PYTHON, "-I", "-S", "-B", "-X", "utf8", "-c", _BOOT, *sites]
    outer = [PYTHON, "-I", "-S", "-c", _CHILD, str(os.getpid()), str(status)]
    allowed = [f"{name}={value}" for name, value in msgspec.structs.asdict(limits).items()]
    command = [*outer, *allowed, *libraries, "--", *inner]
    try:
        return subprocess.Popen(
            command,
            stdin=input_file,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # The scorer's environment may hold secrets, so a program gets none of it.
            env={"LANG": "C.UTF-8"},
            pass_fds=(status,),
            start_new_session=True,
        )
    except OSError as error:
        raise SandboxError(f"the sandbox cannot be started: {error}") from error


def _collect(process: "subprocess.Popen[bytes]", limits: ProgramLimits) -> tuple[list[bytes], bool]:
    """Return what it wrote until its end; True if that was too much, so that it must be ended."""
    pipes: list[IO[bytes]] = [pipe for pipe in (process.stdout, process.stderr) if pipe]
    outputs = {pipe: bytearray() for pipe in pipes}
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
                outputs[pipe] += data
                if not data:
                    selector.unregister(pipe)
            if sum(map(len, outputs.values())) > limits.output_bytes:
                return [bytes(outputs[pipe][: limits.output_bytes]) for pipe in pipes], True
    return [bytes(outputs[pipe]) for pipe in pipes], False


def _end(process: "subprocess.Popen[bytes]") -> None:
    # The watcher reaps its children; if it is killed, that is left to the machine's first process.
    process.terminate()
    try:
        process.wait(GRACE_S + START_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)


def _finished(status: bytes, outputs: list[bytes]) -> ProgramRun:
    kind, _, detail = status.decode(errors="replace").strip().partition(" ")
    match kind:
        case "exit":
            return ProgramRun("exited", int(detail), *outputs)
        case "signal":
            return ProgramRun("killed", int(detail), *outputs)
        case "timeout":
            return ProgramRun("timeout", 0, *outputs)
        case "refused":
            raise SandboxError(f"this host cannot isolate programs: {detail}", "sandbox refused")
    tail = outputs[1][-500:].decode(errors="replace")
    raise SandboxError(f"the sandbox ended without a status: {tail}")
