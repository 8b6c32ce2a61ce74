"""Everything on one machine: starts learner, rollouts and scorers, watches them, starts again what dies, cleans up.

    launch ─┬─ learner ─┬─ broker
            │           └─ weight server
            ├─ rollout-0 ..            each with a log of its own in <run directory>/logs
            └─ scorer-0 ..

The learner is the run: when it ends, the launch ends with its exit code. A worker that ends while the learner goes on is
started again; a learner that is killed is started again and resumes from its last checkpoint while the workers stay warm.
"""

import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import click

from prefixrl.common.config import RunConfig, from_json, import_functions, load
from prefixrl.common.errors import ConfigError, Halted, PeerLost
from prefixrl.common.process import PARENT_VARIABLE, own, stop_event
from prefixrl.deploy.report import print_table, write_report
from prefixrl.deploy.status import View

log = logging.getLogger(__name__)

LEARNER = "learner"
LEARNER_RESTARTS = 3
WORKER_RESTARTS = 10
WELL_S = 3600.0
"""A process that ran so long before it ended has all its restarts again: those of a long run do not add up."""
SENT_HOME_S = 20.0
"""A worker that left without a fault was sent home if the learner ends within this; else it was told to go by somebody else."""
STOP_LEARNER_S = 60.0
STOP_WORKER_S = 10.0
STOPPED = 130
"""Exit code of a command that was interrupted."""
TICK_S = 0.2
TAIL_LINES = 12


