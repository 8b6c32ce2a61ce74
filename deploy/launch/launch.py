"""Everything on one machine: starts, watches and restarts learner, rollouts and scorers.

    launch ─┬─ learner ──┬─ broker
            │            └─ weight server
            ├─ rollout-0 ..      each with a log of its own in <run directory>/logs
            └─ scorer-0 ..

The learner is the run: when it ends, the launch ends with its exit code; one that is killed is started again.
"""

import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import msgspec

from prefixrl.common.config.load import import_functions, load
from prefixrl.common.config.run import RunConfig
from prefixrl.common.config.workers.engines import TRANSFORMERS
from prefixrl.common.errors import (
    ConfigError,
    Halted,
    PeerLost,
    Refusal,
    TrainingFault,
    UserError,
    to_copy,
)
from prefixrl.common.host.placement import (
    LEARNER,
    described,
    gpus_here,
    place,
    processes_of,
    visible,
)
from prefixrl.common.host.process import (
    PARENT_VARIABLE,
    end_children,
    own,
    patient_console,
    stop_event,
)
from prefixrl.common.run.directory_format import FORMAT_FILE, check_format, checkpoints
from prefixrl.common.run.disk import held_bytes
from prefixrl.common.run.replay import check_is_no_replay
from prefixrl.common.run.status import DrainedWorker
from prefixrl.common.wire.address import ENDPOINT_FILE, mark_of
from prefixrl.common.wire.keys import KEYS_FOLDER
from prefixrl.common.worker.allowed import flags as allowances
from prefixrl.common.worker.command import AHEAD_VARIABLE, set_flags
from prefixrl.deploy.launch.child_process import Child, running_processes
from prefixrl.deploy.launch.endpoint_trial import try_endpoint
from prefixrl.deploy.runs.checkpoints import newest_checkpoint
from prefixrl.deploy.runs.report import print_table, write_report
from prefixrl.deploy.view.live_view import View
from prefixrl.deploy.view.run_state import document_of, nothing_left, operator
from prefixrl.deploy.view.stalls import Watchdog

LEARNER_RESTARTS = 3
STOPPED_BY_BROKER_S = 20.0
"""If the learner ends within this time, its broker had stopped a worker that ended without a fault."""
STOP_WORKER_S = 10.0
STOPPED = 130
DASHBOARD = "127.0.0.1", 7788
STOP_S = 60.0
SAVED_BYTES_PER_S = 25e6
"""A slow shared file system; a checkpoint is written, synced and read back."""
SUCCESSION_BEATS = 2
"""Heartbeats until a worker that ended with another code than 0 is started again: its broker keeps its name so long."""
TICK_S, START_TICK_S = 0.2, 0.02
"""Time between two checks of the children; shorter while the start of a worker waits for the endpoint file."""
ASK_S = 2.0
KEYS_OF_A_RUN = {"directory", "adapter", "data", "algorithm", "rollout", "scorer"}
"""Keys of `config.json` in every release; a model folder has a `config.json` too."""


@patient_console()
def launch(
    run_file: Path, settings: tuple[str, ...], fresh: bool, stop: threading.Event | None = None
) -> int:
    """Run to the end; return the exit code. ConfigError for an invalid run file or setting.

    `stop`: set by stop signals, by a caller that has heard them before; None: they are heard from here on.
    """
    config = load(run_file, settings)
    import_functions(config)
    directory = Path(config.directory)
    if directory.exists() and not directory.is_dir():
        raise ConfigError(
            f"directory = {str(directory)!r} is a file: give a folder, which may be a new one"
        )
    check_is_no_replay(directory)
    if fresh:
        _throw_away(directory)
    check_format(directory)
    if said := nothing_left(directory):
        click.echo(said)
    (directory / "logs").mkdir(parents=True, exist_ok=True)
    stop = stop or stop_event()
    # Before any model is loaded: an endpoint that refuses this run ends it at once.
    try_endpoint(config, stop)
    flags = set_flags(settings)
    ranks = ["--nproc-per-node", str(config.launch.learner_ranks)]
    launcher = Launcher(config, ["prefixrl.learner", str(run_file), *flags, *ranks])
    launcher.hint = f"{launcher.dashboard()} shows it in a browser"
    code = launcher.run_and_stop(stop.is_set)
    if stop.is_set() or code == Halted.exit_code:
        again = to_copy("prefixrl launch", run_file, *flags)
        what = "stopped" if stop.is_set() else "the learner was asked to stop"
        how = f"run {again} again to resume ({directory})"
        if fault := launcher.fault_of_stop():
            click.echo(f"{what}, but {fault}; then {how}", err=True)
            code = launcher.learner.code or STOPPED
            return code if code > 0 else STOPPED
        click.echo(f"{what}; {how}")
        return STOPPED
    if code == 0:
        try:
            write_report(directory)
        # The run is finished without it: a report can be written later, from its files.
        except OSError as fault:
            remedy = f"{to_copy('prefixrl report', directory)} writes it later"
            click.echo(f"no report: {fault}; {remedy}", err=True)
        print_table(directory)
    else:
        launcher.report_failure(code)
    return code


