"""`prefixrl stop` and `prefixrl workers`: what an operator asks of a run's broker."""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import click
import msgspec

from prefixrl.common.errors import ConfigError, PeerLost, TrainingFault, to_copy
from prefixrl.common.host.exit_codes import printable
from prefixrl.common.run.disk import held_bytes, in_mib
from prefixrl.common.run.documents import newest_metrics
from prefixrl.common.run.status import WorkerStatus
from prefixrl.common.wire.messages.learner import Accepted, DrainWorker, HaltRun
from prefixrl.deploy.runs.checkpoints import run_directory_argument
from prefixrl.deploy.runs.tables import console
from prefixrl.deploy.view.console import in_order, workers_table
from prefixrl.deploy.view.run_state import document_of, is_going_on, operator, state_of

ANSWER_S = 5.0
TICK_S = 0.2
ASK_EVERY_S = 2.0
TELL_EVERY_S = 5.0
STOP_S = "Longest wait in seconds; the run stops after it too, as soon as it can."
DRAIN_S = "Longest wait in seconds for a worker that leaves."


@click.command("stop")
@run_directory_argument
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0),
    default=600.0,
    show_default=True,
    help=STOP_S,
)
def stop_command(run_directory: Path, timeout_s: float) -> None:
    """Have the run in RUN_DIRECTORY save and stop, on whatever host it is.

    The learner ends its iteration and saves; `prefixrl launch` then ends the workers it started.
    """
    stop(run_directory, timeout_s)


@click.command("workers")
@run_directory_argument
@click.argument("action", required=False, type=click.Choice(["drain"]))
@click.argument("name", required=False, metavar="[ID]")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0),
    default=60.0,
    show_default=True,
    help=DRAIN_S,
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object per worker.")
def workers_command(
    run_directory: Path, action: str | None, name: str | None, timeout_s: float, as_json: bool
) -> None:
    """List the workers of a running run, or have the worker ID leave it (drain).

    A worker that `prefixrl launch` started stays away then, until the next launch.
    """
    if (action is None) != (name is None):
        raise ConfigError(
            f"give {to_copy('prefixrl workers', run_directory, 'drain', 'ID')}, with an ID of the list"
        )
    if name:
        drain(run_directory, name, timeout_s)
    elif as_json:
        for worker in workers(run_directory):
            click.echo(printable(msgspec.json.encode(worker).decode()))
    else:
        console().print(workers_table(workers(run_directory), is_wide=True))


def workers(directory: Path) -> list[WorkerStatus]:
    """Return the workers that are connected, by role and number."""
    with operator(directory, ANSWER_S) as asking:
        return in_order(document_of(asking).workers)


def stop(directory: Path, timeout_s: float, tell: Callable[[str], None] = click.echo) -> None:
    """Have the learner save and end, and return then; ConfigError, PeerLost after `timeout_s`, TrainingFault."""
    began_s = told_s = time.monotonic()
    with operator(directory, ANSWER_S) as asking:
        asking.ask_broker(HaltRun("`prefixrl stop`"), Accepted)
    tell("asked the learner to save and stop")
    asked_s = time.monotonic()
    while is_going_on(directory):
        now_s = time.monotonic()
        if now_s - began_s > timeout_s:
            raise PeerLost(
                f"the run in {directory} has not stopped within {timeout_s:g} s; {_present_work(directory)}. It was "
                f"asked and will stop when that is done; {to_copy('prefixrl stop', directory)} waits again"
            )
        if now_s - told_s > TELL_EVERY_S:
            told_s = now_s
            tell(_present_work(directory))
        if now_s - asked_s > ASK_EVERY_S:
            asked_s = now_s
            # A broker that was started again has forgotten it.
            with suppress(PeerLost, ConfigError), operator(directory, ANSWER_S) as asking:
                asking.ask_broker(HaltRun("`prefixrl stop`"), Accepted)
        time.sleep(TICK_S)
    end = state_of(directory)
    if end.state in ("failed", "killed"):
        raise TrainingFault(f"the run did not stop in order: {end}")
    tell(printable(str(end)))


def _present_work(directory: Path) -> str:
    """Return what keeps a run from stopping, as far as its broker and its files show it."""
    if partial := sorted((directory / "checkpoints").glob(".step_*")):
        return (
            f"the learner is saving ({partial[-1].name}, {in_mib(held_bytes(partial[-1]))} so far)"
        )
    try:
        with operator(directory, ANSWER_S) as asking:
            document = document_of(asking)
    except (PeerLost, ConfigError):
        return "its broker does not answer, and its learner has not ended"
    newest = newest_metrics(directory)
    if not document.workers and not newest:
        return "the learner is loading its models"
    lately = f" (the newest one took {newest[0].trained_s:.0f} s)" if newest else ""
    if document.iteration < document.total_iterations:
        place = f"iteration {document.iteration + 1} of {document.total_iterations}"
        return f"the learner trains {place}{lately}, or saves"
    return "the learner ends the last evaluation, or saves"


def drain(directory: Path, name: str, timeout_s: float) -> None:
    """Have a worker hand back what it holds and leave, and return then; ConfigError, PeerLost after `timeout_s`."""
    with operator(directory, ANSWER_S) as asking:
        connected = document_of(asking).workers
        names = [each.name for each in connected]
        if name not in names:
            raise ConfigError(
                f"the run has no worker {name!r}; it has {', '.join(names) or 'none'}"
            )
        role = connected[names.index(name)].role
        staying = [each for each in connected if each.name != name and each.phase != "leaving"]
        asking.ask_broker(DrainWorker(name), Accepted)
        click.echo(
            f"asked {name} to leave: it takes no new task, and ends or hands back those it has"
        )
        if role not in [each.role for each in staying]:
            click.echo(f"it was the last {role}: the run waits until another one joins")
        deadline_s = time.monotonic() + timeout_s
        while remaining := [each for each in document_of(asking).workers if each.name == name]:
            if time.monotonic() > deadline_s:
                raise PeerLost(
                    f"{name} ({remaining[0].host} pid {remaining[0].pid}) has not left within {timeout_s:g} s; it is "
                    f"{remaining[0].phase}: {remaining[0].state}, with {remaining[0].leases} tasks. It gets no new ones"
                )
            time.sleep(TICK_S)
    click.echo(f"{name} has left")
