"""A run under a real `systemd --user`: it trains, and what dies, hangs or is wrong is treated as it should be."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cluster.systemd.accounts import account, is_open_to_all
from cluster.systemd.units import copied_units, harden_units
from support.runs.run_helper import RUN_FILE, SMALL, status, trained_iterations, wait_for

pytestmark = [pytest.mark.systemd, pytest.mark.timeout(900)]

WATCHDOG_S = 20
START_S = 300.0


class Manager:
    """A private user manager; it sees the units of one folder."""

    def __init__(self, folder: Path) -> None:
        # systemd looks for environment files below the home that manager.sh gives it.
        self.folder, self.config = folder, folder / ".config"
        self.units = self.config / "systemd" / "user"
        self.units.mkdir(parents=True)
        script = Path(__file__).with_name("manager.sh")
        self._log = (folder / "manager.log").open("wb")
        self._process = subprocess.Popen(
            ["bash", str(script), str(folder), str(self.units), "--", "sleep", "infinity"],
            stdout=self._log,
            stderr=self._log,
        )
        try:
            self._inside = wait_for(self._sleeper, "the start of systemd", timeout_s=30.0)
        except BaseException:
            # Its children die with it: the first is its namespace's init.
            for process in psutil.Process(self._process.pid).children(recursive=True):
                process.kill()
            self._process.wait()
            self._log.close()
            raise

    def _sleeper(self) -> int | None:
        assert self._process.poll() is None, (self.folder / "manager.log").read_text()
        for process in psutil.Process(self._process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):  # the script's own short waits come and go
                if process.cmdline() == ["sleep", "infinity"]:
                    return process.pid
        return None

    def ctl(self, *arguments: str, check: bool = True) -> str:
        """`systemctl --user`; its output."""
        done = self._run("systemctl", "--user", *arguments)
        assert done.returncode == 0 or not check, (
            f"systemctl {arguments}: {done.stderr}\n{self.journal()}"
        )
        return done.stdout

    def _run(self, *command: str) -> "subprocess.CompletedProcess[str]":
        enter = ["nsenter", "--mount", "--pid", "--cgroup", "--target", str(self._inside)]
        environment = {
            "PATH": os.environ["PATH"],
            "XDG_RUNTIME_DIR": "/run",
            "SYSTEMD_PAGER": "cat",
        }
        return subprocess.run(
            [*enter, *command], env=environment, capture_output=True, text=True, check=False
        )

    def show(self, unit: str) -> dict[str, str]:
        """The properties of a unit."""
        return dict(
            line.partition("=")[::2] for line in self.ctl("show", "--all", unit).splitlines()
        )

    def pid(self, unit: str) -> psutil.Process:
        """The main process of a unit, as it is known outside the manager's namespace."""
        inner = int(self.show(unit)["MainPID"])
        for process in psutil.process_iter():
            try:
                ids = (
                    Path(f"/proc/{process.pid}/status")
                    .read_text()
                    .partition("NSpid:")[2]
                    .split("\n")[0]
                    .split()
                )
                inside = os.readlink(f"/proc/{process.pid}/ns/pid") == os.readlink(
                    f"/proc/{self._inside}/ns/pid"
                )
            except OSError:
                continue
            if inside and ids[-1] == str(inner):
                return process
        raise AssertionError(f"{unit} has no process {inner}")

    def journal(self, unit: str = "*") -> str:
        return self._run(
            "journalctl", "--no-pager", "-D", "/run/log/journal", "-n", "200", "-u", unit
        ).stdout or str(
            self._run("journalctl", "--no-pager", "-D", "/run/log/journal", "-n", "200").stdout
        )

    def since(self, began_s: float) -> str:
        """The journal from a monotonic time on."""
        ago_s = int(time.monotonic() - began_s) + 1
        return self._run(
            "journalctl", "--no-pager", "-D", "/run/log/journal", "--since", f"-{ago_s}s"
        ).stdout

    def install(
        self, name: str, directory: Path, *settings: str, run_file: Path = RUN_FILE
    ) -> None:
        """Copy the units of a run, and enable a learner, a rollout and two scorers."""
        values = {
            "PREFIXRL_RUN_FILE": str(run_file),
            "PREFIXRL_RUN": str(directory),
            "PREFIXRL_LEARNER_FLAGS": " ".join(f"--set {setting}" for setting in settings),
        }
        copied_units(self.folder, name, values)
        self.ctl("daemon-reload")
        workers = [f"prefixrl-{worker}" for worker in (f"rollout-{name}@1", f"scorer-{name}@1")]
        self.ctl("enable", f"prefixrl-learner-{name}", *workers, f"prefixrl-scorer-{name}@2")

    def drop_in(self, unit: str, text: str) -> None:
        folder = self.units / f"{unit}.d"
        folder.mkdir(exist_ok=True)
        (folder / "test.conf").write_text(text)
        self.ctl("daemon-reload")

    def close(self) -> None:
        os.kill(self._inside, signal.SIGTERM)
        try:
            self._process.wait(90)
        finally:
            self._process.kill()
            self._log.close()


