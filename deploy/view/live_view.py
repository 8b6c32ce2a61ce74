"""The state of a run, from its broker: live on a terminal, plain lines elsewhere."""

import contextlib
import sys
import time
from collections import deque
from pathlib import Path

import msgspec
from rich.console import Console
from rich.live import Live

from prefixrl.common.errors import ConfigError, DataError, PeerLost, Refusal
from prefixrl.common.host.process import printable
from prefixrl.common.run import json_lines
from prefixrl.common.run.directory_format import check_format
from prefixrl.common.run.documents import METRICS_FILE, SUMMARY_FILE, MetricsLine, alarm_spans, alarm_words
from prefixrl.common.run.status import StatusDocument
from prefixrl.common.wire.address import ENDPOINT_FILE, address_in
from prefixrl.common.wire.messages.learner import GetStatus, Status
from prefixrl.common.wire.requester import Requester
from prefixrl.deploy.runs.track import MetricsFile
from prefixrl.deploy.view.console import RECENT, Rhythm, picture, plain_line, progress_of

LOOK_EVERY_S = 0.5
FILE_WIDTH = 160
"""A file has no width of its own."""


def fetch(directory: Path, answer_s: float = 3.0) -> bytes:
    """Return a run's status as JSON; ConfigError if the run is over, PeerLost without an answer."""
    check_format(directory)
    endpoint = directory / ENDPOINT_FILE
    if not endpoint.exists():
        why = f"no file {endpoint}" if directory.exists() else "there is no such folder"
        raise ConfigError(f"{directory} holds no run that was ever started ({why})")
    try:
        requester = Requester(address_in(directory, "operator"), "operator", answer_s)
    except PeerLost as error:
        if (directory / SUMMARY_FILE).exists():
            remedy = f"its result is in summary.json (prefixrl report {directory})"
            raise ConfigError("\n".join([f"the run in {directory} is over; {remedy}", *rung(directory)])) from None
        remedy = f"is the learner running? (prefixrl resume {directory} goes on with the run)"
        raise PeerLost("\n".join([f"{error}; {remedy}", *rung(directory)])) from None
    try:
        return requester.ask(GetStatus(), Status)[0].document
    finally:
        requester.close()


def rung(directory: Path) -> list[str]:
    """Return the alarms that rang in a run, a line each, from its files."""
    try:
        lines = json_lines.read(directory / METRICS_FILE, MetricsLine)
    except DataError:
        return []  # the damage is told by the commands that need every line
    return [alarm_words(each) for each in alarm_spans(lines)]


def newest_line(directory: Path) -> MetricsLine | None:
    """Return the last complete line of metrics.jsonl."""
    found = newest_lines(directory, 1)
    return found[-1] if found else None


def newest_lines(directory: Path, count: int) -> list[MetricsLine]:
    """Return the last complete lines of metrics.jsonl, in order."""
    path = directory / METRICS_FILE
    found = []
    for line in path.read_bytes().splitlines()[-count - 1 :] if path.exists() else ():
        # The last one may be being written.
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
            found.append(msgspec.json.decode(line, type=MetricsLine))
    return found[-count:]


def _is_saving(directory: Path) -> bool:
    return any((directory / "checkpoints").glob(".*.partial"))


def render(document: bytes, directory: Path) -> None:
    """Print a status document."""
    console = Console(width=None if sys.stdout.isatty() else FILE_WIDTH)
    status = msgspec.json.decode(document, type=StatusDocument)
    progress = progress_of(newest_lines(directory, RECENT), _is_saving(directory))
    console.print(picture(status, progress, console.width, None))


class View:
    """A run as it goes on: a live picture on a terminal, lines elsewhere."""

    def __init__(self, directory: Path, is_on_stderr: bool = False) -> None:
        self._directory = directory
        self._console = Console(stderr=is_on_stderr)
        stream = sys.stderr if is_on_stderr else sys.stdout
        self._live = Live(console=self._console, auto_refresh=False) if stream.isatty() else None
        self._requester: Requester | None = None
        self.document: StatusDocument | None = None
        """The newest answer of the broker; None where the last look brought none."""
        self._next_s = 0.0
        self._metrics = MetricsFile(directory / METRICS_FILE)
        self._recent: deque[MetricsLine] = deque(maxlen=RECENT)
        self._rhythm = Rhythm()

    def __enter__(self) -> "View":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live:
            self._live.stop()
        if self._requester:
            self._requester.close()

    def announce(self, text: str) -> None:
        """Print a line that stays; elsewhere than on a terminal with the time, and never wrapped."""
        said = printable(text)
        if not self._live:
            said = f"{time.strftime('%H:%M:%S')} {said}"
        self._console.print(said, markup=False, highlight=False, soft_wrap=not self._live)

    def refresh(self) -> None:
        """Show the newest state, at most every few seconds; ignore a broker that is silent."""
        if time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + LOOK_EVERY_S
        document = self.document = self._document()
        if document is None:
            return
        for text in self._read_metrics():
            self.announce(f"ALARM {text}")
        progress = progress_of(list(self._recent), _is_saving(self._directory))
        if self._live:
            width, height = self._console.size
            self._live.update(picture(document, progress, width, height - 1), refresh=True)
        elif self._rhythm.is_due(time.monotonic(), document, progress):
            self.announce(" ".join(plain_line(document, progress).splitlines()))

    def _read_metrics(self) -> list[str]:
        """Take new lines of metrics; return the alarms that began with them."""
        new: list[MetricsLine] = []
        with contextlib.suppress(msgspec.MsgspecError):
            new = self._metrics.changed()
        begun = []
        # Of what an earlier launch trained, only what rings still is news.
        for line in new if self._recent else new[-1:]:
            before = self._recent[-1] if self._recent else None
            if before and before.iteration >= line.iteration:
                self._recent.clear()  # resumed from an earlier checkpoint
            known = before.alarms if before else {}
            begun += [f"iteration {line.iteration}: {text}" for kind, text in line.alarms.items() if kind not in known]
            self._recent.append(line)
        return begun

    def _document(self) -> StatusDocument | None:
        if self._requester is None and not (self._directory / ENDPOINT_FILE).exists():
            return None
        try:
            if self._requester is None:
                self._requester = Requester(address_in(self._directory, "operator"), "operator", answer_s=1.0)
            return msgspec.json.decode(self._requester.ask(GetStatus(), Status)[0].document, type=StatusDocument)
        except (PeerLost, Refusal, ConfigError):
            return None
