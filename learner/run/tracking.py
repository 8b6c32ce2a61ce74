"""The process that shows metrics elsewhere (`prefixrl track`), started and ended by rank 0."""

import importlib.util
import logging
import subprocess
import sys
from pathlib import Path

from prefixrl.common.config.log import LogConfig
from prefixrl.common.errors import ConfigError
from prefixrl.common.process import deaf_children

log = logging.getLogger(__name__)

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
    """The tracker of one learner process; its failure is a warning."""

    def __init__(self, directory: Path) -> None:
        """Start it; it ends with its stdin, also where this process is killed."""
        command = [sys.executable, "-P", "-m", "prefixrl.deploy", "track", str(directory), "--until-eof"]
        # Ctrl-C, and what a batch system or systemd sends to every process, are for the learner, which saves and then
        # ends the tracker: its last iterations are still to be sent.
        with deaf_children():
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def close(self) -> None:
        """Let it send what is left."""
        assert self._process.stdin
        self._process.stdin.close()
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
