"""The sandbox itself: its filter, its input and output, what it leaves behind, and hosts that cannot isolate."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from prefixrl.scorer.sandbox import child, runner
from prefixrl.scorer.sandbox.runner import PYTHON, START_S, ProgramLimits, SandboxError, probe, run
from support.paths import ROOT

PATIENT = ProgramLimits(wall_ms=30_000, cpu_s=30, memory_bytes=128 * 2**20)
"""For programs that end by themselves, on a busy machine too."""
SLOW = """
import signal, sys, threading
from prefixrl.scorer.sandbox.runner import ProgramLimits, run
signal.signal(signal.SIGTERM, signal.SIG_IGN)
threading.Timer(1.0, lambda: print("running", flush=True)).start()
finished = run("import time; time.sleep(3); print('late')", limits=ProgramLimits(wall_ms=30_000))
print(finished.status, finished.code, finished.stdout.decode())
"""
UNFILTERED = {335, 336}
"""`uretprobe` and `uprobe` of x86_64: newer kernels ask no filter, and end whoever has no such probe."""
CALLS = 601
EVERY_CALL = f"""
import ctypes, os, signal
call = ctypes.CDLL(None, use_errno=True).syscall
for number in range({CALLS}):
    if os.fork() == 0:
        signal.alarm(1)
        result = call(number, *[ctypes.c_long(-1)] * 6)
        os.write(1, b"%d %d\\n" % (number, ctypes.get_errno() if result == -1 else 0))
        os._exit(0)
    os.wait()
"""


def test_no_call_reaches_the_kernel_but_those_on_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """The filter answers with errors that no kernel gives, so that its answers are known from the kernel's."""
    refused, unknown, column = 4001, 4002, child.ARCHITECTURES[os.uname().machine][0]
    answers = f"child.REFUSED, child.UNKNOWN = {refused}, {unknown}; child.main()"
    monkeypatch.setattr(runner, "_CHILD", runner._CHILD.replace("child.main()", answers))
    finished = run(EVERY_CALL, limits=PATIENT)
    assert (finished.status, finished.code) == ("exited", 0), finished.stderr
    errors = dict(map(int, line.split()) for line in finished.stdout.splitlines())
    reached = {
        number for number in range(CALLS) if errors.get(number) not in (refused, unknown)
    } - UNFILTERED
    assert reached == {numbers[column] for numbers in child.ALLOWED.values()} - {-1}
    newer = {number for number, error in errors.items() if error == unknown}
    assert newer == {child.CLONE3, *range(child.NEWEST + 1, CALLS)}


@pytest.mark.parametrize("column", [0, 1])
def test_no_number_of_the_filter_stands_twice(column: int) -> None:
    tables = (
        *child.ALLOWED.values(),
        *(numbers for numbers, *_ in child.ALLOWED_WITH.values()),
        child.CLONE,
    )
    numbers = [each[column] for each in tables if each[column] >= 0]
    assert len(numbers) == len(set(numbers))
    assert child.CLONE3 not in numbers


