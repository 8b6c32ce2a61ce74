"""Programs written to harm the machine that judges them, run as a scorer runs them, by whoever starts this.

    python -m benchmarks.hostile_programs        a line of JSON per program, then one with what is left of them

Each prints ESCAPED if its attack succeeds; then it would be judged right. A test has them run by root and by an
ordinary user (`tests/scorer/sandbox/test_hostile_programs.py`); `python -m benchmarks.sandbox` measures how late their
verdicts are.
"""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

from prefixrl.scorer.verifier.child import judge_any
from prefixrl.scorer.verifier.exchange import ChildQuestion

TIMEOUT_S = 1
ALLOWED_S = 0.5
"""Seconds that a verdict may take beyond the limit."""
GOLD = "ESCAPED"

BUFFER = "ctypes.create_string_buffer(256)"
LIBC = "import ctypes, os\nL = ctypes.CDLL(None, use_errno=True)\n"


def calls(number: int, *arguments: object) -> str:
    given = ", ".join(map(str, (number, *arguments)))
    return f"{LIBC}print('ESCAPED' if L.syscall({given}) >= 0 else 'held')"


def tried(attack: str) -> str:
    body = "".join(f"    {line}\n" for line in attack.splitlines())
    return f"try:\n{body}    print('ESCAPED')\nexcept BaseException: print('held')"


