"""Broker and weight server: child processes of learner rank 0, restarted when they die.

They are started before anything heavy is imported, so that workers load and score while DeepSpeed loads.
"""

import contextlib
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from prefixrl.common.config.load import CONFIG_FILE
from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import ConfigError, PeerLost, UserError
from prefixrl.common.host.process import (
    END_SIGNAL,
    RestartBudget,
    end_children,
    ignoring_signals,
    is_private,
)
from prefixrl.common.host.serving import command
from prefixrl.common.wire.address import (
    ENDPOINT_FILE,
    Address,
    address_in,
    bindable,
    mark_of,
    weights_listen,
)
from prefixrl.common.wire.keys import make_keys
from prefixrl.common.wire.requester import WaitLog
from prefixrl.learner.broker.client import REPLAY_S
from prefixrl.learner.broker.workers.identity import Start
from prefixrl.learner.run.stop import NO_STOP, StopSignal
from prefixrl.learner.weights.server import WeightServerStart

log = logging.getLogger(__name__)

BROKER, WEIGHT_SERVER = "broker", "weight server"
RESTARTS_ALLOWED = 5
CLOSE_S = 15.0
"""More than a broker takes to stop all workers."""
WATCH_EVERY_S = 0.1
MOST_LOCAL_ENDPOINT_BYTES = 107 if sys.platform == "linux" else 103
NO_LOCAL_ENDPOINT = "workers on this host fetch the weights over TCP, encrypted, which takes longer"


class Servers:
    """Starts, watches and restarts both; a restarted broker is given `completed`. `trains` false: evaluations alone."""

    def __init__(
        self,
        config: RunConfig,
        directory: Path,
        completed: int,
        trains: bool = True,
        ranks: int = 1,
        stop: StopSignal = NO_STOP,
    ) -> None:
        self._stop = stop
        self._trains, self._ranks = trains, ranks
        self._directory = directory
        self.completed = completed
        self._budgets = {name: RestartBudget(RESTARTS_ALLOWED) for name in (BROKER, WEIGHT_SERVER)}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._closing = False
        self.failure: str | None = None
        self._is_users_fault = False
        self._listen = weights_listen(bindable(config.broker.listen))
        (directory / "weights").mkdir(exist_ok=True)
        make_keys(directory)
        self._folder = _private_folder(directory)
        self._local_endpoint = _local_endpoint_in(self._folder)
        self._weights_file = directory / "weights_endpoint"
        endpoint_file = directory / ENDPOINT_FILE
        # A file that an earlier start left must not be taken for the new server's address.
        self._weights_file.unlink(missing_ok=True)
        # This file stays, since the broker takes its port again; a changed mark shows a new start.
        before = mark_of(endpoint_file)
        try:
            # First the weight server: the broker tells workers its address.
            self._start(WEIGHT_SERVER)
            self.weights_endpoint = self._wait_for_file(self._weights_file, WEIGHT_SERVER, "")
            # Workers know the address from their Welcome: a restarted server must take the same one.
            self._listen = self.weights_endpoint
            self._start(BROKER)
            self.endpoint = self._wait_for_file(endpoint_file, BROKER, before)
        except BaseException:
            self.close()
            raise
        threading.Thread(target=self._watch, name="servers", daemon=True).start()

    def _start(self, name: str, is_restart: bool = False) -> None:
        directory = self._directory
        if name == BROKER:
            endpoints = self.weights_endpoint, self._local_endpoint
            broker = Start(self.completed, *endpoints, self._ranks, is_restart, self._trains)
            server_command = command("prefixrl.learner.broker", directory, broker)
        else:
            endpoints = str(self._weights_file), self._local_endpoint
            server = WeightServerStart(str(directory), self._listen, *endpoints, is_restart)
            server_command = command(
                "prefixrl.learner.weights.server", directory / "weights", server
            )
        self._budgets[name].started_s = time.monotonic()
        # Ctrl-C in a terminal and the signals that a batch system sends to every process are for the learner, which
        # saves before it ends its servers.
        with ignoring_signals():
            self._processes[name] = subprocess.Popen(server_command, start_new_session=True)

    def _wait_for_file(self, path: Path, name: str, before: str) -> str:
        process = self._processes[name]
        wait = WaitLog(f"the {name} (pid {process.pid}) to open its socket")
        while mark_of(path) in ("", before):
            self._stop.end_start()
            code = process.poll()
            if code is not None:
                # The child logged the reason. Exit code 2 is a user's error, which it stays here.
                error = ConfigError if code == 2 else PeerLost
                raise error(f"the {name} ended with exit code {code} at its start")
            waited_s = time.monotonic() - self._budgets[name].started_s
            if waited_s > REPLAY_S:
                process.kill()
                raise PeerLost(
                    f"the {name} (pid {process.pid}) did not open its socket within {REPLAY_S:g} s"
                )
            wait.log_progress(waited_s)
            time.sleep(0.01)
        return path.read_text(encoding="utf-8").strip()

    def _watch(self) -> None:
        # Never ends: at the end of this thread the kernel would kill the children that it started.
        while True:
            time.sleep(WATCH_EVERY_S)
            for name, budget in self._budgets.items():
                process = self._processes[name]
                code = process.poll()
                if code is None or self._closing or self.failure:
                    continue
                died = f"the {name} (pid {process.pid}) ended with exit code {code}"
                if code == UserError.exit_code:  # a restart would end in the same way
                    why = "it said why, in the lines before this"
                    if not (self._directory / CONFIG_FILE).exists():
                        why = (
                            f"{self._directory} was removed or replaced while the run went on, and nothing of it "
                            f"can be resumed"
                        )
                    self._is_users_fault, self.failure = True, f"{died}: {why}"
                    continue
                if not budget.use_restart(time.monotonic()):
                    self.failure = f"{died}, after {budget.most} restarts"
                    continue
                log.warning("%s: starting it again", died)
                try:
                    self._start(name, is_restart=True)
                except OSError as error:
                    self.failure = f"{died}, and cannot be started again: {error}"

    @property
    def address(self) -> Address:
        """The broker's address, with the key of a rank."""
        return address_in(self._directory, "rank")

    def check(self) -> None:
        """Raise PeerLost, or UserError, if a server ended for good: no request to it will be answered."""
        if self.failure:
            raise (UserError if self._is_users_fault else PeerLost)(self.failure)
        if self._closing and (code := self._processes[BROKER].poll()) is not None:
            raise PeerLost(f"the broker ended with exit code {code} before it answered")

    def expect_end(self) -> None:
        """Expect the broker to end by itself, since the run is over; it is not restarted."""
        self._closing = True

    def close(self, patience_s: float = CLOSE_S) -> None:
        """Stop both; kill what still runs when the patience is over."""
        self._closing = True
        end_children(list(self._processes.values()), patience_s, number=END_SIGNAL)
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)


