"""The state of a run, from its broker: live on a terminal, plain lines elsewhere."""

import contextlib
import sys
import time
from pathlib import Path

import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from prefixrl.common.errors import ConfigError, PeerLost, Refusal
from prefixrl.common.process import printable
from prefixrl.common.run.directory_format import check_format
from prefixrl.common.run.documents import METRICS_FILE, SUMMARY_FILE, MetricsLine
from prefixrl.common.run.status import StatusDocument
from prefixrl.common.wire.address import ENDPOINT_FILE, address_in
from prefixrl.common.wire.messages import GetStatus, Status
from prefixrl.common.wire.requester import Requester

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
    Console().print(_picture(msgspec.json.decode(document, type=StatusDocument), newest_line(directory)))


def plain_line(document: StatusDocument, newest: MetricsLine | None) -> str:
    """Return the state of a run in one line."""
    busy = ", ".join(f"{role} {share:.0%}" for role, share in document.busy_fraction.items())
    queues = _listed(document.queues)
    reward = f"reward {newest.figures['reward']:.3f}, " if newest else ""
    if document.truncated_fraction:
        reward += f"cut by the length limit {document.truncated_fraction:.1%}, "
    waiting = f", waiting for {document.waiting_for}" if document.waiting_for else ""
    evaluated = f"; evaluations: {_evaluated(document)}" if document.evaluations.get("asked") else ""
    spent = f"; endpoint: {document.endpoint}" if document.endpoint else ""
    held_up = "".join(f"; {each}" for each in _held_up(document))
    loading = ", ".join(each.name for each in document.workers if each.phase == "loading")
    rest = f"{f'; loading: {loading}' if loading else ''}{spent}{held_up}{waiting}"
    if not document.total_iterations:
        return f"{_evaluated(document)}{f'; busy: {busy}' if busy else ''}{rest}"
    where = f"iteration {document.iteration}/{document.total_iterations}: {reward}"
    return f"{where}busy: {busy}; groups: {queues}{evaluated}{rest}"


def _held_up(document: StatusDocument) -> list[str]:
    """Return what workers wait for, and the functions of the user's that fail."""
    stuck = (each for each in document.workers if each.state.startswith(("waiting for ", "reward.function ")))
    return [f"{worker.name}: {worker.state}" for worker in stuck]


def _evaluated(document: StatusDocument) -> str:
    counts = {"asked": 0, "judged": 0, "failed": 0} | document.evaluations
    failed = f", {counts['failed']} failed" if counts["failed"] else ""
    return f"{counts['judged']} of {counts['asked']} judged{failed}"


def _picture(document: StatusDocument, newest: MetricsLine | None) -> Group:
    head = Table.grid(padding=(0, 2))
    if document.total_iterations:
        _add_training(head, document, newest)
    if document.evaluations.get("asked"):
        head.add_row("evaluations", _evaluated(document))
    if document.causes:
        passes = f"{document.filter.passed} of {document.filter.judged}" if document.filter else ""
        head.add_row("ended untrained", _cell(_listed(document.causes)), "filter passes", passes)
    if cached := document.completions.get("cached"):
        head.add_row("completions from the cache", f"{cached} of {document.completions['judged']}")
    if document.row_errors:
        head.add_row("texts without a verdict", _listed(document.row_errors))
    if document.endpoint:
        head.add_row("the target's endpoint", str(document.endpoint))
    if document.waiting_for:
        head.add_row("the learner waits for", _cell(document.waiting_for))
    columns = "worker", "phase", "engine", "version", "tasks", "rows", "waiting", "busy", "tokens/s", "done", "state"
    workers = Table(*columns, box=None, padding=(0, 2))
    for each in document.workers:
        busy = "" if each.busy_fraction is None else f"{each.busy_fraction:.0%}"
        version = str(each.version) if each.role == "rollout" else ""
        rows, speed = f"{each.rows}/{each.seats}", f"{each.tokens_per_s:,.0f}"
        figures = version, str(each.leases), rows, str(each.waiting_rows), busy, speed, str(each.tasks_done)
        workers.add_row(each.name, each.phase, _cell(each.engine), *figures, _cell(each.state))
    engines = Table.grid(padding=(0, 2))
    for each in document.workers:
        if each.about:
            engines.add_row(each.name, _cell(each.about))
    # On lines of their own as well: a narrow terminal, and every pipe, cuts the last column of the table.
    return Group(head, *(_cell(each) for each in _held_up(document)), workers, engines)


def _cell(text: str) -> Text:
    """Return a worker's text as it is: rich would read markup in it."""
    return Text(printable(text))


def _add_training(head: Table, document: StatusDocument, newest: MetricsLine | None) -> None:
    where = f"{document.iteration} of {document.total_iterations}"
    head.add_row("iteration", where, "time left", _eta(document, newest))
    if newest:
        reward, entropy = newest.figures["reward"], newest.figures["entropy"]
        head.add_row("reward", f"{reward:.3f}", "entropy", f"{entropy:.3f}")
    head.add_row("cut by the length limit", f"{document.truncated_fraction:.1%} of the newest batch")
    ages = ", ".join(f"{age}: {count}" for age, count in document.age_histogram.items())
    head.add_row("trained groups by age", ages, "window", str(document.window))
    head.add_row("mean age", f"{document.mean_age:.2f}", "begun ahead", _ahead(document))
    if newest and newest.drift:
        shown = (f"{each.age}: {each.gap:.3f} nats, ESS {each.ess_fraction:.2f}" for each in newest.drift)
        head.add_row("drift by age", "; ".join(shown))
    if document.crossed_fraction:
        tokens = ", ".join(f"{age}: {count}" for age, count in document.token_age_histogram.items())
        crossed = f"{document.crossed_fraction:.1%} of the rows"
        head.add_row("trained tokens by age", tokens, "crossed an update", crossed)
    head.add_row("groups", _listed(document.queues))


def _ahead(document: StatusDocument) -> str:
    """Return what may be under way besides the batch in training, and the wait that set it."""
    admission = document.admission
    if admission.rule != "just_in_time" or not document.window:
        return "as early as the window allows"
    cap = f"at most {admission.cap_groups:.0f} beyond a batch by drift"
    waited = f"the learner waited {admission.waited_s:.1f} s for groups"
    return f"{admission.lead_groups:.0f} groups, just in time ({cap}; {waited})"


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))


def _eta(document: StatusDocument, newest: MetricsLine | None) -> str:
    if not newest or not document.iteration:
        return "?"
    per_iteration_s = newest.since_start_s / (newest.iteration + 1)
    left_s = per_iteration_s * (document.total_iterations - document.iteration)
    return f"{left_s / 60:.0f} min" if left_s > 90 else f"{left_s:.0f} s"


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
            self._live.update(_picture(document, newest), refresh=True)
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
