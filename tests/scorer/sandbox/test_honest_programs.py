"""Programs of the standard library that must not notice the filter of system calls."""

import pytest

from prefixrl.scorer.sandbox.runner import ProgramLimits, run

PATIENT = ProgramLimits(wall_ms=30_000, cpu_s=30, memory_bytes=128 * 2**20)
"""For programs that end by themselves, on a busy machine too."""
HONEST = {
    "numbers": (
        """\
import decimal, fractions, math, random, statistics
print(random.Random(1).random() < 1, math.comb(9, 3), fractions.Fraction(1, 3), statistics.mean([1, 2]))""",
        "True 84 1/3 1.5",
    ),
    "files": (
        """\
import os, pathlib, shutil, tempfile
with tempfile.TemporaryDirectory() as name:
    a, b = pathlib.Path(name, 'a'), pathlib.Path(name, 'b')
    a.write_text('x' * 9000); shutil.copy2(a, b); b.rename(a); b.symlink_to(a); os.truncate(b, 5)
    os.chmod(a, 0o600); os.utime(a)
    print(sorted(os.listdir(name)), b.read_text(), os.readlink(b) == str(a))
    shutil.copytree(name, 'tree'); shutil.rmtree('tree')
print(os.path.exists(name), shutil.disk_usage('.').total > 0)""",
        """\
['a', 'b'] xxxxx True
False True""",
    ),
    "mapped file": (
        """\
import mmap, os
with open('f', 'w+b') as f:
    f.write(bytes(4096)); f.flush(); os.fsync(f.fileno())
    with mmap.mmap(f.fileno(), 0) as m: m[:1] = b'y'; m.flush()
    f.seek(0); print(f.read(1))""",
        "b'y'",
    ),
    "data base": (
        """\
import sqlite3
with sqlite3.connect('db') as c: c.execute('create table t(a)'); c.execute('insert into t values (7)')
print(sqlite3.connect('db').execute('select a from t').fetchall())""",
        "[(7,)]",
    ),
    "threads": (
        """\
import concurrent.futures, queue, threading
found, threads = queue.Queue(), []
for n in range(2): threads.append(threading.Thread(target=found.put, args=(n,))); threads[-1].start()
for each in threads: each.join()
with concurrent.futures.ThreadPoolExecutor(1) as pool: print(found.qsize(), pool.submit(pow, 2, 9).result())""",
        "2 512",
    ),
    "coroutines": (
        """\
import asyncio
async def work():
    await asyncio.sleep(0.01)
    return await asyncio.gather(asyncio.to_thread(pow, 2, 5), asyncio.wait_for(asyncio.sleep(0, 7), 5))
print(asyncio.run(work()))""",
        "[32, 7]",
    ),
    "processes": (
        """\
import os, select, subprocess
r, w = os.pipe(); os.set_blocking(r, False)
if os.fork() == 0: os.write(w, b'x'); os._exit(0)
os.wait(); print(select.select([r], [], [], 5)[0] == [r], os.read(r, 9))
print(subprocess.run(['/bin/echo', 'hi'], capture_output=True).stdout)
print(subprocess.run('cat /dev/null && exit 0', shell=True, start_new_session=True).returncode)""",
        """\
True b'x'
b'hi\\n'
0""",
    ),
    "signals and time": (
        """\
import signal, time
def late(*_): raise TimeoutError
signal.signal(signal.SIGALRM, late); signal.setitimer(signal.ITIMER_REAL, 0.01)
try: time.sleep(9)
except TimeoutError: print('late')
print(time.process_time() >= 0 < time.time(), time.localtime().tm_year > 2000)""",
        """\
late
True True""",
    ),
    "itself": (
        """\
import os, platform, resource, shutil, sys, threading
resource.setrlimit(resource.RLIMIT_STACK, resource.getrlimit(resource.RLIMIT_STACK))
sys.setrecursionlimit(10**6); threading.stack_size(2**22)
t = threading.Thread(target=print, args=(os.cpu_count() > 0, os.getpid() > 0, len(os.urandom(3))))
t.start(); t.join()
print(platform.system(), shutil.get_terminal_size(), sys.stdout.isatty(), sys.stdin.read())""",
        """\
True True 3
Linux os.terminal_size(columns=80, lines=24) False given""",
    ),
}
"""Programs, and what they print."""


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_program_does_not_notice_the_sandbox(name: str) -> None:
    source, expected = HONEST[name]
    finished = run(source, b"given", PATIENT)
    assert (finished.stdout.decode().strip(), finished.stderr) == (expected, b"")