def _private_folder(directory: Path) -> Path | None:
    """Return a folder of this user alone, the same at every start; None if it cannot be made."""
    # A learner that is killed leaves it behind: the next start takes it again.
    digest = hashlib.blake2b(bytes(directory.resolve()), digest_size=8).hexdigest()
    # Of a service this is outside its private /tmp, so that services of workers find it.
    place = os.environ.get("RUNTIME_DIRECTORY", "").partition(":")[0]
    try:
        folder = Path(place or tempfile.gettempdir()) / f"prefixrl-{os.geteuid()}-{digest}"
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        if is_private(folder):
            return folder
        return Path(tempfile.mkdtemp(prefix="prefixrl-"))  # another user made a folder of that name
    except OSError as error:
        log.warning("no folder for a local endpoint can be made (%s): %s", error, NO_LOCAL_ENDPOINT)
        return None


def _local_endpoint_in(folder: Path | None) -> str:
    """Return the local endpoint in a folder, "" if its path is too long."""
    if folder is None:
        return ""
    if (size := len(os.fsencode(folder / "weights"))) > MOST_LOCAL_ENDPOINT_BYTES:
        log.warning(
            "the path of the local endpoint in %s has %d bytes, a socket's at most %d; %s; a shorter TMPDIR avoids it",
            folder,
            size,
            MOST_LOCAL_ENDPOINT_BYTES,
            NO_LOCAL_ENDPOINT,
        )
        return ""
    return f"ipc://{folder}/weights"