@dataclass
class Child:
    """One process and how to start it again."""

    name: str
    command: list[str]
    log_path: Path
    environment: dict[str, str]
    restarts: int = 0
    process: "subprocess.Popen[bytes] | None" = field(default=None, repr=False)
    started_s: float = 0.0
    """Monotonic time of its last start."""
    log_from_bytes: int = 0
    """Where this start begins in the log, which may hold earlier runs."""
    endpoint_file: Path | None = None
    """Of a worker: where its broker's endpoint stands, which may be another at every start."""
    ended_s: float | None = None
    """Monotonic time at which its end was noticed."""

    def start(self) -> None:
        """Start it; its output is appended to its log."""
        self.started_s, self.ended_s = time.monotonic(), None
        connect = ["--connect", _read(self.endpoint_file)] if self.endpoint_file else []
        with self.log_path.open("ab") as output:
            self.log_from_bytes = output.tell()
            # A session of its own: Ctrl-C reaches the launch alone, which stops its children in order.
            self.process = subprocess.Popen(
                [*self.command, *connect],
                stdout=output,
                stderr=output,
                env=self.environment,
                start_new_session=True,
            )

    @property
    def code(self) -> int | None:
        """Exit code, None while it runs."""
        return self.process.poll() if self.process else None

    def ended_for_s(self, now_s: float) -> float:
        """Since its end was noticed, which is now at the latest."""
        self.ended_s = now_s if self.ended_s is None else self.ended_s
        return now_s - self.ended_s

    def has_restarts_left(self, most: int, now_s: float) -> bool:
        """Whether it may be started again, now that it has ended."""
        if now_s - self.started_s >= WELL_S:
            self.restarts = 0
        return self.restarts < most

    def stop(self, patience_s: float) -> None:
        """SIGTERM, then SIGKILL to its whole group when the patience is over."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.terminate()
        try:
            self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def tail(self) -> str:
        """What it said last."""
        return "\n".join(self._said().splitlines()[-TAIL_LINES:])

    def error(self) -> str:
        """The message of the error it ended with, "" where it left none."""
        _, found, message = f"\n{self._said()}".rpartition("\nerror: ")
        return message.strip() if found else ""

    def _said(self) -> str:
        said = self.log_path.read_bytes()[self.log_from_bytes :]
        return said.decode(errors="replace")


def launch(run_file: Path, settings: tuple[str, ...], fresh: bool) -> int:
    """Run to the end; returns the exit code.

    Raises:
        ConfigError: the run file, a setting, a user's function or the run directory.
    """
    config = load(run_file, settings)
    import_functions(config)
    directory = Path(config.directory)
    if fresh:
        _throw_away(directory)
    (directory / "logs").mkdir(parents=True, exist_ok=True)
    stop = stop_event()
    flags = [flag for setting in settings for flag in ("--set", setting)]
    ranks = ["--nproc-per-node", str(config.launch.learner_ranks)]
    launcher = Launcher(config, ["prefixrl.learner", str(run_file), *flags, *ranks])
    code = launcher.run_and_stop(stop.is_set)
    if stop.is_set() or code == Halted.exit_code:
        again = shlex.join(["prefixrl", "launch", str(run_file), *flags])
        what = "stopped" if stop.is_set() else "the learner was asked to stop"
        click.echo(f"{what}; `{again}` goes on where it stands ({directory})")
        return STOPPED
    if code == 0:
        write_report(directory)
        print_table(directory)
    else:
        launcher.tell_failure(code)
    return code


def _throw_away(directory: Path) -> None:
    """Remove a run directory; refuses to remove anything else."""
    if directory.exists() and any(directory.iterdir()):
        if not _holds_a_run(directory):
            raise ConfigError(
                f"--fresh: {directory} is not empty and holds no run; remove it yourself if you mean it"
            )
        with own(directory):
            shutil.rmtree(directory)


def _holds_a_run(directory: Path) -> bool:
    """A config this release wrote, or nothing but what a launch leaves before the learner starts."""
    try:
        from_json((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ConfigError):
        return {path.name for path in directory.iterdir()} <= {"logs", "lock"}
    return True


class Launcher:
    """The children of one launch: who asks (a learner, or what judges a trained adapter) and the workers that answer."""

    def __init__(
        self,
        config: RunConfig,
        command: list[str],
        name: str = LEARNER,
        says_on_stderr: bool = False,
        restarts: int = LEARNER_RESTARTS,
    ) -> None:
        """The children are started by `run_and_stop`.

        Args:
            command: Module of the asking process and its arguments.
            name: Of the asking process; only a learner gets GPUs, one per rank.
            says_on_stderr: The view; stdout is somebody else's then.
            restarts: How often the asking process may be started again; 0 for one that cannot go on where it stood.
        """
        self._config = config
        self._directory = Path(config.directory)
        self._endpoint_file = self._directory / "endpoint"
        self._devices = _Devices()
        devices = config.launch.learner_ranks if name == LEARNER else 0
        self.learner = self._child(name, command[0], command[1:], devices)
        self.workers: list[Child] = []
        self._view = View(self._directory, says_on_stderr)
        self._restarts = restarts

    def _child(self, name: str, module: str, arguments: list[str], devices: int = 1) -> Child:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            PARENT_VARIABLE: str(os.getpid()),
            **self._devices.deal(devices),
        }
        command = [sys.executable, "-m", module, *arguments]
        return Child(name, command, self._directory / "logs" / f"{name}.log", environment)

    def run_and_stop(self, stopped: Callable[[], bool]) -> int:
        """Run to the end and leave no process behind; returns the learner's exit code."""
        try:
            return self._run(stopped)
        finally:
            self._stop()

    def tell_failure(self, code: int) -> None:
        """Say why the learner ended; raises ConfigError where the user made the mistake."""
        if code == ConfigError.exit_code and self.learner.error():
            raise ConfigError(self.learner.error())
        click.echo(
            f"the {self.learner.name} ended with exit code {code}; the end of {self.learner.log_path}:",
            err=True,
        )
        click.echo(self.learner.tail(), err=True)

    def _run(self, stopped: Callable[[], bool]) -> int:
        """Watch until the learner ends for good or a stop is asked for."""
        known = _modified(self._endpoint_file)
        self.learner.start()
        with self._view:
            while not stopped():
                code = self.learner.code
                if code is not None:
                    if not _worth_a_restart(code) or not self.learner.has_restarts_left(
                        self._restarts, time.monotonic()
                    ):
                        return code
                    self._restart(self.learner, code)
                if (written := _modified(self._endpoint_file)) != known:
                    known = written
                    self._start_workers()
                for worker in self.workers:
                    if worker.code is not None:
                        self._worker_ended(worker, worker.code)
                self._view.refresh()
                time.sleep(TICK_S)
        return STOPPED

    def _start_workers(self) -> None:
        """Start those that do not run: a broker has opened its socket."""
        if not self.workers:
            self._add_workers()
        for worker in self.workers:
            if worker.process is None or worker.code is not None:
                worker.start()

    def _add_workers(self) -> None:
        config = self._config
        has_model = config.target is not None and config.scorer.engine != "openai"
        scorer_gpus = config.scorer.vllm.tensor_parallel_size if has_model else 0
        for role, count, devices in (
            ("rollout", config.launch.rollouts, config.rollout.vllm.tensor_parallel_size),
            ("scorer", config.launch.scorers, scorer_gpus),
        ):
            for index in range(count):
                worker = self._child(f"{role}-{index}", f"prefixrl.{role}", [], devices)
                worker.endpoint_file = self._endpoint_file
                self.workers.append(worker)
        if self._devices.shared:
            self._view.say(self._devices.shared)

    def _worker_ended(self, worker: Child, code: int) -> None:
        now_s = time.monotonic()
        if code == 0 and worker.ended_for_s(now_s) < SENT_HOME_S:
            return  # sent home, it seems: the run is over, the learner ends next
        if code in (2, 3) or not worker.has_restarts_left(WORKER_RESTARTS, now_s):
            raise ConfigError(
                f"{worker.name} ended with exit code {code} and would again:\n{worker.tail()}"
            )
        self._restart(worker, code)

    def _restart(self, child: Child, code: int) -> None:
        child.restarts += 1
        self._view.say(
            f"{child.name} ended with exit code {code}: starting it again ({child.restarts})"
        )
        child.start()

    def _stop(self) -> None:
        """Stop everything: the learner first, so that it can save."""
        self.learner.stop(STOP_LEARNER_S)
        for worker in self.workers:
            if worker.process is not None and worker.process.poll() is None:
                worker.process.terminate()
        for worker in self.workers:
            worker.stop(STOP_WORKER_S)


