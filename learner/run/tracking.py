"""The process that shows metrics elsewhere (`prefixrl track`), started and ended by rank 0."""

import importlib.util
import logging
import subprocess
import sys
import time
from pathlib import Path

from prefixrl.common.config.learner import LogConfig
from prefixrl.common.errors import ConfigError, UserError
from prefixrl.common.host.process import RestartBudget, deaf_children

log = logging.getLogger(__name__)

RESTARTS = 5
FLUSH_S = 60.0
"""Longest time that the end of a run waits for what is not sent yet."""


def check_packages(wanted: LogConfig) -> None:
    """Raise ConfigError if a tracker is asked for whose package is not installed."""
    for key, package, is_wanted in (
        ("log.tensorboard", "tensorboard", wanted.tensorboard),
        ("log.wandb", "wandb", wanted.wandb is not None),
    ):
        if is_wanted and importlib.util.find_spec(package) is None:
            raise ConfigError(f"{key} needs {package}: pip install 'prefixrl[trackers]', or leave the key out")


class Tracking:
    """The tracker of one learner process, started again where it failed."""

    def __init__(self, directory: Path) -> None:
        """Start it; it ends with its stdin, also where this process is killed."""
        self._directory, self._budget = directory, RestartBudget(RESTARTS)
        self._is_off = False
        self._process = self._start()

    def _start(self) -> "subprocess.Popen[bytes]":
        self._budget.started_s = time.monotonic()
        command = [sys.executable, "-P", "-m", "prefixrl.deploy", "track", str(self._directory), "--until-eof"]
        # Ctrl-C, and what a batch system or systemd sends to every process, are for the learner, which saves and then
        # ends the tracker: its last iterations are still to be sent.
        with deaf_children():
            return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def check(self) -> None:
        """Start it again if it has ended, unless the user must mend it or it ended too often."""
        code = self._process.poll()
        if self._is_off or code is None:
            return
        self._end_input()
        self._is_off = code == UserError.exit_code or not self._budget.take(time.monotonic())
        if not self._is_off:
            log.error("the tracker ([log]) ended with exit code %d: starting it again", code)
            try:
                self._process = self._start()
            except OSError as error:
                log.error("the tracker ([log]) cannot be started: %s", error)
                self._is_off = True
            else:
                return
        log.error(
            "the tracker ([log]) ended with exit code %d, and curves are shown nowhere until the run is started again; "
            "`prefixrl track %s` sends all that is in metrics.jsonl",
            code,
            self._directory,
        )

    def _end_input(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()

    def close(self) -> None:
        """Let it send what is left."""
        self.check()
        if self._is_off:
            return
        self._end_input()
        try:
            code = self._process.wait(FLUSH_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            log.warning(
                "the tracker ([log]) did not end within %.0f s and was killed; `prefixrl track` sends what is left",
                FLUSH_S,
            )
            return
        if code:
            log.warning("the tracker ([log]) ended with exit code %d; the metrics are in metrics.jsonl", code)
