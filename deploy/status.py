"""The state of a run, from its broker: live on a terminal, plain lines elsewhere."""

import contextlib
import sys
import time
from pathlib import Path

import msgspec
from rich.console import Console
from rich.live import Live

from prefixrl.common.errors import ConfigError, PeerLost, Refusal
from prefixrl.common.process import printable
from prefixrl.common.run.directory_format import check_format
from prefixrl.common.run.documents import METRICS_FILE, SUMMARY_FILE, MetricsLine
from prefixrl.common.run.status import StatusDocument
from prefixrl.common.wire.address import ENDPOINT_FILE, address_in
from prefixrl.common.wire.messages import GetStatus, Status
from prefixrl.common.wire.requester import Requester
from prefixrl.deploy.console import picture, plain_line

PLAIN_EVERY_S = 5.0
LIVE_EVERY_S = 0.5


def fetch(directory: Path, answer_s: float = 3.0) -> bytes:
    """Return a run's status as JSON; ConfigError if the run is over, PeerLost without an answer."""
    check_format(directory)
    endpoint = directory / ENDPOINT_FILE
    if not endpoint.exists():
        raise ConfigError(f"{directory} holds no run that was ever started (no file {endpoint})")
    try:
        requester = Requester(address_in(directory, "operator"), "operator", answer_s)
    except PeerLost as error:
        if (directory / SUMMARY_FILE).exists():
            remedy = f"its result is in summary.json (prefixrl report {directory})"
            raise ConfigError(f"the run in {directory} is over; {remedy}") from None
        raise PeerLost(f"{error}; is the learner running? (prefixrl launch resumes the run)") from None
    try:
        return requester.ask(GetStatus(), Status)[0].document
    finally:
        requester.close()


def newest_line(directory: Path) -> MetricsLine | None:
    """Return the last complete line of metrics.jsonl."""
    path = directory / METRICS_FILE
    if not path.exists():
        return None
    for line in reversed(path.read_bytes().splitlines()[-2:]):
        # The last one may be being written.
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
            return msgspec.json.decode(line, type=MetricsLine)
    return None


def render(document: bytes, directory: Path) -> None:
    """Print a status document."""
    Console().print(picture(msgspec.json.decode(document, type=StatusDocument), newest_line(directory)))


class View:
    """A run as it goes on: a live picture on a terminal, a line every few seconds elsewhere."""

    def __init__(self, directory: Path, is_on_stderr: bool = False) -> None:
        self._directory = directory
        self._console = Console(stderr=is_on_stderr)
        stream = sys.stderr if is_on_stderr else sys.stdout
        self._live = Live(console=self._console, auto_refresh=False) if stream.isatty() else None
        self._requester: Requester | None = None
        self._next_s = 0.0
        self._last_line = ""

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
        """Print a line that stays."""
        self._console.print(printable(text), markup=False, highlight=False)

    def refresh(self) -> None:
        """Show the newest state, at most every few seconds; ignore a broker that is silent."""
        if time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + (LIVE_EVERY_S if self._live else PLAIN_EVERY_S)
        if (document := self._document()) is None:
            return
        newest = newest_line(self._directory)
        if self._live:
            self._live.update(picture(document, newest), refresh=True)
        elif (line := plain_line(document, newest)) != self._last_line:
            self._last_line = line
            self.announce(line)

    def _document(self) -> StatusDocument | None:
        if self._requester is None and not (self._directory / ENDPOINT_FILE).exists():
            return None
        try:
            if self._requester is None:
                self._requester = Requester(address_in(self._directory, "operator"), "operator", answer_s=1.0)
            return msgspec.json.decode(self._requester.ask(GetStatus(), Status)[0].document, type=StatusDocument)
        except (PeerLost, Refusal):
            return None
