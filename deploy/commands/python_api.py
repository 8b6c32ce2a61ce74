"""`prefixrl.Run` and `prefixrl.launch`: a run as an object, read from its directory alone."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from prefixrl.common.config.foreign.files import read_json
from prefixrl.common.config.foreign.user_function import UserFunction
from prefixrl.common.config.load import CONFIG_FILE, load
from prefixrl.common.config.section import toml
from prefixrl.common.errors import ConfigError, PeerLost, TrainingFault
from prefixrl.common.journal import journal
from prefixrl.common.run.directory_format import check_holds_run
from prefixrl.common.run.documents import columns, metrics_of, summary_of
from prefixrl.common.worker.command import set_flags
from prefixrl.deploy.commands.stop_and_drain import stop
from prefixrl.deploy.runs.checkpoints import flat
from prefixrl.deploy.runs.inspect import trained_groups
from prefixrl.deploy.runs.samples import decoder, texts_of
from prefixrl.deploy.view.run_state import fetch, is_going_on, is_locked, state_of

STOPPED = 130
TICK_S = 0.1
LAST_LINES = 10
"""Lines of a launch that an error repeats."""


class Run:
    """A run in any state, or a copy of one that cannot be written.

    Nothing is kept between calls: each reads the files as they are now, and writes none.
    """

    _launched: "_Launched | None" = None

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """Raise ConfigError if the directory holds no run, or one of another release."""
        self.directory = Path(directory)
        check_holds_run(self.directory)

    def wait(self) -> "Run":
        """Return the run once it has ended; raise as `launch` if `launch` has begun it."""
        if self._launched:
            self._launched.end()
        while is_going_on(self.directory):
            time.sleep(TICK_S)
        return self

    def stop(self, timeout_s: float = 600.0) -> "Run":
        """Have the run save and stop, on any host; PeerLost after `timeout_s`, ConfigError if the run is over."""
        stop(self.directory, timeout_s, lambda _: None)
        with suppress(KeyboardInterrupt):
            self.wait()
        return self

    def __repr__(self) -> str:
        """Return the call that makes it again."""
        return f"prefixrl.Run({str(self.directory)!r})"

    def config(self) -> dict[str, Any]:
        """Return the resolved config, as a tree of dicts."""
        return read_json(self.directory / CONFIG_FILE, dict[str, Any])

    def status(self) -> dict[str, Any]:
        """Return state, iterations, newest reward, exit code and last words."""
        return {**msgspec.to_builtins(state_of(self.directory))}

    def live(self) -> dict[str, Any] | None:
        """Return the broker's document of a running run; None for any other run."""
        with suppress(ConfigError, PeerLost):
            return msgspec.json.decode(fetch(self.directory), type=dict[str, Any])
        return None

    def metrics(self) -> list[dict[str, float]]:
        """Return a flat dict per iteration, with the names of the columns of `prefixrl export`."""
        return list(map(columns, metrics_of(self.directory)))

    def samples(self, iteration: int | None = None) -> list[dict[str, Any]]:
        """Return a flat dict per trained row: of one iteration, or of all of them."""
        if not journal.exists(self.directory / journal.FOLDER):
            return []  # it ended before its broker opened one
        groups = trained_groups(self.directory, iteration)
        chosen = [each for each in groups if iteration in (None, each.version_trained)]
        if not chosen:
            return []
        decode = decoder(self.directory)
        return [msgspec.to_builtins(row) for group in chosen for row in texts_of(group, decode)]

    def summary(self) -> dict[str, Any] | None:
        """Return the results of a run that reached its end; None before its end."""
        summary: dict[str, Any] | None = msgspec.to_builtins(summary_of(self.directory))
        return summary


class _Launched(threading.Thread):
    """A `prefixrl launch` under way; its output is printed, unless `quiet`, and its last lines kept."""

    def __init__(self, command: list[str], quiet: bool) -> None:
        super().__init__()
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._quiet = quiet
        self._last = deque[str](maxlen=LAST_LINES)
        self.start()

    def run(self) -> None:
        """Take its output until it has ended."""
        with self._process:
            for line in self._process.stdout or ():
                self._last.append(line)
                if not self._quiet:
                    print(line, end="")

    def end(self) -> None:
        """Wait for its end; raise as `launch` does."""
        try:
            self.join()
        except KeyboardInterrupt:
            # A terminal has interrupted the process too; a kernel interrupts only itself.
            self._process.send_signal(signal.SIGINT)
            self.join()
            raise
        code = self._process.returncode
        words = "".join(self._last).strip()
        if code == ConfigError.exit_code:
            raise ConfigError(words)
        if code == STOPPED:
            raise KeyboardInterrupt(words)
        if code:
            raise TrainingFault(f"the run ended with exit code {code}:\n{words}")


def reference(function: UserFunction) -> str:
    """Return FILE.py:NAME of a function that other processes can import; raise ConfigError for any other."""
    name = getattr(function, "__name__", "")
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    if (
        file is None
        or getattr(module, "__name__", "") == "__main__"
        or getattr(module, name, None) is not function
    ):
        raise ConfigError(
            f"reward = {function!r}: the processes of a run cannot import it; write it as a `def` into a file of its "
            f"own and import it from there: no lambda, no function within another, none of a notebook or this script"
        )
    return f"{Path(file).resolve()}:{name}"


def launch(
    config: str | os.PathLike[str] | dict[str, Any],
    settings: dict[str, Any] | None = None,
    fresh: bool = False,
    quiet: bool = False,
    wait: bool = True,
    reward: UserFunction | None = None,
) -> Run:
    """Train on this machine to the end, as `prefixrl launch` does; resume what was begun.

    A process of its own does it, so that a notebook's kernel loads no model and may be interrupted. `config` is a run
    file or its content as a tree of dicts, whose paths are relative to the working folder. `settings` go over it, as
    `{"algorithm.iterations": 10}`; None takes a key out. `fresh` throws the run directory away; `quiet` prints nothing.
    Without `wait` it returns as soon as the run has begun: `Run.wait` and `Run.stop` end it. `reward` is the function
    of `reward.function`, from a module that other processes can import.
    ConfigError: the run file or a setting is wrong. TrainingFault: it ended otherwise; the message ends with its last
    words. KeyboardInterrupt: it was interrupted, and saved.
    """
    path, tree = (os.devnull, config) if isinstance(config, dict) else (os.fspath(config), {})
    values = {key: value for key, value in flat(tree) if value is not None}
    values |= dict(flat(settings or {}))
    if reward:
        values["reward.function"] = reference(reward)
    words = tuple(f"{key}={toml(value)}" for key, value in values.items())
    directory = Path(load(path, words).directory)
    flags = set_flags(words) + ["--fresh"] * fresh
    launched = _Launched([sys.executable, "-m", "prefixrl.deploy", "launch", path, *flags], quiet)
    # The run has begun once a learner works there and has written the config.
    while not wait and not (is_locked(directory) and (directory / CONFIG_FILE).exists()):
        time.sleep(TICK_S)
        wait = not launched.is_alive()
    if wait:
        launched.end()
    run = Run(directory)
    run._launched = launched
    return run