def why_it_cannot_run() -> str:
    """The reason why no service manager can be started here, "" where it can."""
    if os.geteuid() != 0:
        return "a private service manager needs root (namespaces and a cgroup of its own)"
    missing = [
        path for path in ("/lib/systemd/systemd", "/usr/bin/systemctl") if not Path(path).exists()
    ]
    if missing or not shutil.which("nsenter"):
        return f"not installed: {missing or 'nsenter'}; `make systemd` installs systemd as root"
    return ""


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Manager]:
    if reason := why_it_cannot_run():
        pytest.fail(f"the tests of systemd cannot run here: {reason}")
    started = Manager(tmp_path_factory.mktemp("systemd"))
    try:
        yield started
    finally:
        started.close()


@pytest.fixture(scope="module")
def run(manager: Manager) -> Path:
    """The directory of a run that was started as a target, and trains."""
    directory = manager.folder / "run"
    settings = (
        *SMALL,
        "algorithm.iterations=5000",
        "broker.silence_s=30",
    )
    manager.install("demo", directory, *settings)
    manager.drop_in("prefixrl-scorer-demo@.service", f"[Service]\nWatchdogSec={WATCHDOG_S}\n")
    manager.ctl("start", "--no-block", "prefixrl-demo.target")
    try:
        wait_for(
            lambda: trained_iterations(directory) >= 2, "the second iteration", timeout_s=START_S
        )
    except AssertionError as error:
        raise AssertionError(f"{error}\n{manager.journal()}") from None
    return directory


SCORERS = ("prefixrl-scorer-demo@1.service", "prefixrl-scorer-demo@2.service")
ALL = ("prefixrl-learner-demo.service", "prefixrl-rollout-demo@1.service", *SCORERS)


def is_active(manager: Manager, unit: str, restarts: int) -> bool:
    now = manager.show(unit)
    return now["ActiveState"] == "active" and int(now["NRestarts"]) == restarts


@pytest.mark.proof
def test_starting_the_target_trains_and_every_unit_says_what_it_does(
    manager: Manager, run: Path
) -> None:
    for unit in ALL:
        wait_for(lambda unit=unit: is_active(manager, unit, 0), unit, timeout_s=START_S)  # type: ignore[misc]
    wait_for(lambda: "iteration" in manager.show(ALL[0])["StatusText"], "the learner's status")
    assert "rollout-1 of run" in manager.show(ALL[1])["StatusText"]
    assert all(manager.show(unit)["UMask"] == "0077" for unit in ALL)


@pytest.mark.proof
def test_a_killed_scorer_is_started_again_and_the_run_goes_on(manager: Manager, run: Path) -> None:
    done = trained_iterations(run)
    manager.pid(SCORERS[0]).kill()
    wait_for(lambda: is_active(manager, SCORERS[0], 1), "another scorer", timeout_s=START_S)
    wait_for(lambda: trained_iterations(run) > done, "another iteration", timeout_s=START_S)
    assert int(manager.show(ALL[0])["NRestarts"]) == 0


