"""Crash points: places in the code at which a test has a process killed, once per run.

`PREFIXRL_CRASH_AT=checkpoint.written,journal.synced:3` and `PREFIXRL_CRASH_FOLDER=DIR`: the process that first comes to
`checkpoint.written`, and the one that comes to `journal.synced` for its third time, kill themselves; a file in DIR says
so, and nobody does it again. Without the variable a crash point does nothing.
"""

import os
import signal
from pathlib import Path

from prefixrl.common.errors import ConfigError

VARIABLE, FOLDER_VARIABLE = "PREFIXRL_CRASH_AT", "PREFIXRL_CRASH_FOLDER"
POINTS = (
    "journal.begun",  # before records are written
    "journal.written",  # written, not synced
    "journal.synced",  # synced, not acknowledged
    "journal.acknowledged",
    "journal.segment",  # the next segment stands there, the last one is not compressed
    "checkpoint.begun",  # the folder is empty
    "checkpoint.written",  # every file is written, nothing renamed
    "checkpoint.renamed",  # the new one counts, the oldest is still there
    "checkpoint.pruned",
    "version.written",  # the weights are on the disk, nobody knows
    "version.announced",
    "iteration.trained",  # the optimiser has stepped, the broker does not know
    "iteration.told",  # the broker knows, metrics and checkpoint are missing
    "iteration.noted",  # metrics are written, the version is not published
    "prefixes.sampled",  # not sent
    "swap.installed",  # new weights are in the engine, not proved
    "scores.judged",  # not sent
)
"""All of them, in the order of one group's way."""


def wanted() -> dict[str, int]:
    """Return the points that the environment names, each with the passage that is the last.

    Raises:
        ConfigError: there is no point of that name.
    """
    found = {}
    for text in filter(None, os.environ.get(VARIABLE, "").split(",")):
        name, _, passage = text.partition(":")
        if name not in POINTS or not (passage or "1").isdecimal():
            points = ", ".join(POINTS)
            raise ConfigError(f"{VARIABLE} names {text!r}; the points are {points}, with :N for the N-th time")
        found[name] = int(passage or "1")
    return found


_left = wanted()


def crash_point(name: str) -> None:
    """Kill this process if a test wants it dead here."""
    if name not in _left:
        return
    _left[name] -= 1
    if _left[name] <= 0 and _is_first(name):
        os.kill(os.getpid(), signal.SIGKILL)


def _is_first(name: str) -> bool:
    try:
        (Path(os.environ[FOLDER_VARIABLE]) / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
