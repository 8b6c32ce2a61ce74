"""`prefixrl.Run` and `prefixrl.launch`: a run as an object, read from its directory alone."""

import os
import signal
import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import Any

import msgspec

from prefixrl.common.config.load import CONFIG_FILE, load
from prefixrl.common.errors import ConfigError, PeerLost, TrainingFault
from prefixrl.common.journal import journal
from prefixrl.common.run import json_lines
from prefixrl.common.run.directory_format import check_holds_run
from prefixrl.common.run.documents import METRICS_FILE, SUMMARY_FILE, MetricsLine, Summary, columns
from prefixrl.deploy.runs.inspect import trained_groups
from prefixrl.deploy.runs.samples import decoder, texts_of
from prefixrl.deploy.view.run_state import fetch, state_of

USER_ERROR = 2
STOPPED = 130
LAST_LINES = 10
"""Lines of a launch that an error repeats."""


class Run:
    """A run in any state, or a copy of one that cannot be written.

    Nothing is kept between calls: each reads the files as they are now, and writes none.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """Raise ConfigError if the directory holds no run, or one of another release."""
        self.directory = Path(directory)
        check_holds_run(self.directory)

    def __repr__(self) -> str:
        """Return the call that makes it again."""
        return f"prefixrl.Run({str(self.directory)!r})"

    @property
    def _config(self) -> Path:
        return self.directory / CONFIG_FILE

    def config(self) -> dict[str, Any]:
        """Return the resolved config, as a tree of dicts."""
        found: dict[str, Any] = msgspec.json.decode(self._config.read_bytes())
        return found

    def status(self) -> dict[str, Any]:
        """Return state, iterations, newest reward, exit code and last words."""
        found: dict[str, Any] = msgspec.to_builtins(state_of(self.directory))
        return found

    def live(self) -> dict[str, Any] | None:
        """Return the broker's document of a run that goes on; None of one that does not."""
        try:
            document = fetch(self.directory)
        except (ConfigError, PeerLost):
            return None
        found: dict[str, Any] = msgspec.json.decode(document)
        return found

    def metrics(self) -> list[dict[str, float]]:
        """Return a flat dict per iteration, with the names of the columns of `prefixrl export`."""
        return [columns(line) for line in json_lines.read(self.directory / METRICS_FILE, MetricsLine)]

    def samples(self, iteration: int | None = None) -> list[dict[str, Any]]:
        """Return a flat dict per trained row: of one iteration, or of all of them."""
        if not journal.exists(self.directory / journal.FOLDER):
            return []  # it ended before its broker opened one
        groups = trained_groups(self.directory, iteration)
        found = [each for each in groups if iteration in (None, each.version_trained)]
        if not found:
            return []
        decode = decoder(self.directory)
        return [msgspec.to_builtins(row) for group in found for row in texts_of(group, decode)]

    def summary(self) -> dict[str, Any] | None:
        """Return the results of a run that reached its end; None before."""
        found = json_lines.document(self.directory / SUMMARY_FILE, Summary)
        return None if found is None else dict(msgspec.to_builtins(found))


def launch(
    config: str | os.PathLike[str], settings: dict[str, Any] | None = None, fresh: bool = False, quiet: bool = False
) -> Run:
    """Train on this machine to the end, as `prefixrl launch` does; resume what was begun.

    A process of its own does it, so that a notebook's kernel loads no model and may be interrupted. `settings` go over
    the run file, as `{"algorithm.iterations": 10}`; `fresh` throws the run directory away; `quiet` prints nothing.
    ConfigError: the run file or a setting is wrong. TrainingFault: it ended otherwise; the message ends with its last
    words. KeyboardInterrupt: it was interrupted, and saved.
    """
    flat = tuple(f"{key}={_toml(value)}" for key, value in (settings or {}).items())
    directory = Path(load(Path(config), flat).directory)
    flags = [part for setting in flat for part in ("--set", setting)] + (["--fresh"] if fresh else [])
    command = [sys.executable, "-m", "prefixrl.deploy", "launch", os.fspath(config), *flags]
    last: deque[str] = deque(maxlen=LAST_LINES)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout
        try:
            for line in process.stdout:
                last.append(line)
                if not quiet:
                    print(line, end="")
            code = process.wait()
        except KeyboardInterrupt:
            # A terminal has interrupted the process too; a kernel interrupts only itself.
            process.send_signal(signal.SIGINT)
            process.communicate()
            raise
    if code == 0:
        return Run(directory)
    words = "".join(last).strip()
    if code == USER_ERROR:
        raise ConfigError(words)
    if code == STOPPED:
        raise KeyboardInterrupt(words)
    raise TrainingFault(f"the run in {directory} ended with exit code {code}:\n{words}")


def _toml(value: object) -> str:
    """Return a value of a setting as TOML; JSON agrees with it for what a setting may be."""
    if isinstance(value, dict) or value is None:
        raise ConfigError(f"a setting is a number, text, truth value or list, got {value!r}; name each key itself")
    return msgspec.json.encode(value).decode()
