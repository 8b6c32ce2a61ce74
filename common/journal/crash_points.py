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

from prefixrl.common.errors import ConfigError

VARIABLE = "PREFIXRL_CRASH_AT"
FOLDER_VARIABLE = "PREFIXRL_CRASH_FOLDER"
HANG = "hang"
POINTS = {
    "journal.begun": "before records are written",
    "journal.written": "written, not synced",
    "journal.synced": "synced, not acknowledged",
    "journal.acknowledged": "",
    "journal.segment": "the next segment stands there, the last one is not compressed",
    "checkpoint.begun": "the folder is empty",
    "checkpoint.written": "every file is written, nothing renamed",
    "checkpoint.renamed": "the new one counts, the oldest is still there",
    "checkpoint.best": "the link names the best one, nothing is removed",
    "checkpoint.removing": "one that goes has another name, its files are there",
    "checkpoint.pruned": "",
    "upload.begun": "the command runs",
    "upload.done": "the command has ended, nothing says so",
    "version.written": "the weights are on the disk, no process knows",
    "version.announced": "",
    "iteration.trained": "the optimiser has stepped, the broker does not know",
    "iteration.told": "the broker knows, metrics and checkpoint are missing",
    "iteration.noted": "metrics are written, the version is not published",
    "prefixes.sampled": "not sent",
    "swap.installed": "new weights are in the engine, not proved",
    "scores.judged": "not sent",
}
"""The points, and how far the work is at each; "" where the name says it."""


def points_to_crash_at() -> dict[str, tuple[int, bool]]:
    """Return passage by point as the environment names them, and if the process hangs there."""
    chosen = {}
    for text in filter(None, os.environ.get(VARIABLE, "").split(",")):
        name, passage, effect = (text + "::").split(":")[:3]
        passage = passage or "1"
        if name not in POINTS or not passage.isdecimal() or effect not in ("", HANG):
            points = ", ".join(POINTS)
            raise ConfigError(
                f"{VARIABLE} names {text!r}; the points are {points}, with :N or :N:{HANG}"
            )
        chosen[name] = int(passage), effect == HANG
    return chosen


_points = points_to_crash_at()
_passages: Counter[str] = Counter()


def crash_point(name: str) -> None:
    """Kill this process, or hang, if a test wants it here."""
    if name not in _points:
        return
    passage, hangs = _points[name]
    _passages[name] += 1
    if _passages[name] < passage:
        return
    try:
        (Path(os.environ[FOLDER_VARIABLE]) / name).touch(exist_ok=False)
    except FileExistsError:
        return  # another process was the first
    while hangs:
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGKILL)
