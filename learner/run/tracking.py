"""The process that shows metrics elsewhere (`prefixrl track`), started and ended by rank 0."""

import importlib.util
import logging
import subprocess
import sys
from pathlib import Path

from prefixrl.common.config.learner import TRACKERS, LogConfig, missing
from prefixrl.common.errors import ConfigError, to_copy
from prefixrl.common.host.process import ignoring_signals

log = logging.getLogger(__name__)

FLUSH_S = 60.0


def check_packages(section: LogConfig) -> None:
    """Raise ConfigError if a tracker is asked for whose package is not installed."""
    for tracker in section.chosen_trackers.keys() - section.trackers.keys():
        package = TRACKERS[tracker].package
        if package and importlib.util.find_spec(package) is None:
            raise ConfigError(missing(tracker))


class Tracking:
    """The tracker of one learner process: what it waits for or fails at never holds up training."""

    def __init__(self, directory: Path) -> None:
        """Start it; it ends with its stdin, also where this process is killed."""
        self._directory = directory
        self._is_lost = False
        command = [
            sys.executable,
            "-P",
            "-m",
            "prefixrl.deploy",
            "track",
            str(directory),
            "--until-eof",
        ]
        # Ctrl-C, and what a batch system or systemd sends to every process, are for the learner, which saves and then
        # ends the tracker: its last iterations are still to be sent.
        with ignoring_signals():
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def check(self) -> None:
        """Say once if it has ended."""
        if not self._is_lost and self._process.poll() is not None:
            self._report_loss(f"ended with exit code {self._process.returncode}")

    def close(self) -> None:
        """Let it send what is left."""
        self.check()
        assert self._process.stdin
        self._process.stdin.close()
        try:
            if self._process.wait(FLUSH_S):
                self.check()
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            self._report_loss(f"did not end within {FLUSH_S:.0f} s and was killed")

    def _report_loss(self, how: str) -> None:
        self._is_lost = True
        log.error(
            "the tracker ([log]) %s, and curves are shown nowhere until the run is started again; "
            "%s sends all that is in metrics.jsonl",
            how,
            to_copy("prefixrl track", self._directory),
        )
