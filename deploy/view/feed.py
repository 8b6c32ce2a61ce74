"""The parts of a run that its viewers get: all parts when they open it, then the changed parts.

    metrics.jsonl, other files, broker ── once for all viewers, at most once a second ──▶ parts ──▶ each viewer's events

Nothing is read while nobody views. Reading pauses so long that it needs at most `SHARE` of a core.
"""

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import msgspec

from prefixrl.common.errors import UserError
from prefixrl.common.run.directory_format import STARTS_FILE
from prefixrl.common.run.documents import END_FILE, METRICS_FILE, SUMMARY_FILE, newest_metrics
from prefixrl.deploy.runs.curves import Curves
from prefixrl.deploy.runs.inspect import newest_groups
from prefixrl.deploy.runs.report import page_part
from prefixrl.deploy.runs.samples import (
    COMMONEST,
    TRENDS,
    Common,
    commonest,
    decoder,
    shown_samples,
)
from prefixrl.deploy.view.console import RECENT, details, learner_phase, status_line
from prefixrl.deploy.view.live_view import BrokerView, progress_in
from prefixrl.deploy.view.run_state import RunStatus, is_locked, state_of

TICK_S, LEAST_PAUSE_S, MOST_PAUSE_S = 1.0, 0.9, 15.0
"""Time between two questions of a viewer, and between two looks at a run, which is shorter: none comes too early."""
SHARE = 0.004
"""Share of a core that reading may need, and once more for samples, which are in the journal."""
ASK_AGAIN_S = 10.0
"""Time until a broker that was silent is asked again, where no learner of this host works for the run."""


class SentParts(NamedTuple):
    """The parts that a viewer has: those up to a version, and rows of a generation of the curves."""

    version: int = 0
    generation: int = 0
    rows: int = 0


def state_now(run: Path) -> RunStatus:
    """Return the state of a run; it is read again only where its files differ from before. Raises UserError."""
    marks = (_mark(run / name) for name in (METRICS_FILE, END_FILE, SUMMARY_FILE, "config.json"))
    return _state(run, (is_locked(run), *marks))


@lru_cache(maxsize=4096)
def _state(run: Path, _marks: tuple[object, ...]) -> RunStatus:
    return state_of(run)


def _mark(path: Path) -> tuple[int, int]:
    if not path.exists():
        return 0, 0
    status = path.stat()
    return status.st_mtime_ns, status.st_size


class Feed:
    """One run, for all who view it."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._curves = Curves(run)
        self._broker = BrokerView(run)
        self._version = 0
        self._parts: dict[str, tuple[int, bytes]] = {}
        """The newest of each part but the curves, with the version in which it changed."""
        self._common: list[Common] = []
        self._page_marks: tuple[object, ...] = ()
        self._sampled = -1
        self._read_after_s = self._sample_after_s = self._ask_after_s = 0.0
        self._thread = ThreadPoolExecutor(1)
        self.viewers = 0

    async def since(self, sent: SentParts) -> tuple[dict[str, msgspec.Raw], SentParts]:
        """Return the parts that changed since the last call of a viewer, and what the viewer has now."""
        # One thread does everything, also what is left of a viewer who has gone meanwhile.
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._since, sent)

    def leave(self) -> None:
        """Take a viewer's leave; the last one's ends the connection to the broker."""
        self.viewers -= 1
        if not self.viewers:
            self._thread.submit(self._broker.close)

    def _since(self, sent: SentParts) -> tuple[dict[str, msgspec.Raw], SentParts]:
        if time.monotonic() >= self._read_after_s:
            self._read_due_parts()
        changed = {
            name: part for name, (version, part) in self._parts.items() if version > sent.version
        }
        now = SentParts(self._version, self._curves.generation, len(self._curves.iterations))
        if now[1:] != sent[1:]:
            first_row = sent.rows if now.generation == sent.generation else 0
            changed["curves"] = msgspec.json.encode(self._curves.document(first_row))
        return {name: msgspec.Raw(part) for name, part in changed.items()}, now

    def _read_due_parts(self) -> None:
        """Read the parts that are due."""
        is_first = not self._parts
        begun_s = time.thread_time()
        for name, part in self._read():
            self._keep_part(name, msgspec.json.encode(part))
        used_s = (
            0.0 if is_first else time.thread_time() - begun_s
        )  # it reads all of metrics.jsonl, once
        self._read_after_s = time.monotonic() + min(
            MOST_PAUSE_S, max(LEAST_PAUSE_S, used_s / SHARE)
        )
        if samples := self._samples():
            self._keep_part("samples", samples)

    def _keep_part(self, name: str, part: bytes) -> None:
        if self._parts.get(name, (0, b""))[1] != part:
            self._version += 1
            self._parts[name] = self._version, part

    def _read(self) -> Iterator[tuple[str, object]]:
        """Yield parts that may have changed."""
        fault = ""
        try:
            self._curves.read()
            yield "alarms", self._curves.alarms.found
            state = state_now(self._run)
            yield "state", {**msgspec.to_builtins(state), "words": str(state)}
            names = ("config.json", SUMMARY_FILE, STARTS_FILE, "evaluations")
            if (marks := tuple(_mark(self._run / name) for name in names)) != self._page_marks:
                yield "page", page_part(self._run)
                self._page_marks = marks
        except (UserError, OSError) as error:
            fault = str(error)
        yield "fault", fault
        yield "live", self._live()

    def _live(self) -> dict[str, object] | None:
        """Return what the broker says; None if it is silent."""
        now_s = time.monotonic()
        if not is_locked(self._run) and (
            (self._run / END_FILE).exists() or now_s < self._ask_after_s
        ):
            return None
        if (status := self._broker.newest_document()) is None:
            self._ask_after_s = now_s + ASK_AGAIN_S
            return None
        progress = progress_in(self._run, newest_metrics(self._run, RECENT))
        return {
            "line": status_line(status, progress),
            "phase": learner_phase(status, progress),
            "status": status,
            "iteration_s": progress.iteration_s,
            "details": [(name, text) for name, text in details(status, progress) if text],
        }

    def _samples(self) -> bytes:
        """Return the samples of the newest iteration where they are due; it is never the whole journal that is read."""
        newest = len(self._curves.iterations) - 1
        if newest == self._sampled or time.monotonic() < self._sample_after_s:
            return b""
        begun_s = time.thread_time()
        try:
            decode = decoder(self._run)
            groups = newest_groups(self._run)
        except (UserError, OSError):
            return b""
        finally:
            self._sample_after_s = (
                time.monotonic() + TICK_S + (time.thread_time() - begun_s) / SHARE
            )
        self._sampled = newest
        texts = commonest(groups, 0, decode)
        self._common += [msgspec.structs.replace(each, first=newest, last=newest) for each in texts]
        del self._common[: -TRENDS * COMMONEST]
        return msgspec.json.encode(shown_samples(groups, decode, self._common))