class _Devices:
    """Deals the machine's GPUs out, process after process; without GPUs there is nothing to deal."""

    def __init__(self) -> None:
        given = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = Path("/proc/driver/nvidia/gpus")
        found = [str(index) for index in range(len(list(gpus.iterdir())))] if gpus.is_dir() else []
        self._all = [each for each in given.split(",") if each] if given is not None else found
        self._next = 0

    @property
    def shared(self) -> str:
        """What a person should know when more were asked for than there are, "" else."""
        if not 0 < len(self._all) < self._next:
            return ""
        return (
            f"the processes ask for {self._next} GPUs, {len(self._all)} are there: some share one, and each must leave room "
            "for the others (gpu_memory_utilization of rollout.vllm and scorer.vllm), or start fewer "
            "([launch], tensor_parallel_size)"
        )

    def deal(self, count: int) -> dict[str, str]:
        """Environment that gives the next process its GPUs, as many as there are at most; for 0 it sees none."""
        if not self._all:
            return {}
        dealt = [self._all[(self._next + each) % len(self._all)] for each in range(count)]
        self._next += count
        return {"CUDA_VISIBLE_DEVICES": ",".join(dict.fromkeys(dealt))}


def _worth_a_restart(code: int) -> bool:
    """A learner that was killed, or lost a peer or a rank, resumes; one that failed by itself would fail again."""
    return code < 0 or code == PeerLost.exit_code


def _read(endpoint_file: Path) -> str:
    return endpoint_file.read_text(encoding="utf-8").strip()


def _modified(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0