@pytest.mark.slow
def test_a_program_is_judged_though_every_process_around_it_is_told_to_stop() -> None:
    """As by a batch system. Verifier children ignore the signal, and so do the programs that they start."""
    asked = subprocess.Popen(
        [sys.executable, "-c", SLOW], stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert asked.stdout is not None and asked.stdout.readline() == b"running\n"
        for process in psutil.Process(asked.pid).children(recursive=True):
            process.terminate()
        assert asked.stdout.read() == b"exited 0 late\n\n"
    finally:
        asked.kill()
        asked.communicate()


def sandboxes() -> set[int]:
    """Processes that a sandbox of this process started and that still are, whatever their state."""
    return {each.pid for each in psutil.Process().children(recursive=True)}


def test_a_program_gets_its_input_and_its_output_is_returned() -> None:
    finished = run("name = input()\nprint('hello', name)\nopen('f', 'w').write('x')", b"you\n")
    assert (finished.status, finished.code, finished.stdout) == ("exited", 0, b"hello you\n")


def test_this_host_can_isolate() -> None:
    assert probe() is None


def test_what_a_program_starts_dies_with_it() -> None:
    source = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    os.execv('/usr/bin/sleep', ['prefixrl-orphan', "
        "'33'])\ntime.sleep(0.3)\nprint('left it')"
    )
    finished = run(source, limits=ProgramLimits(wall_ms=20_000))
    assert finished.stdout == b"left it\n", finished
    running = [each.info["cmdline"] for each in psutil.process_iter(["cmdline"])]
    assert not [line for line in running if line and line[0] == "prefixrl-orphan"]


@pytest.mark.slow
def test_many_programs_leave_no_process_and_no_descriptor() -> None:
    run("pass")
    before = sandboxes(), len(os.listdir("/proc/self/fd"))
    for number in range(50):
        assert run(f"print({number})").stdout == b"%d\n" % number
    assert (sandboxes(), len(os.listdir("/proc/self/fd"))) == before


REFUSED = """
from prefixrl.scorer.sandbox.runner import SandboxError, run
try:
    run("print('ran')")
except SandboxError as error:
    print("refused:", error)
"""


def test_where_the_host_cannot_isolate_nothing_is_run_and_the_reason_is_told() -> None:
    # In a user namespace of its own this host's limit can be taken away without touching the host.
    shell = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
    command = ["unshare", "--user", "--map-root-user", "sh", "-c", shell, "sh", sys.executable]
    finished = subprocess.run([*command, "-c", REFUSED], capture_output=True, text=True, check=True)
    reason = (
        "refused: this host cannot isolate programs: [Errno 28] unshare: No space left on device"
    )
    assert finished.stdout == reason + "\n"


def test_a_sandbox_that_dies_is_an_error_and_not_the_programs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("prefixrl.scorer.sandbox.runner._CHILD", "import os; os.abort()")
    with pytest.raises(SandboxError, match="ended without a status"):
        run("print(1)")


def test_the_python_of_the_sandbox_is_the_scorers() -> None:
    assert run("import sys; print(sys.version)").stdout.decode().strip() == sys.version
    assert os.access(PYTHON, os.X_OK)


SUICIDES = {
    "its group": ("import os; os.kill(0, 9)", "killed 9"),
    "everyone": ("import os\nif os.fork() == 0: os.kill(-1, 9)\nos.wait()", "killed 9"),
    "the first process": (
        "import os, signal\nfor _ in range(9): os.kill(1, signal.SIGINT)\nprint('on')",
        "exited 0",
    ),
    "its group stopped": (
        "import os, signal, time\nif os.fork() == 0: os.kill(0, signal.SIGSTOP)\ntime.sleep(60)",
        "timeout 0",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", SUICIDES)
def test_an_ordinary_users_program_that_signals_its_group_ends_only_itself(
    case: str, as_ordinary_user: Callable[[str], str]
) -> None:
    program, expected = SUICIDES[case]
    shown = as_ordinary_user(
        "import time; from prefixrl.scorer.sandbox.runner import ProgramLimits, run\n"
        f"began_s = time.monotonic(); found = run({program!r}, limits=ProgramLimits(wall_ms=1000))\n"
        "print(found.status, found.code, time.monotonic() - began_s)"
    )
    status, number, took_s = shown.split()
    assert f"{status} {number}" == expected
    assert float(took_s) < 1.0 + START_S, "its watcher kept the time"


def test_an_interpreter_that_stands_under_tmp_runs_programs() -> None:
    """As many clusters unpack one there. The copy has its own files, and no others of that folder are seen."""
    home = Path(tempfile.mkdtemp(prefix="prefixrl-python-", dir="/tmp"))
    try:
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        library = Path(sys.base_prefix, "lib")
        home.chmod(0o755)
        (home / "bin").mkdir()
        shutil.copy2(PYTHON, home / "bin" / version)
        ignored = shutil.ignore_patterns(
            "site-packages", "test", "tests", "__pycache__", "idlelib", "config-*"
        )
        shutil.copytree(library / version, home / "lib" / version, symlinks=True, ignore=ignored)
        for path in library.glob("libpython*"):
            shutil.copy2(path, home / "lib", follow_symlinks=False)
        code = (
            "import sys; from prefixrl.scorer.sandbox.runner import probe, run; print(probe(), "
            "run('import os, sys, tempfile; print(sys.prefix, os.listdir(\"/tmp\"), tempfile.TemporaryFile() and 1)'))"
        )
        python = home / "bin" / version
        paths = os.pathsep.join([str(ROOT / ".types"), sysconfig.get_path("platlib")])
        environment = {"PYTHONPATH": paths, "LD_LIBRARY_PATH": str(home / "lib")}
        finished = subprocess.run(
            [python, "-c", code], env=environment, capture_output=True, text=True
        )
    finally:
        shutil.rmtree(home)
    shown = finished.stdout
    assert shown.startswith("None ProgramRun(status='exited', code=0"), finished
    assert f"{home} ['{home.name}'] 1" in shown
