"""`prefixrl stop` and `prefixrl workers`: what an operator asks of a run's broker."""

import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import click
import msgspec
from rich import box
from rich.table import Column, Table
from rich.text import Text

from prefixrl.common.errors import ConfigError, PeerLost, TrainingFault
from prefixrl.common.host.process import printable
from prefixrl.common.run.disk import held_bytes, in_mib
from prefixrl.common.run.status import StatusDocument, WorkerStatus
from prefixrl.common.wire.address import ENDPOINT_FILE, address_in
from prefixrl.common.wire.messages.learner import Accepted, DrainWorker, GetStatus, HaltRun, Status
from prefixrl.common.wire.requester import Requester
from prefixrl.deploy.commands.status_command import is_over, statement
from prefixrl.deploy.view.live_view import newest_line
from prefixrl.deploy.view.run_state import is_locked, state_of

ANSWER_S = 5.0
TICK_S = 0.2
ASK_EVERY_S = 2.0
TELL_EVERY_S = 5.0
PIPE_CHARS = 200
"""Width of a table that no terminal shows."""


def operator(directory: Path) -> Requester:
    """Connect to a run's broker with the operator's key; raises ConfigError or PeerLost."""
    if not (directory / ENDPOINT_FILE).exists():
        raise ConfigError(f"{directory} holds no run that was ever started (no file {directory / ENDPOINT_FILE})")
    if is_over(directory):
        raise ConfigError(f"the run in {directory} does not run: {statement(state_of(directory))}")
    return Requester(address_in(directory, "operator"), "operator", ANSWER_S)


def document_of(asking: Requester) -> StatusDocument:
    """Return the state of the run now."""
    return msgspec.json.decode(asking.ask(GetStatus(), Status)[0].document, type=StatusDocument)


# --- stop -----------------------------------------------------------------------------------------------------------


def stop(directory: Path, timeout_s: float, tell: Callable[[str], None] = click.echo) -> None:
    """Have the learner save and end; return once it has.

    Raises:
        ConfigError: the run does not run.
        PeerLost: it has not ended within `timeout_s`; the message names who holds it up.
        TrainingFault: it ended without saving; the message says how.
    """
    began_s = told_s = time.monotonic()
    with closing(operator(directory)) as asking:
        asking.ask(HaltRun("`prefixrl stop`"), Accepted)
    tell("asked the learner to save and stop")
    asked_s = time.monotonic()
    while not _has_ended(directory):
        now_s = time.monotonic()
        if now_s - began_s > timeout_s:
            raise PeerLost(
                f"the run in {directory} has not stopped within {timeout_s:g} s; {_culprit(directory)}. It was asked "
                f"and will stop when that is done; `prefixrl stop {directory}` waits again"
            )
        if now_s - told_s > TELL_EVERY_S:
            told_s = now_s
            tell(_culprit(directory))
        if now_s - asked_s > ASK_EVERY_S:
            asked_s = now_s
            _ask_again(directory)
        time.sleep(TICK_S)
    found = state_of(directory)
    if found.state in ("failed", "killed"):
        raise TrainingFault(f"the run did not stop in order: {statement(found)}")
    tell(printable(statement(found)))


def _has_ended(directory: Path) -> bool:
    """Return True once the learner noted its end, or is gone without a word."""
    if is_over(directory):
        return True
    if is_locked(directory):
        return False
    return _document(directory) is None


def _ask_again(directory: Path) -> None:
    """Repeat the request: a broker that was started anew has forgotten it."""
    try:
        with closing(operator(directory)) as asking:
            asking.ask(HaltRun("`prefixrl stop`"), Accepted)
    except (PeerLost, ConfigError):
        return


def _document(directory: Path) -> StatusDocument | None:
    try:
        with closing(operator(directory)) as asking:
            return document_of(asking)
    except (PeerLost, ConfigError):
        return None


def _culprit(directory: Path) -> str:
    """Return who keeps a run from stopping, as far as its broker and its files show it."""
    if partial := sorted((directory / "checkpoints").glob(".step_*")):
        return f"the learner saves ({partial[-1].name}, {in_mib(held_bytes(partial[-1]))} so far)"
    found = _document(directory)
    if found is None:
        return "its broker does not answer, and its learner has not ended"
    newest = newest_line(directory)
    if not found.workers and not newest:
        return "the learner loads its models"
    lately = f" (the newest one took {newest.trained_s:.0f} s)" if newest else ""
    if found.iteration < found.total_iterations:
        return f"the learner trains iteration {found.iteration + 1} of {found.total_iterations}{lately}, or saves"
    return "the learner ends the last evaluation, or saves"


# --- workers --------------------------------------------------------------------------------------------------------


def workers(directory: Path) -> list[WorkerStatus]:
    """Return the workers that are connected."""
    with closing(operator(directory)) as asking:
        return sorted(document_of(asking).workers, key=lambda each: (each.role, _number(each.name)))


def _number(name: str) -> int:
    """Return the number in a name: scorer-10 comes after scorer-9."""
    return int(name.rpartition("-")[2]) if name.rpartition("-")[2].isdecimal() else 0


def table_of(found: list[WorkerStatus]) -> Table:
    """Return a row per worker."""
    names = (Column(each, no_wrap=True) for each in ("worker", "host", "pid", "phase"))
    table = Table(*names, "version", "seats", "tasks", "busy", "tokens/s", "state", box=box.SIMPLE_HEAD)
    for each in found:
        busy = "" if each.busy_fraction is None else f"{each.busy_fraction:.0%}"
        version = str(each.version) if each.role == "rollout" else ""
        where = Text(printable(each.host)), str(each.pid), each.phase
        seats = f"{each.rows}/{each.seats}"
        figures = version, seats, str(each.leases), busy, f"{each.tokens_per_s:,.0f}"
        table.add_row(each.name, *where, *figures, Text(printable(each.state)))
    return table


def drain(directory: Path, name: str, timeout_s: float, tell: Callable[[str], None] = click.echo) -> None:
    """Have a worker hand back what it holds and leave; return once it has.

    Raises:
        ConfigError: the run does not run, or has no such worker.
        PeerLost: it has not left within `timeout_s`; the message says what it does instead.
    """
    with closing(operator(directory)) as asking:
        found = document_of(asking).workers
        if name not in (known := [each.name for each in found]):
            raise ConfigError(f"the run has no worker {name!r}; it has {', '.join(known) or 'none'}")
        role = next(each.role for each in found if each.name == name)
        others = [each.name for each in found if each.role == role and each.name != name and each.phase != "leaving"]
        asking.ask(DrainWorker(name), Accepted)
        tell(f"asked {name} to leave: it takes no new task, and ends or hands back those it has")
        if not others:
            tell(f"it was the last {role}: the run waits until another one joins")
        deadline_s = time.monotonic() + timeout_s
        while there := [each for each in document_of(asking).workers if each.name == name]:
            if time.monotonic() > deadline_s:
                raise PeerLost(
                    f"{name} ({there[0].host} pid {there[0].pid}) has not left within {timeout_s:g} s; it is "
                    f"{there[0].phase}: {there[0].state}, with {there[0].leases} tasks. It gets no new ones"
                )
            time.sleep(TICK_S)
    tell(f"{name} has left")
