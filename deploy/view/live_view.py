"""A run as it goes on: live on a terminal, plain lines elsewhere."""

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.live import Live

from prefixrl.common.errors import ConfigError, PeerLost, Refusal
from prefixrl.common.host.exit_codes import printable
from prefixrl.common.run.documents import AlarmSpans, MetricsLine, newest_metrics
from prefixrl.common.run.status import StatusDocument
from prefixrl.common.wire.address import ENDPOINT_FILE, address_in
from prefixrl.common.wire.requester import Requester
from prefixrl.deploy.runs.tables import console
from prefixrl.deploy.view.console import (
    RECENT,
    Progress,
    is_held_up,
    picture,
    progress_of,
    status_line,
)
from prefixrl.deploy.view.run_state import document_of

REFRESH_S = 0.5
LINE_S, SILENT_S = 10.0, 60.0
"""Least time between two lines of a run that advances; longest time without a line."""


def progress_in(directory: Path, recent: Sequence[MetricsLine]) -> Progress:
    """Return what the files of a run say of its progress."""
    return progress_of(recent, any((directory / "checkpoints").glob(".*.partial")))


def render(document: bytes, directory: Path) -> None:
    """Print a status document."""
    status = msgspec.json.decode(document, type=StatusDocument)
    console().print(picture(status, progress_in(directory, newest_metrics(directory, RECENT))))


class BrokerView:
    """Asks a run's broker again and again, over one connection while it answers."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._requester: Requester | None = None

    def newest_document(self) -> StatusDocument | None:
        """Return the document of a broker; None where it is silent, or there is none."""
        if self._requester is None and not (self._directory / ENDPOINT_FILE).exists():
            return None
        try:
            if self._requester is None:
                self._requester = Requester(
                    address_in(self._directory, "operator"), "operator", answer_s=1.0
                )
            return document_of(self._requester)
        except (PeerLost, Refusal, ConfigError):
            return None

    def close(self) -> None:
        """Give the connection up; the next question makes another."""
        if self._requester:
            self._requester.close()
        self._requester = None


class View:
    """A run as it goes on: a live picture on a terminal, lines elsewhere."""

    def __init__(self, directory: Path, is_on_stderr: bool = False) -> None:
        self._directory = directory
        self._console = console(is_on_stderr)
        self._live = (
            Live(console=self._console, auto_refresh=False) if self._console.is_terminal else None
        )
        self._broker = BrokerView(directory)
        self.document: StatusDocument | None = None
        """The newest answer of the broker; None where the last question brought none."""
        self._next_s = 0.0
        self._alarms = AlarmSpans()
        self._seen: int | None = None
        """Newest iteration whose alarms were told."""
        self._line_s = -SILENT_S
        self._told: tuple[object, ...] = ()
        """Phase of the learner, workers that are held up, and progress of the last line."""

    def __enter__(self) -> "View":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live:
            self._live.stop()
        self._broker.close()

    def announce(self, text: str) -> None:
        """Print a line that stays; elsewhere than on a terminal with the time, and never wrapped."""
        said = printable(text)
        if not self._live:
            said = f"{time.strftime('%H:%M:%S')} {said}"
        self._console.print(said, markup=False, highlight=False, soft_wrap=not self._live)

    def refresh(self) -> None:
        """Show the newest state, at most twice a second; ignore a broker that is silent."""
        if time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + REFRESH_S
        document = self.document = self._broker.newest_document()
        if document is None:
            return
        recent = newest_metrics(self._directory, RECENT)
        for text in self._alarms_begun(recent):
            self.announce(f"ALARM {text}")
        progress = progress_in(self._directory, recent)
        if self._live:
            self._live.update(picture(document, progress, self._console.height), refresh=True)
        elif self._is_line_due(document, time.monotonic()):
            self.announce(" ".join(status_line(document, progress).splitlines()))

    def _is_line_due(self, document: StatusDocument, now_s: float) -> bool:
        """Return True at a change of phase or of the workers in trouble, and at intervals."""
        phase = document.learner_phase
        if phase not in ("loading", "ending"):
            phase = "training"
        held_up = frozenset(each.name for each in document.workers if is_held_up(each))
        now = (phase, held_up, document.iteration, document.evaluations.get("judged"))
        passed_s = now_s - self._line_s
        if now[:2] == self._told[:2] and passed_s < (SILENT_S if now == self._told else LINE_S):
            return False
        self._told = now
        self._line_s = now_s
        return True

    def _alarms_begun(self, lines: Sequence[MetricsLine]) -> list[str]:
        """Return the alarms that began since the last call; at first, those that ring still."""
        earlier = len(self._alarms.found)
        for line in lines[-1:] if self._seen is None else lines:
            if self._seen is None or line.iteration > self._seen:
                self._alarms.add(line.iteration, line.alarms)
                self._seen = line.iteration
        return [f"iteration {each.first}: {each.text}" for each in self._alarms.found[earlier:]]
