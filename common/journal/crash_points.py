"""Crash points: places in the code at which a test has a process killed, once per run.

`PREFIXRL_CRASH_AT=checkpoint.written,journal.synced:3` and `PREFIXRL_CRASH_FOLDER=DIR`: the process that first comes to
`checkpoint.written`, or for its third time to `journal.synced`, kills itself; a file in DIR says so, and nobody does it
again. `scores.judged:3:hang` hangs there instead, only the thread that works. Without the variable nothing happens.
"""

import os
import signal
import time
from collections import Counter
from pathlib import Path

from prefixrl.common.config.foreign.files import read_toml
from prefixrl.common.errors import ConfigError

VARIABLE, FOLDER_VARIABLE, HANG = "PREFIXRL_CRASH_AT", "PREFIXRL_CRASH_FOLDER", "hang"
POINTS = tuple(read_toml(Path(__file__).with_suffix(".toml"), "the table of crash points"))


def wanted() -> dict[str, tuple[int, bool]]:
    """Return passage by point as the environment names them, and if the process hangs there."""
    found = {}
    for text in filter(None, os.environ.get(VARIABLE, "").split(",")):
        name, passage, effect = (text + "::").split(":")[:3]
        passage = passage or "1"
        if name not in POINTS or not passage.isdecimal() or effect not in ("", HANG):
            points = ", ".join(POINTS)
            raise ConfigError(
                f"{VARIABLE} names {text!r}; the points are {points}, with :N or :N:{HANG}"
            )
        found[name] = int(passage), effect == HANG
    return found


_wanted = wanted()
_passages: Counter[str] = Counter()


def crash_point(name: str) -> None:
    """Kill this process, or hang, if a test wants it here."""
    if name not in _wanted:
        return
    passage, hangs = _wanted[name]
    _passages[name] += 1
    if _passages[name] < passage or not _is_first(name):
        return
    while hangs:
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGKILL)


def _is_first(name: str) -> bool:
    try:
        (Path(os.environ[FOLDER_VARIABLE]) / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