def test_a_hung_scorer_is_killed_by_its_watchdog_and_started_again(
    manager: Manager, run: Path
) -> None:
    manager.pid(SCORERS[1]).suspend()
    wait_for(lambda: is_active(manager, SCORERS[1], 1), "another scorer", timeout_s=START_S)
    assert "Watchdog timeout" in manager.journal()


def test_a_killed_learner_resumes_and_its_workers_stay(manager: Manager, run: Path) -> None:
    workers = {unit: manager.pid(unit).pid for unit in ALL[1:]}
    done = trained_iterations(run)
    manager.pid(ALL[0]).kill()
    wait_for(lambda: is_active(manager, ALL[0], 1), "another learner", timeout_s=START_S)
    wait_for(lambda: trained_iterations(run) > done, "another iteration", timeout_s=START_S)
    assert workers == {unit: manager.pid(unit).pid for unit in ALL[1:]}


@pytest.mark.proof
def test_a_stop_drains_and_ends_cleanly(manager: Manager, run: Path) -> None:
    wait_for(lambda: len(ready(run)) == 3, "all workers at work", timeout_s=START_S)
    losses = status(run)["losses"]
    began_s = time.monotonic()
    manager.ctl("stop", "prefixrl-demo.target", "prefixrl-*-demo*")
    took_s = time.monotonic() - began_s
    assert [manager.show(unit)["ActiveState"] for unit in ALL] == ["inactive"] * len(ALL), (
        manager.journal()
    )
    assert took_s < 60.0
    # A unit that is down is forgotten with its figures; the journal has them.
    journal = manager.since(began_s)
    assert "stopped as asked after" in journal and "Failed with result" not in journal
    assert journal.count(" left: asked to stop") == 3, "workers leave while the broker is there"
    assert not losses.get("rollout: lost"), losses
    newest = json.loads((run / "metrics.jsonl").read_bytes().splitlines()[-1])
    assert newest["iteration"] >= 2


def ready(directory: Path) -> list[str]:
    """Names of the workers that take tasks."""
    return [
        each["name"]
        for each in status(directory)["workers"]
        if each["phase"] != "loading" and each["engine"]
    ]


def test_a_mistake_in_the_run_file_keeps_the_learner_down(manager: Manager, tmp_path: Path) -> None:
    run_file = tmp_path / "run.toml"
    shutil.copytree(RUN_FILE.parent, tmp_path, dirs_exist_ok=True)
    manager.install("wrong", tmp_path / "run", run_file=run_file)
    run_file.write_text(
        run_file.read_text().replace("groups_per_iteration", "groups_per_iterations")
    )
    manager.ctl("start", "prefixrl-learner-wrong.service", check=False)

    def is_down() -> bool:
        return manager.show("prefixrl-learner-wrong.service")["ActiveState"] == "failed"

    wait_for(is_down, "the end of the learner", timeout_s=120.0)
    time.sleep(5.0)
    assert is_down()
    now = manager.show("prefixrl-learner-wrong.service")
    assert (now["NRestarts"], now["ExecMainStatus"]) == ("0", "2")
    assert "did you mean" in manager.journal()


PACKAGES = Path(sysconfig.get_path("purelib"))
"""Packages that a unit imports."""


@pytest.fixture(scope="module")
def hardened(manager: Manager) -> Iterator[Path]:
    """The directory of a short run whose units are those of the machine's manager, with all their limits."""
    if PACKAGES.is_relative_to(tempfile.gettempdir()):
        pytest.skip(f"hardened units have a /tmp of their own, without {PACKAGES}")
    # Nothing below /tmp, which these units do not share, and below no folder that only root may pass.
    directory = Path(tempfile.mkdtemp(prefix="prefixrl-", dir="/srv")) / "run"
    directory.mkdir(mode=0o700)
    manager.install("hard", directory, *SMALL, "algorithm.iterations=3")
    harden_units(manager.units, "hard", "root", directory)
    manager.ctl("daemon-reload")
    yield directory
    manager.ctl("stop", "prefixrl-*-hard*", check=False)
    shutil.rmtree(directory.parent)