KERNEL = {
    "new mount interface": calls(430, "b'tmpfs'", 0),
    "a copy of the mount tree": calls(428, -100, "b'/'", 1),
    "move a mount": calls(429, -100, "b'/usr'", -100, "b'/scratch'", 0),
    "a handle of a file": calls(303, -100, "b'/usr'", BUFFER, "ctypes.byref(ctypes.c_int())", 0),
    "open by handle": calls(304, -100, BUFFER, 0),
    "join a namespace": calls(308, 0, 0),
    "page faults of its own": calls(323, 0),
    "performance counters": calls(298, BUFFER, 0, -1, -1, 0),
    "watch files": calls(253),
    "watch the file system": calls(300, 0, 0),
    "segments of old": calls(154, 1, BUFFER, 16),
    "ports of the machine": calls(172, 3),
    "a range of ports": calls(173, 0x3F8, 8, 1),
    "another persona": calls(135, 0x0040000),
    "swap to a file": calls(167, "b'/scratch/f'", 0),
    "set the clock": calls(227, 0, BUFFER),
    "skew the clock": calls(159, BUFFER),
    "message queues": calls(240, "b'q'", 0o102, 0o600, 0),
    "semaphores that outlive it": calls(64, 0, 1, 0o1666),
    "messages that outlive it": calls(68, 0, 0o1666),
    "timers without a count": calls(222, 0, 0, "ctypes.byref(ctypes.c_int())"),
    "another process's descriptors": calls(438, 3, 0, 0),
    "a descriptor of a process": calls(434, 1, 0),
    "write into another process": calls(311, 1, 0, 0, 0, 0, 0),
    "a module of the kernel": calls(313, 0, "b''", 0),
    "another kernel": calls(246, 0, 0, 0, 0),
    "asynchronous reads": calls(206, 8, "ctypes.byref(ctypes.c_long())"),
    "secret memory": calls(447, 0),
    "a hard limit raised": calls(302, 0, 9, "(ctypes.c_ulong * 2)(2**62, 2**62)", 0),
    "scheduled in real time": calls(144, 0, 1, "ctypes.byref(ctypes.c_int(50))"),
    "keep its keys": calls(248, "b'user'", "b'k'", "b'v'", 1, -2),
    "type into the terminal": tried("import fcntl\nfcntl.ioctl(1, 0x5412, b'x')"),
    "a pair of the network": tried("import socket\nsocket.socketpair(socket.AF_INET)"),
    "a socket of the kernel's ciphers": tried("import socket\nsocket.socket(38, 5)"),
    "calls of 32 bits": (
        "import ctypes, mmap\nm = mmap.mmap(-1, 4096, prot=7)\n"
        "m.write(bytes([0xb8, 20, 0, 0, 0, 0xcd, 0x80, 0xc3]))\n"
        "f = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))\n"
        "print('ESCAPED' if f() >= 0 else 'held')"
    ),
}
PROCESSES = {
    "ends its group": "import os\nos.kill(0, 9)",
    "ends everyone": "import os\nif os.fork() == 0: os.kill(-1, 9)\nos.wait()",
    "stops its group": "import os, signal, time\nif os.fork() == 0: os.kill(0, signal.SIGSTOP)\ntime.sleep(60)",
    "stops itself": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "ends the first process": (
        "import os\nfor n in range(1, 65):\n  try: os.kill(1, n)\n  except OSError: pass\nprint('on')"
    ),
    "a session of its own": "import os, time\nif os.fork() == 0:\n  os.setsid()\n  while True: time.sleep(1)\nprint(1)",
    "orphans without end": (
        "import os, time\nend = time.time() + 30\n"
        "while time.time() < end:\n  try:\n    if os.fork(): os._exit(0)\n  except OSError: pass"
    ),
    "dead children by the thousand": (
        "import os\nfor n in range(5000):\n  try:\n    if os.fork() == 0: os._exit(0)\n"
        "  except OSError: break\nprint(n)"
    ),
    "replaces itself": "import os\nos.execv('/bin/sh', ['sh', '-c', 'while :; do :; done'])",
    "replaces itself by a sleeper": "import os\nos.execv('/bin/sleep', ['sleep', '60'])",
    "catches its own crash": (
        "import ctypes, faulthandler, signal\nsignal.signal(signal.SIGSEGV, lambda *_: None)\nctypes.string_at(0)"
    ),
    "waits in a thread": "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()\nprint(1)",
    "waits at its exit": "import atexit, time\natexit.register(time.sleep, 60)\nprint(1)",
    "waits in a destructor": (
        "class A:\n  def __del__(self):\n    import time; time.sleep(60)\na = A()\nprint(1)"
    ),
    "closes everything and waits": "import os, time\nos.closerange(0, 256)\ntime.sleep(60)",
    "fills a pipe": "import os\nr, w = os.pipe()\nwhile True: os.write(w, b'x' * 4096)",
    "reads what never comes": "import os\nr, w = os.pipe()\nos.read(r, 1)",
    "a lock held twice": "import threading\nl = threading.Lock()\nl.acquire(); l.acquire()",
    "spins in C": "import re\nre.match('(a*)*b', 'a' * 99)",
    "a number without end": "x = 7 ** (7 ** 9)",
    "a regular storm": "sum(i * i for i in iter(int, 1))",
}
FILES = {
    "files without number": "n = 0\nwhile True:\n  open(f'f{n}', 'w').close(); n += 1",
    "folders without end": "import os\nwhile True:\n  os.mkdir('d'); os.chdir('d')",
    "links in a circle": tried(
        "import os\nos.symlink('a', 'b'); os.symlink('b', 'a')\nopen('a').read()"
    ),
    "a sparse giant": tried("f = open('f', 'wb')\nf.truncate(2**40)"),
    "maps a giant": tried("import mmap\nmmap.mmap(-1, 2**34)"),
    "its own source again": tried("import os\nos.lseek(0, 0, 0)\nos.write(0, b'x')"),
    "the folder of processes": tried("import os\nassert os.listdir('/proc')"),
    "the folder of devices": tried("open('/dev/mem', 'rb').read(1)"),
    "the watcher's descriptors": (
        "import os\nfor n in range(3, 256):\n  try: os.write(n, b'exit 0\\n')\n  except OSError: pass\nprint('held')"
    ),
}
ANSWERS = {
    "a line of a megabyte": "print('9' * 900_000)",
    "a line past 64 KiB": "print(list(range(20000)))",
    "brackets within brackets": "print('[' * 200_000)",
    "output that is no text": "import os\nos.write(1, bytes(range(256)) * 99 + b'\\n')",
    "half a character": "import os\nprint('\\ud800'.encode('utf-8', 'surrogatepass'))\nos.write(1, b'\\xed\\xa0\\n')",
    "a value that cannot be shown": "class A:\n  def __str__(self): raise SystemExit(0)\nA()",
    "a value that is shown for ever": "class A:\n  def __str__(self):\n    while True: pass\nA()",
    "a value that contains itself": "a = []\nfor _ in range(100_000): a = [a]\na",
    "a float of many places": "5e-324",
    "an exception as long as a book": "raise ValueError('x' * 2**22)",
    "says that it is right": "import builtins\nbuiltins.print = lambda *a: None\nimport os\nos.write(1, b'right\\n')",
    "leaves in the middle": "import os\nprint('ESCAPE')\nos._exit(0)",
    "no program": "def (:",
    "a program that is deep": "(" * 5000 + "1" + ")" * 5000,
    "a null in the source": "print(1)\0",
    "floods both outputs": "import os\nwhile True: os.write(1, b'x' * 999); os.write(2, b'y' * 999)",
}
HOSTILE = KERNEL | PROCESSES | FILES | ANSWERS


def judged(names: list[str]) -> Iterator[dict[str, object]]:
    """Verdict and seconds of each program."""
    for name in names:
        began_s = time.perf_counter()
        judgement = judge_any(ChildQuestion(GOLD, HOSTILE[name], TIMEOUT_S, code="answers"))
        outcome = "right" if judgement.reward == 1.0 else "wrong"
        yield {
            "name": name,
            "outcome": outcome if judgement.status == "ok" else judgement.status,
            "reason": judgement.extracted if judgement.status == "error" else "",
            "took_s": time.perf_counter() - began_s,
        }


def left() -> tuple[int, int]:
    """Children of this process, dead ones included, and its open descriptors."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return len(children), len(os.listdir("/proc/self/fd"))


def main() -> None:
    before = left()
    for each in judged(list(HOSTILE)):
        print(json.dumps(each), flush=True)
    processes, descriptors = (after - first for after, first in zip(left(), before, strict=True))
    print(json.dumps({"user": os.geteuid(), "processes": processes, "descriptors": descriptors}))


if __name__ == "__main__":
    main()
