"""Broker and weight server: children of learner rank 0, started before anything heavy is imported, restarted when they die."""

import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from prefixrl.common.config import RunConfig
from prefixrl.common.errors import ConfigError, PeerLost
from prefixrl.common.wait import Wait
from prefixrl.learner.client import REPLAY_S

log = logging.getLogger(__name__)

RESTARTS_ALLOWED = 5
WELL_S = 3600.0
"""A process that ran so long before it died has all its restarts again: deaths of a long run do not add up."""
CLOSE_S = 15.0
"""More than a broker takes to send everybody home."""
WATCH_EVERY_S = 0.1


class Servers:
    """Runs both processes. `completed` must follow the learner, since a restarted broker is told where it stands.

    A broker that does not train issues no groups: it serves evaluations alone.
    """

    def __init__(
        self, config: RunConfig, directory: Path, completed: int, trains: bool = True
    ) -> None:
        self._trains = trains
        self._config = config
        self._directory = directory
        self.completed = completed
        self._restarts = {"broker": 0, "weight server": 0}
        self._started_s: dict[str, float] = {}
        self._closing = False
        self.failure: str | None = None
        self._weights_endpoint_file = directory / "weights_endpoint"
        listen = config.broker.listen
        self._weights_listen = (
            f"{listen}.weights" if listen.startswith("ipc://") else f"{listen.rsplit(':', 1)[0]}:0"
        )
        (directory / "weights").mkdir(exist_ok=True)
        self._weights_endpoint_file.unlink(missing_ok=True)
        self._weights = self._start_weight_server()
        self.weights_endpoint = self._wait_for_file(
            self._weights_endpoint_file, self._weights, "weight server"
        )
        endpoint_file = directory / "endpoint"
        known = endpoint_file.stat().st_mtime_ns if endpoint_file.exists() else 0
        self._broker = self._start_broker()
        self.endpoint = self._wait_for_file(
            endpoint_file, self._broker, "broker", newer_than_ns=known
        )
        threading.Thread(target=self._watch, name="servers", daemon=True).start()

    def _start_weight_server(self) -> "subprocess.Popen[bytes]":
        self._started_s["weight server"] = time.monotonic()
        return _spawn(
            "prefixrl.learner.weight_server",
            ["--directory", str(self._directory / "weights"), "--listen", self._weights_listen,
             "--endpoint-file", str(self._weights_endpoint_file)],
        )  # fmt: skip

    def _start_broker(self, *flags: str) -> "subprocess.Popen[bytes]":
        self._started_s["broker"] = time.monotonic()
        return _spawn(
            "prefixrl.learner.broker",
            ["--directory", str(self._directory), "--iteration", str(self.completed),
             "--weights-endpoint", self.weights_endpoint, *([] if self._trains else ["--no-training"]), *flags],
        )  # fmt: skip

    def _wait_for_file(
        self, path: Path, process: "subprocess.Popen[bytes]", name: str, newer_than_ns: int = 0
    ) -> str:
        wait = Wait(f"the {name} (pid {process.pid}) to open its socket")
        while not path.exists() or path.stat().st_mtime_ns <= newer_than_ns:
            code = process.poll()
            if code is not None:
                # Its own message stands above in the log; a user's error stays a user's error.
                error = ConfigError if code == 2 else PeerLost
                raise error(f"the {name} ended with exit code {code} at its start")
            waited_s = time.monotonic() - self._started_s[name]
            if waited_s > REPLAY_S:
                process.kill()
                process.wait()
                raise PeerLost(
                    f"the {name} (pid {process.pid}) did not open its socket within {REPLAY_S:g} s"
                )
            wait.tell(waited_s)
            time.sleep(0.01)
        return path.read_text(encoding="utf-8").strip()

    def _watch(self) -> None:
        # Never ends: the kernel would take its end for the death of the children's parent and kill a broker it restarted.
        while True:
            time.sleep(WATCH_EVERY_S)
            for name in self._restarts:
                process = self._broker if name == "broker" else self._weights
                code = process.poll()
                if code is None or self._closing or self.failure:
                    continue
                if time.monotonic() - self._started_s[name] >= WELL_S:
                    self._restarts[name] = 0
                self._restarts[name] += 1
                died = f"the {name} (pid {process.pid}) ended with exit code {code}"
                if self._restarts[name] > RESTARTS_ALLOWED:
                    self.failure = f"{died}, after {RESTARTS_ALLOWED} restarts"
                    continue
                log.warning("%s: starting it again", died)
                try:
                    self._restart(name)
                except OSError as error:
                    self.failure = f"{died}, and cannot be started again: {error}"

    def _restart(self, name: str) -> None:
        if name == "broker":
            self._broker = self._start_broker("--again")
        else:
            # Workers know the address from their Welcome: the new server must take the same one.
            self._weights_listen = self.weights_endpoint
            self._weights = self._start_weight_server()

    def check(self) -> None:
        """Raise PeerLost where the servers are beyond help: nothing that they are asked will be answered."""
        if self.failure:
            raise PeerLost(self.failure)
        if self._closing and (code := self._broker.poll()) is not None:
            raise PeerLost(f"the broker ended with exit code {code} before it answered")

    def expect_end(self) -> None:
        """The run is over: the broker is about to go by itself and must not be started again."""
        self._closing = True

    def close(self, patience_s: float = CLOSE_S) -> None:
        """Stop both, the hard way after the patience is over."""
        self._closing = True
        for process in (self._broker, self._weights):
            process.terminate()
        for process in (self._broker, self._weights):
            try:
                process.wait(patience_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _spawn(module: str, arguments: list[str]) -> "subprocess.Popen[bytes]":
    # A session of its own: Ctrl-C in a terminal is for the learner, which ends its children in order.
    command = [sys.executable, "-m", module, *arguments, "--parent", str(os.getpid())]
    return subprocess.Popen(command, start_new_session=True)