def test_a_run_trains_to_its_end_under_the_limits_of_the_hardened_units(
    manager: Manager, hardened: Path
) -> None:
    manager.ctl("disable", "prefixrl-scorer-hard@2")
    manager.ctl("start", "--no-block", "prefixrl-hard.target")
    units = [
        f"prefixrl-{process}.service"
        for process in ("learner-hard", "rollout-hard@1", "scorer-hard@1")
    ]

    def have_ended() -> bool:
        ended = [manager.show(unit) for unit in units]
        return all(
            each["ActiveState"] in ("inactive", "failed") and each["ExecMainPID"] != "0"
            for each in ended
        )

    wait_for(lambda: (hardened / "summary.json").exists(), "the end of the run", timeout_s=START_S)
    wait_for(have_ended, "the end of all processes", timeout_s=60.0)
    for unit in units:
        now = manager.show(unit)
        limits = [
            now[name]
            for name in ("NoNewPrivileges", "ProtectSystem", "PrivateTmp", "CapabilityBoundingSet")
        ]
        assert limits == ["yes", "strict", "yes", ""]
        assert (now["Result"], now["ExecMainStatus"]) == ("success", "0"), manager.journal()
    assert trained_iterations(hardened) == 3
    said = manager.journal(units[1])
    assert "weights come through the local endpoint /run/prefixrl-hard/prefixrl-" in said, said


PROBE = """import site
site.addsitedir("{packages}")
from prefixrl.scorer.sandbox.runner import probe
print('probed:', probe() or 'programs can be isolated')
"""


def test_programs_of_models_can_be_isolated_under_the_limits_of_the_scorer(
    manager: Manager, hardened: Path
) -> None:
    if not is_open_to_all(PACKAGES):
        pytest.skip(f"plain accounts may not read {PACKAGES}")
    unit = "prefixrl-scorer-hard@9.service"
    script = hardened.parent / "probe.py"
    script.write_text(PROBE.format(packages=PACKAGES))
    for path in (hardened.parent, script):
        path.chmod(0o755)
    # As a plain account, which may not be able to run the environment's own interpreter.
    command = f"User={account()}\nExecStart=\nExecStart=/usr/bin/python3 {script}\n"
    manager.drop_in(unit, f"[Service]\nType=oneshot\nWatchdogSec=0\nRestart=no\n{command}")
    began_s = time.monotonic()
    manager.ctl("start", unit, check=False)
    assert "probed: programs can be isolated" in manager.since(began_s), manager.since(began_s)


LONG_SAVE = """
import sys, time
from pathlib import Path
from prefixrl.common.host.process import stop_event
from prefixrl.common.host.service import Service
stop = stop_event()
service, folder = Service(stopped=stop.is_set), Path(sys.argv[1])
service.ready("")
with service.patience(60.0):
    (folder / "began").touch()
    time.sleep(8)
for _ in range(40):
    time.sleep(0.1)
    service.progressed()
(folder / "saved").touch()
"""


def test_a_long_save_outlasts_the_watchdog_and_the_limit_of_a_stop(manager: Manager) -> None:
    folder = manager.folder / "long save"
    folder.mkdir()
    (folder / "save.py").write_text(LONG_SAVE)
    command = f'"{sys.executable}" "{folder}/save.py" "{folder}"'
    limits = "Type=notify\nNotifyAccess=all\nWatchdogSec=3\nTimeoutStopSec=2\n"
    (manager.units / "long-save.service").write_text(f"[Service]\nExecStart={command}\n{limits}")
    manager.ctl("daemon-reload")
    manager.ctl("start", "long-save.service")
    wait_for((folder / "began").exists, "the save", timeout_s=30.0)
    manager.ctl("stop", "long-save.service")
    assert (folder / "saved").exists(), manager.journal("long-save.service")
    assert manager.show("long-save.service")["Result"] == "success"