def _throw_away(directory: Path) -> None:
    """Remove a run directory; refuse to remove anything else."""
    if directory.exists() and any(directory.iterdir()):
        if not _holds_a_run(directory):
            raise ConfigError(
                f"--fresh: {directory} is not empty and holds no run; remove it yourself if you mean it"
            )
        with own(directory):
            shutil.rmtree(directory)


def _holds_a_run(directory: Path) -> bool:
    """Return True for the directory of a run of any release, even of one that began just now."""
    early_names = {"logs", "slurm", "lock", KEYS_FOLDER, FORMAT_FILE}
    if early_names.issuperset(path.name for path in directory.iterdir()):
        return True
    with suppress(OSError, msgspec.MsgspecError):
        config = msgspec.json.decode((directory / "config.json").read_bytes(), type=dict[str, Any])
        return config.keys() >= KEYS_OF_A_RUN
    return False


class Launcher:
    """The children of one launch: the process that asks, mostly a learner, and its workers."""

    def __init__(
        self,
        config: RunConfig,
        command: list[str],
        name: str = LEARNER,
        uses_stderr: bool = False,
        restarts: int = LEARNER_RESTARTS,
        view: View | None = None,
    ) -> None:
        """Prepare an asking process; only one named `learner` gets GPUs. `uses_stderr`: the usual view goes there."""
        self._config = config
        self._directory = Path(config.directory)
        self._endpoint_file = self._directory / ENDPOINT_FILE
        self._gpus = gpus_here()
        self._placed = place(processes_of(config, with_learner=name == LEARNER), len(self._gpus))
        self.learner = self._child(name, command[0], command[1:])
        self.learner.budget.most = restarts
        self.hint = ""
        """Announced when the broker has opened its socket; a run that is refused is not shown anywhere."""
        self.workers: list[Child] = []
        self._others: list[Child] = []
        self._view = view or View(self._directory, uses_stderr)
        self._watchdog = Watchdog(config.launch.stall_s)

    def _child(self, name: str, module: str, arguments: list[str]) -> Child:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            # A log is no place for bars that are drawn over and over.
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            PARENT_VARIABLE: str(os.getpid()),
            **visible(self._placed, self._gpus, name),
        }
        command = [sys.executable, "-m", module, *arguments]
        return Child(name, command, self._directory / "logs" / f"{name}.log", environment)

    def run_and_stop(self, stopped: Callable[[], bool]) -> int:
        """Run to the end and leave no process behind; return the learner's exit code."""
        try:
            return self._run(stopped)
        finally:
            # The learner first, so that it can save.
            patience_s = stop_s(self._config)
            if stopped() and self.learner.code is None:
                click.echo(
                    f"stopping: the learner ends its iteration and saves, within {patience_s:.0f} s (launch.stop_s); "
                    f"Ctrl-C again gives up what is not saved",
                    err=True,
                )
            self._stop([self.learner], patience_s)
            workers = [*self.workers, *self._others]
            self._stop(workers, STOP_WORKER_S)
            for child in (self.learner, *workers):
                child.close()

    def dashboard(self) -> str:
        """Return the command of the dashboard, or where it is asked for the address at which one is started."""
        if not self._config.log.dashboard:
            return to_copy("prefixrl dashboard", self._directory)
        try:
            reserved = socket.create_server(DASHBOARD)
        except OSError:  # another run's
            reserved = socket.create_server((DASHBOARD[0], 0))
        with reserved:
            port = str(reserved.getsockname()[1])
        child = self._child(
            "dashboard", "prefixrl.deploy", ["dashboard", str(self._directory), "--port", port]
        )
        self._others.append(child)
        child.start()
        return f"http://{DASHBOARD[0]}:{port}/"

    def _stop(self, children: list[Child], patience_s: float) -> None:
        processes = [child.process for child in children if child.process]
        end_children(processes, patience_s, with_groups=True)

    def fault_of_stop(self) -> str:
        """Return what went wrong in a stop, and where a next start begins; "" if all is saved."""
        code = self.learner.code
        if code is None or code in (0, Halted.exit_code):
            return ""
        begins = f"the next start begins at iteration {newest_checkpoint(self._directory)}"
        if code == -signal.SIGKILL:
            why = f"the learner had not saved after {stop_s(self._config):.0f} s and was killed; raise launch.stop_s"
        else:
            end = f"the end of {self.learner.log_path}:\n{self.learner.tail()}"
            why = f"the learner ended with exit code {code}: {self.learner.error() or end}"
        return f"{why}; {begins}"

    def report_failure(self, code: int) -> None:
        """Print why the learner ended; raise ConfigError where the user made the mistake."""
        if code == ConfigError.exit_code and (words := self.learner.error()):
            raise ConfigError(words)
        end = f"the {self.learner.name} ended with exit code {code}; the end of {self.learner.log_path}:"
        click.echo(f"{end}\n{self.learner.tail()}", err=True)

    def _run(self, stopped: Callable[[], bool]) -> int:
        """Watch until the learner ends for good or a stop is asked for."""
        mark = mark_of(self._endpoint_file)
        self.learner.start()
        with self._view:
            if not self.workers:
                self._add_workers(mark)
            while not stopped():
                if (code := self.learner.code) is not None:
                    # Restart only after a kill or a lost peer: another error would repeat.
                    is_worth_it = code < 0 or code == PeerLost.exit_code
                    if not is_worth_it or not self.learner.budget.use_restart(time.monotonic()):
                        return code
                    self._restart(self.learner, code)
                if (written := mark_of(self._endpoint_file)) != mark:
                    mark = written
                    if self.hint:
                        self._view.announce(self.hint)
                        self.hint = ""
                    for worker in self.workers:  # a broker has opened its socket
                        if not worker.is_drained and (
                            worker.process is None or worker.code is not None
                        ):
                            worker.start()
                for worker in self.workers:
                    if worker.code is not None:
                        self._worker_ended(worker, worker.code)
                for line in self.learner.news():
                    self._view.announce(line)
                self._view.refresh()
                self._check_for_stalls()
                time.sleep(
                    TICK_S if all(worker.process for worker in self.workers) else START_TICK_S
                )
        return STOPPED

    def _check_for_stalls(self) -> None:
        """Name the process that holds the run up; TrainingFault where a stall is to end it."""
        processes = running_processes([self.learner, *self.workers])
        if any(each.name == LEARNER for each in processes):
            for text in self._watchdog.check(time.monotonic(), self._view.document, processes):
                self._view.announce(text)
        if self._watchdog.stall and self._config.launch.on_stall == "end":
            raise TrainingFault(f"{self._watchdog.stall} (launch.on_stall)")

    def _add_workers(self, old: str) -> None:
        """Prepare the workers; start those ahead that import an engine; `old`: mark of an old endpoint file."""
        # They are stopped after the learner: nothing would take what they finish then.
        arguments = ["--run", str(self._directory), "--grace-s", "0"]
        launch = self._config.launch
        for role, count in (("rollout", launch.rollouts), ("scorer", launch.scorers)):
            section = self._config.engine_section(role)
            is_embedded = section.is_automatic or section.record is TRANSFORMERS
            allowed = allowances(self._config) if role == "scorer" else []
            has_model = role == "rollout" or self._config.mode == "prefix"
            for index in range(count):
                number = ["--number", str(index)]
                worker = self._child(
                    f"{role}-{index}", f"prefixrl.{role}", [*arguments, *number, *allowed]
                )
                self.workers.append(worker)
                if has_model and is_embedded:
                    worker.environment[AHEAD_VARIABLE] = old
                    worker.start()
        if self._placed:
            self._view.announce(described(self._placed))

    def _worker_ended(self, worker: Child, code: int) -> None:
        now_s = time.monotonic()
        if worker.ended_s is None:
            worker.ended_s = now_s
            worker.is_drained = code == 0 and self._is_drained(worker)
            if worker.is_drained:
                words = "was drained and stays away; the next launch starts it again"
                self._view.announce(f"{worker.name} {words}")
        if worker.is_drained:
            return
        # The same start would end in the same way.
        is_hopeless = code in (UserError.exit_code, Refusal.exit_code)
        # With code 0 the run is probably over, and the learner ends next.
        pause_s = (
            SUCCESSION_BEATS * self._config.broker.heartbeat_s if code else STOPPED_BY_BROKER_S
        )
        if not is_hopeless and now_s - worker.ended_s < pause_s:
            return
        if is_hopeless or not worker.budget.use_restart(now_s):
            raise ConfigError(
                f"{worker.name} ended with exit code {code}; a restart would fail in the same way:\n{worker.tail()}"
            )
        self._restart(worker, code)

    def _is_drained(self, worker: Child) -> bool:
        """Return True if the operator drained a worker: no other is started in its place."""
        assert worker.process
        process = DrainedWorker(host=socket.gethostname(), pid=worker.process.pid)
        try:
            with operator(self._directory, ASK_S) as asking:
                return process in document_of(asking).drained
        except (PeerLost, UserError):
            return False

    def _restart(self, child: Child, code: int) -> None:
        self._view.announce(
            f"{child.name} ended with exit code {code}: starting it again ({child.budget.used})"
        )
        child.start()


def stop_s(config: RunConfig) -> float:
    """Return the time for the learner to stop, by the size of a checkpoint if not configured."""
    if config.launch.stop_s is not None:
        return config.launch.stop_s
    saved = [*checkpoints(Path(config.directory) / "checkpoints").values()]
    return STOP_S + sum(map(held_bytes, saved[-1:])) / SAVED_BYTES_PER_S
