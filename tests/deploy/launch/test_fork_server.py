"""The template of a launch: what it forks is as if it had been started by itself, and nothing ends by its neighbour."""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from prefixrl.common.config.load import load
from prefixrl.common.host.process import PARENT_VARIABLE, STOP_SIGNALS, allow_many_files
from prefixrl.deploy.launch import fork_client as template_process
from prefixrl.deploy.launch.child_process import Child, family
from prefixrl.deploy.launch.fork_client import ForkedWorker, WorkerTemplate, is_forked, is_possible
from prefixrl.deploy.launch.fork_server import Forked, NotForked
from prefixrl.deploy.view.stalls import Watched
from support.fakes import wait_until
from support.runs.run_helper import RUN_FILE

WORKER = """
import json, os, signal, sys, time
from prefixrl.common.host.process import start_logging
parent = os.environ["PREFIXRL_PARENT_PID"]
start_logging("prefixrl-tested")
told = {"argv": sys.argv, "mark": os.environ.get("MARK"), "parent": [int(parent), os.getppid()],
        "session": os.getsid(0) == os.getpid(), "loaded": "loaded_before" in sys.modules, "name": __name__,
        "blocked": [int(each) for each in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        "descriptors": sorted(os.path.realpath(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd"))}
print(json.dumps(told), flush=True)
if sys.argv[1] == "code":
    sys.exit(int(sys.argv[2]))
if sys.argv[1] == "fault":
    raise ValueError("broken")
time.sleep(300)
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "tested_worker.py").write_text(WORKER)
    (tmp_path / "loaded_before.py").write_text("")
    thread = "import threading, time\nthreading.Thread(target=time.sleep, args=(300,), daemon=True).start()\n"
    (tmp_path / "with_a_thread.py").write_text(thread)
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": paths, PARENT_VARIABLE: str(os.getpid())}


@pytest.fixture
def template(environment: dict[str, str]) -> Iterator[WorkerTemplate]:
    yield from ready(WorkerTemplate(environment, ["loaded_before"]))


def ready(template: WorkerTemplate) -> Iterator[WorkerTemplate]:
    try:
        wait_until(lambda: not template.is_loading, "the template")
        assert not template.is_lost
        yield template
    finally:
        template.close()


class Worker:
    """A forked worker and what it says."""

    def __init__(self, template: WorkerTemplate, environment: dict[str, str], *arguments: str) -> None:
        self.output, theirs = os.pipe()
        found = template.fork(["tested_worker", *arguments], environment, theirs)
        os.close(theirs)
        assert found
        self.process: ForkedWorker = found

    def told(self) -> dict[str, Any]:
        line = b""
        while not line.endswith(b"\n"):
            line += os.read(self.output, 1)
        told: dict[str, Any] = json.loads(line)
        return told

    def rest(self) -> str:
        with os.fdopen(self.output, "rb") as pipe:
            return pipe.read().decode()


@pytest.fixture
def start(template: WorkerTemplate, environment: dict[str, str]) -> Callable[..., Worker]:
    return lambda *arguments: Worker(template, environment, *arguments)


def test_a_forked_worker_is_as_if_started_by_itself(start: Callable[..., Worker], environment: dict[str, str]) -> None:
    environment["MARK"] = "its own"
    worker = start("sleep", "--flag")
    told = worker.told()
    assert told["loaded"], "what the template imported is there"
    assert told["argv"][1:] == ["sleep", "--flag"] and told["name"] == "__main__" and told["mark"] == "its own"
    assert told["session"] and not told["blocked"]
    # `listdir` itself has one open; the rest of those of the template and of its fork would be more pipes and sockets.
    foreign = [each for each in told["descriptors"] if "socket:" in each or "anon_inode:" in each or "pipe:" in each]
    assert len(foreign) == 2, "stdout and stderr"
    assert told["parent"] == [os.getpid()] * 2, "a child of this process"
    assert psutil.Process(worker.process.pid).cmdline()[0] == "prefixrl-tested"
    worker.process.send_signal(signal.SIGTERM)
    assert worker.process.wait(30.0) == -signal.SIGTERM


def test_exit_codes_are_those_of_a_program(start: Callable[..., Worker]) -> None:
    for code in (0, 3):
        assert start("code", str(code)).process.wait(30.0) == code
    broken = start("fault")
    assert broken.process.wait(30.0) == 1 and "ValueError: broken" in broken.rest()


def test_a_worker_that_runs_is_waited_for_no_longer_than_asked(start: Callable[..., Worker]) -> None:
    worker = start("sleep")
    assert worker.process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        worker.process.wait(0.05)


def test_the_end_of_one_worker_is_none_of_the_other_s(start: Callable[..., Worker]) -> None:
    first, second = start("sleep"), start("sleep")
    second.told()
    first.process.kill()
    assert first.process.wait(30.0) == -signal.SIGKILL
    assert second.process.poll() is None and start("code", "0").process.wait(30.0) == 0
    first.process.send_signal(signal.SIGTERM)  # which nobody gets


def test_signals_of_a_batch_system_do_not_end_the_template(
    start: Callable[..., Worker], template: WorkerTemplate
) -> None:
    worker = start("sleep")
    for number in STOP_SIGNALS:
        os.kill(template.pid, number)
    assert start("code", "0").process.wait(30.0) == 0
    assert worker.process.poll() is None and not template.is_lost


def test_nor_do_they_end_it_while_it_starts(environment: dict[str, str]) -> None:
    template = WorkerTemplate(environment, ["loaded_before"])
    for number in STOP_SIGNALS:
        os.kill(template.pid, number)
    for _ in ready(template):
        worker = Worker(template, environment, "code", "0")
        assert not worker.told()["blocked"] and worker.process.wait(30.0) == 0


@pytest.mark.parametrize("spare", [0, 1])
def test_a_template_that_cannot_fork_says_so_and_its_workers_stay(
    spare: int, start: Callable[..., Worker], template: WorkerTemplate, environment: dict[str, str], tmp_path: Path
) -> None:
    worker = start("sleep")
    worker.told()
    held = set(map(int, os.listdir(f"/proc/{template.pid}/fd")))
    free = [number for number in range(len(held) + 2) if number not in held]
    before = resource.prlimit(template.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(template.pid, resource.RLIMIT_NOFILE, (free[spare], before[1]))
    child = Child("scorer-0", [sys.executable, "-m", "tested_worker", "code", "4"], tmp_path / "log", environment)
    child.template = template
    child.start()
    wait_until(lambda: child.code is not None, "the end of the child")
    child.close()
    assert child.code == 4 and '"loaded": false' in (tmp_path / "log").read_text()
    (line,) = template.news()
    assert f"(process {template.pid}) cannot fork" in line and "Too many open files" in line
    resource.prlimit(template.pid, resource.RLIMIT_NOFILE, before)
    assert start("code", "0").process.wait(30.0) == 0
    assert worker.process.poll() is None and not template.is_lost and not template.news()


def test_a_worker_that_the_launch_waits_for_no_longer_does_not_begin(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_process, "ANSWER_S", 0.1)
    (tmp_path / "begins_slowly.py").write_text(
        "import os, time\nbegin = os.setsid\nos.setsid = lambda: (time.sleep(0.5), begin())\n"
    )
    for template in ready(WorkerTemplate(environment, ["begins_slowly"])):
        output, theirs = os.pipe()
        assert template.fork(["tested_worker", "sleep"], environment, theirs) is None and template.is_lost
        os.close(theirs)
        with os.fdopen(output, "rb") as pipe:
            assert pipe.read() == b"", "it ended before its work began"
    (line,) = template.news()
    assert "did not answer within" in line


def test_an_answer_that_comes_late_is_not_taken_for_the_next(
    template: WorkerTemplate, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    real, template._link = template._link, ours
    with theirs, real:
        for answer in (NotForked(1, "killed between"), Forked(1, 4), NotForked(2, "full")):
            theirs.send(msgspec.msgpack.encode(answer))
        for _ in range(2):
            assert template.fork(["tested_worker"], environment, 1) is None
        first, second = template.news()
    assert "(killed between)" in first and "(full)" in second


def test_where_the_ends_of_children_are_ignored_nothing_is_forked() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert not is_possible()
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert is_possible()


def test_only_what_is_forked_is_adopted(start: Callable[..., Worker]) -> None:
    start("code", "0").process.wait(30.0)
    orphaned = "import subprocess, sys; print(subprocess.Popen(['sleep', '300'], stdout=subprocess.DEVNULL).pid)"
    pid = int(subprocess.check_output([sys.executable, "-c", orphaned]))
    parent = psutil.Process(pid).ppid()
    os.kill(pid, signal.SIGKILL)
    assert parent != os.getpid()


def test_descriptors_of_any_number_are_waited_for(environment: dict[str, str]) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    allow_many_files()
    try:
        with ExitStack() as held:
            for _ in range(1024):
                held.callback(os.close, os.dup(0))
            for template in ready(WorkerTemplate(environment, ["loaded_before"])):
                assert Worker(template, environment, "code", "3").process.wait(30.0) == 3
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_template_that_imports_without_end_is_given_up_with_a_line(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_process, "LOAD_S", 0.1)
    (tmp_path / "endless.py").write_text("import time\ntime.sleep(300)\n")
    template = WorkerTemplate(environment, ["endless"])
    wait_until(lambda: not template.is_loading, "its end")
    (line,) = template.news()
    assert template.is_lost and "had not ended its imports" in line
    assert line.endswith(": workers start by themselves from now on")


def test_workers_outlive_the_template_and_later_ones_start_by_themselves(
    start: Callable[..., Worker], template: WorkerTemplate, environment: dict[str, str], tmp_path: Path
) -> None:
    worker = start("sleep")
    worker.told()
    os.kill(template.pid, signal.SIGKILL)
    wait_until(lambda: template.news() and template.is_lost, "the launch to notice it")
    command = [sys.executable, "-m", "tested_worker", "code", "4"]
    child = Child("scorer-0", command, tmp_path / "scorer-0.log", environment, template=template)
    child.start()
    wait_until(lambda: child.code is not None, "the end of the child")
    child.close()
    assert child.code == 4 and '"loaded": false' in (tmp_path / "scorer-0.log").read_text()
    assert worker.process.poll() is None
    worker.process.kill()
    assert worker.process.wait(30.0) == -signal.SIGKILL


def test_a_template_that_ended_unnoticed_is_named_when_a_worker_is_wanted(
    template: WorkerTemplate, environment: dict[str, str]
) -> None:
    os.kill(template.pid, signal.SIGKILL)
    output, theirs = os.pipe()
    assert template.fork(["tested_worker", "sleep"], environment, theirs) is None
    for descriptor in (output, theirs):
        os.close(descriptor)
    (line,) = template.news()
    assert line == (
        f"the worker template (process {template.pid}) ended with exit code -9: workers start by themselves from now on"
    )


def test_a_stopped_template_is_named_and_holds_up_no_end(
    start: Callable[..., Worker], template: WorkerTemplate
) -> None:
    worker = start("sleep")
    os.kill(template.pid, signal.SIGSTOP)
    wait_until(lambda: family([], template) == [Watched("template", template.pid, True)], "its state")
    worker.process.kill()
    assert worker.process.wait(30.0) == -signal.SIGKILL and not template.is_lost


def test_what_no_fork_survives_starts_as_a_program_of_its_own(environment: dict[str, str]) -> None:
    for template in ready(WorkerTemplate(environment, ["loaded_before", "with_a_thread"])):
        worker = Worker(template, environment, "code", "5")
        assert not worker.told()["loaded"]
        assert worker.process.wait(30.0) == 5


def test_a_template_that_cannot_import_is_lost_and_not_waited_for(environment: dict[str, str]) -> None:
    template = WorkerTemplate(environment, ["no_such_module"])
    wait_until(lambda: not template.is_loading, "its end")
    assert template.is_lost
    template.close()


def test_all_end_with_the_launch(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "launch.py").write_text(
        "import os, time\n"
        "from prefixrl.common.host.process import PARENT_VARIABLE\n"
        "from prefixrl.deploy.launch.fork_client import WorkerTemplate\n"
        "environment = os.environ | {PARENT_VARIABLE: str(os.getpid())}\n"
        "template = WorkerTemplate(environment, ['loaded_before'])\n"
        "worker = template.fork(['tested_worker', 'sleep'], environment, 1)\n"
        "time.sleep(300)\n"
    )
    launch = subprocess.Popen([sys.executable, str(tmp_path / "launch.py")], env=environment, stdout=subprocess.PIPE)
    assert launch.stdout
    told = json.loads(launch.stdout.readline())
    below = psutil.Process(launch.pid).children(recursive=True)
    assert len(below) == 2 and told["parent"] == [launch.pid] * 2
    launch.kill()
    launch.wait()
    launch.stdout.close()
    wait_until(lambda: not any(each.is_running() for each in below), "the end of all")


@pytest.mark.parametrize(
    ("settings", "role", "has_gpus", "expected"),
    [
        ([], "rollout", False, True),
        ([], "scorer", False, True),
        ([], "scorer", True, False),
        (["scorer.device=cpu"], "scorer", True, True),
        (["bitwise=true"], "rollout", True, True),
        (["rollout.engine=transformers"], "rollout", True, True),
        (["rollout.engine=simulated"], "rollout", False, False),
        (["scorer.engine=vllm"], "scorer", False, False),
    ],
)
def test_only_workers_whose_engine_is_known_to_be_embedded_are_forked(
    settings: list[str], role: str, has_gpus: bool, expected: bool
) -> None:
    assert is_forked(load(RUN_FILE, tuple(settings)), role, has_gpus) == expected


def test_the_modules_of_the_template_exist_and_begin_neither_threads_nor_cuda() -> None:
    code = (
        "import importlib, os, sys\n"
        "from prefixrl.deploy.launch.fork_client import MODULES\n"
        "[importlib.import_module(each) for each in MODULES]\n"
        "assert 'torch' in sys.modules and 'vllm' not in sys.modules\n"
        "assert len(os.listdir('/proc/self/task')) == 1\n"
        "assert not sys.modules['torch'].cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
