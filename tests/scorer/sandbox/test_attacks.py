"""Programs written to do harm: each fails, each has its status, and nothing is left of it.

Every program is bounded even where the sandbox fails: at most 200 processes, 2 GiB, loopback addresses, its own files.
An attack that must fail prints ESCAPED if it succeeds.
"""

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from prefixrl.scorer.sandbox.runner import GRACE_S, ProgramLimits, run

LIMITS = ProgramLimits(wall_ms=1_500, cpu_s=1, memory_bytes=128 * 2**20)
PATIENT = ProgramLimits(wall_ms=30_000, cpu_s=30, memory_bytes=128 * 2**20)
"""For programs that end by themselves, on a busy machine too."""
BUSY_S = 10.0
MARK = Path("/tmp/prefixrl-escaped")
NOT_ALLOWED = {
    "read the users": "open('/etc/passwd').read()",
    "read the shadow file": "open('/etc/shadow').read()",
    "read the host name": "assert open('/etc/hostname').read()",
    "read its maker's memory": "open('/proc/self/mem', 'rb').read(1)",
    "read an environment": "open('/proc/1/environ').read()",
    "read the environment of its parent": "import os; open(f'/proc/{os.getppid()}/environ').read()",
    "read a token of the environment": "import os; assert set(os.environ) - "
    "{'HOME', 'TMPDIR', 'PATH', 'LANG', 'LC_CTYPE', 'PWD', 'OPENBLAS_NUM_THREADS'}",
    "read the home folder": "import os; os.listdir('/home')",
    "see the repository": "import prefixrl",
    "import what is installed": "import msgspec",
    "write to the root": "open('/MARK', 'w')",
    "write to the system": "open('/usr/MARK', 'w')",
    "write to the Python": "import os; open(os.path.join(os.path.dirname(os.__file__), 'os.py'), 'a')",
    "write beside the libraries": "import os; os.mkdir('/lib/MARK')",
    "remove the system": "import os; os.remove('/usr/bin/env')",
    "climb out by dots": "open('../../../../../../../../tmp/MARK', 'w').close(); assert not open('/tmp/MARK')",
    "climb out by a link": "import os; os.symlink('/../../etc/passwd', 'link'); open('link').read()",
    "climb out by the old root": "import os; assert os.listdir('/old')",
    "write through a link": "import os; os.symlink('/usr/lib/x', 'link'); open('link', 'w')",
    "hard link to the system": "import os; os.link('/usr/bin/env', 'env')",
    "break out of chroot": "import os; os.mkdir('d'); os.chroot('d'); os.chroot('../../..'); os.listdir('home')",
    "connect to loopback": "import socket; socket.create_connection(('127.0.0.1', PORT), 1)",
    "connect to loopback, sixth version": "import socket; socket.create_connection(('::1', PORT), 1)",
    "listen": "import socket; socket.create_server(('127.0.0.1', 0))",
    "send a datagram": "import socket; socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', PORT))",
    "abstract socket": r"import socket; socket.socket(socket.AF_UNIX).connect('\0prefixrl-test')",
    "raw packets": "import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "ask the virtual machine's host": "import socket; socket.socket(40).connect((2, 1))",
    "kernel messages": "import socket; socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    "trace its parent": """\
import ctypes, os
assert ctypes.CDLL(None, use_errno=True).syscall(101, 16, 1, 0, 0) >= 0, ctypes.get_errno()""",
    "read another process": """\
import ctypes, os
assert ctypes.CDLL(None, use_errno=True).syscall(310, 1, 0, 0, 0, 0, 0) >= 0, ctypes.get_errno()""",
    "a new user namespace": """\
import ctypes, os
assert ctypes.CDLL(None, use_errno=True).syscall(272, 268435456) >= 0, ctypes.get_errno()""",
    "clone with namespaces": """\
import ctypes, os
assert ctypes.CDLL(None, use_errno=True).syscall(56, 268435473, 0, 0, 0, 0) >= 0, ctypes.get_errno()""",
    "clone by the newer call": """\
import ctypes, os
assert ctypes.CDLL(None, use_errno=True).syscall(435, 0, 0) >= 0, ctypes.get_errno()""",
    "mount": "import ctypes; assert ctypes.CDLL(None).mount(b'none', b'/scratch', b'tmpfs', 0, None) == 0",
    "remount writable": "import ctypes; assert ctypes.CDLL(None).mount(None, b'/usr', None, 4128, None) == 0",
    "unmount": "import ctypes; assert ctypes.CDLL(None).umount2(b'/usr', 2) == 0",
    "load a filter program": """\
import ctypes, os
assert ctypes.CDLL(None, use_errno=True).syscall(321, 5, 0, 0) >= 0, ctypes.get_errno()""",
    "keys of the kernel": """\
import ctypes, os
assert ctypes.CDLL(None, use_errno=True).syscall(250, 0, -3, 0) >= 0, ctypes.get_errno()""",
    "rings that pass the filter by": """\
import ctypes, os
assert ctypes.CDLL(None, use_errno=True).syscall(425, 1, 0) >= 0, ctypes.get_errno()""",
    "memory that no limit counts": "import os; os.memfd_create('x')",
    "shared memory that outlives it": """\
import ctypes, os
assert ctypes.CDLL(None, use_errno=True).syscall(29, 0, 4096, 950) >= 0, ctypes.get_errno()""",
    "become root": "import os; os.setuid(0); assert os.getuid() == 0",
    "raise its limits": "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "change the host's name": "import socket; socket.sethostname('x')",
    "make a device": "import os; os.mknod('disk', 0o60666, os.makedev(8, 0))",
    "stop the machine": """\
import ctypes, os
assert ctypes.CDLL(None, use_errno=True).syscall(169, 4276215469, 672274793, 2309737967) >= 0, ctypes.get_errno()""",
    "call in another architecture's way": """\
import ctypes, os
assert ctypes.CDLL(None, use_errno=True).syscall(1073741863) >= 0, ctypes.get_errno()""",
    "a file beyond the limit": """\
import os
f = open('f', 'wb')
for _ in range(4): f.write(b'x' * 2**20); f.flush()""",
    "fill the scratch folder": """\
for n in range(64):
    open(f'f{n}', 'wb').write(b'x' * (2**20 - 1))""",
    "open many files": "files = [open(f'f{n}', 'w') for n in range(100)]",
    "2 GiB": "data = bytearray(2**31 - 2**20)",
    "many threads": """\
import threading, time
for _ in range(100): threading.Thread(target=time.sleep, args=(9,), daemon=True).start()""",
    "a hundred and fifty processes": """\
import os, time
for _ in range(150):
    if os.fork() == 0:
        time.sleep(9)
        os._exit(0)""",
}
"""Programs that must raise; PORT and MARK are filled in by the test."""
ENDED = {
    "endless loop": ("while True: pass", {"killed", "timeout"}),
    "sleep past the limit": ("import time; time.sleep(60)", {"timeout"}),
    "deaf to signals": (
        """\
import signal, time
for n in set(range(1, 65)) - {9, 19, 32, 33}: signal.signal(n, signal.SIG_IGN)
while True: time.sleep(1)""",
        {"timeout"},
    ),
    "endless output": ("while True: print('x' * 1000)", {"flood"}),
    "endless complaint": (
        """\
import sys
while True: sys.stderr.write('x' * 1000)""",
        {"flood"},
    ),
    "output without an end of line": (
        """\
import os
while True: os.write(1, b'x')""",
        {"flood", "killed", "timeout"},
    ),
    "fork bomb": (
        """\
import os
for _ in range(7):
    try: os.fork()
    except OSError: pass
import time; time.sleep(20)""",
        {"timeout"},
    ),
    "a daemon that outlives it": (
        """\
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0: time.sleep(90)
    os._exit(0)""",
        {"exited"},
    ),
    "a daemon that holds the output": (
        """\
import os, time
if os.fork() == 0: time.sleep(90)
print('done')""",
        {"exited"},
    ),
    "signals to everyone": (
        """\
import os
os.kill(-1, 9)
print('sent')""",
        {"exited", "killed"},
    ),
    "signals to its parent": (
        """\
import os
os.kill(os.getppid(), 9)
os.kill(1, 15)
print('sent')""",
        {"exited"},
    ),
    "signals to every number": (
        """\
import os
for pid in range(3, 40000):
    try: os.kill(pid, 9)
    except OSError: pass
""",
        {"exited"},
    ),
    "deep recursion": (
        """\
def f(): f()
import sys; sys.setrecursionlimit(10**9)
f()""",
        {"exited", "killed", "timeout"},
    ),
    "crash": ("import ctypes; ctypes.string_at(0)", {"killed"}),
    "abort": ("import os; os.abort()", {"killed"}),
    "memory, piece by piece": (
        """\
pieces = []
try:
  for _ in range(200): pieces.append(bytearray(10 * 2**20))
except MemoryError: print('held')
else: print('ESCAPED')""",
        {"exited"},
    ),
    "wide arithmetic": ("print(9 ** (9 ** 8) % 7)", {"killed", "timeout"}),
    "closing everything": (
        """\
import os
for n in range(64):
    try: os.close(n)
    except OSError: pass
while True: pass""",
        {"killed", "timeout"},
    ),
    "says what the sandbox would say": (
        """\
import os
for n in range(3, 64):
    try: os.write(n, b'{"exit": 0}\\n')
    except OSError: pass
os._exit(3)""",
        {"exited"},
    ),
}
"""Programs that the sandbox ends, and the statuses that the end may have."""


def tried(attack: str) -> str:
    """Return a program that prints ESCAPED unless the attack raises."""
    body = "".join(f"    {line}\n" for line in attack.splitlines())
    return (
        f"try:\n{body}except BaseException as error:\n    print('held', repr(error)[:200])\n"
        "else:\n    print('ESCAPED')\n"
    )


@pytest.fixture
def loopback() -> Iterator[int]:
    """A service that must see nobody."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server.getsockname()[1]
        with pytest.raises(BlockingIOError):
            server.accept()


def sandboxes() -> set[int]:
    """Processes that a sandbox of this process started and that still are, whatever their state."""
    return {each.pid for each in psutil.Process().children(recursive=True)}


def test_there_are_forty_hostile_programs() -> None:
    assert len(NOT_ALLOWED) + len(ENDED) >= 40


@pytest.mark.parametrize("name", NOT_ALLOWED)
def test_what_is_not_allowed_does_not_succeed(name: str, loopback: int) -> None:
    MARK.unlink(missing_ok=True)
    attack = NOT_ALLOWED[name].replace("PORT", str(loopback)).replace("MARK", MARK.name)
    finished = run(tried(attack), limits=LIMITS)
    assert b"ESCAPED" not in finished.stdout
    held = b"held" in finished.stdout or finished.status in ("killed", "timeout")
    assert held, (finished, "the attack itself did not run")
    assert not MARK.exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ENDED)
def test_what_does_not_end_is_ended_and_has_its_status(name: str) -> None:
    before = sandboxes()
    source, statuses = ENDED[name]
    began_s = time.monotonic()
    limits = PATIENT if statuses == {"exited"} else LIMITS
    finished = run(source, limits=limits)
    elapsed_s = time.monotonic() - began_s
    assert finished.status in statuses
    assert b"ESCAPED" not in finished.stdout
    assert elapsed_s <= limits.wall_ms / 1000 + GRACE_S + BUSY_S
    assert sandboxes() == before


def test_a_program_cannot_say_for_the_sandbox_how_it_ended() -> None:
    assert run(ENDED["says what the sandbox would say"][0], limits=PATIENT).code == 3
