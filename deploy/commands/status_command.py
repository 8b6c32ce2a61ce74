"""`prefixrl status`: a run that goes on from its broker, any other from its files."""

import shlex
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from prefixrl.common.errors import PeerLost, UserError
from prefixrl.common.host.process import printable
from prefixrl.common.run.documents import END_FILE, SUMMARY_FILE
from prefixrl.deploy.view.live_view import View, fetch, render, rung
from prefixrl.deploy.view.run_state import RunFiles, is_locked, state_of

LEARNER_LOG = "logs/learner.log"
MOST_WORDS = 600
"""Longest end of a log that is a part of a sentence."""
TICK_S = 0.2
RESTART_S = 6.0
"""Longest time in which `launch` has started a killed learner again, so that the run goes on."""


def show(directory: Path, as_json: bool) -> None:
    """Print the state of a run: the broker's document, or what its files say of its end."""
    document = b""
    if not is_over(directory):
        try:
            document = fetch(directory)
        except PeerLost:
            if is_locked(directory):
                raise
    if not document:
        found = state_of(directory)
        if as_json:
            print(printable(msgspec.json.encode(found).decode()))
        else:
            _print(found)
    elif as_json:
        print(printable(document.decode()))
    else:
        render(document, directory)


def is_over(directory: Path) -> bool:
    """Return True if the files alone prove that no learner works for the run, on any host."""
    if is_locked(directory):
        return False
    return (directory / END_FILE).exists() or (
        (directory / SUMMARY_FILE).exists() and state_of(directory).state == "finished"
    )


def watch(directory: Path, stopped: Callable[[], bool]) -> None:
    """Show a run as it goes on, until it ends; then print how it ended."""
    if not _goes_on(directory):
        show(directory, as_json=False)
        return
    silent_from_s = None
    with View(directory) as view:
        while not stopped() and not is_over(directory):
            view.refresh()
            silent_from_s = None if _goes_on(directory) else silent_from_s or time.monotonic()
            # A killed learner may be started again.
            if silent_from_s and time.monotonic() - silent_from_s > RESTART_S:
                break
            time.sleep(TICK_S)
    if not stopped():
        _print(state_of(directory))


def _print(found: RunFiles) -> None:
    for text in (statement(found), *rung(Path(found.directory))):
        print(printable(text))


def _goes_on(directory: Path) -> bool:
    """Return True while a learner works for the run; one of another host is known by its broker."""
    if is_locked(directory) or is_over(directory):
        return not is_over(directory)
    try:
        fetch(directory)
    except (PeerLost, UserError):
        return False
    return True


def statement(found: RunFiles) -> str:
    """Return in a sentence or two how a run stands that does not run."""
    directory = Path(found.directory)
    total = f" of {found.total_iterations}" if found.total_iterations else ""
    match found.state:
        case "finished":
            accuracy = ", ".join(f"{arm} {value:.3f}" for arm, value in found.accuracy.items())
            page = directory / "report.html"
            report = f"report: {page}" if page.exists() else f"`prefixrl report {directory}` writes its report"
            return f"finished: {found.iterations}{total} iterations; {report}" + (f"\n{accuracy}" if accuracy else "")
        case "stopped":
            return f"stopped at iteration {found.iterations}{total}, and saved; {_again(directory)} resumes it"
        case "failed":
            return (
                f"failed at iteration {found.iterations}{total}: the learner ended with exit code {found.exit_code}, "
                f"{found.reason}{_see(directory)}\nWith the cause removed, {_again(directory)} resumes it"
            )
        case "killed":
            words = _last_words(directory / LEARNER_LOG)
            return (
                f"killed at iteration {found.iterations}{total}: the learner left no word of its end"
                f"{_see(directory)}{f'; the newest line there: {words}' if words else ''}\n{_again(directory)} resumes "
                f"it from its newest checkpoint{_newest_checkpoint(directory)}"
            )
    return f"running: iteration {found.iterations}{total}"


def _again(directory: Path) -> str:
    """Return the command that resumes a run."""
    if (directory / "slurm").exists():
        return "`prefixrl slurm run.toml --submit` with its run file"
    return f"`{shlex.join(['prefixrl', 'resume', str(directory)])}`"


def _see(directory: Path) -> str:
    log = directory / LEARNER_LOG
    return f" (see {log})" if log.exists() else ""


def _last_words(log: Path) -> str:
    """Return the newest line of a log, cut to the length of a sentence."""
    if not log.exists():
        return ""
    lines = log.read_bytes()[-8192:].decode(errors="replace").strip().splitlines()
    return lines[-1].strip()[:MOST_WORDS] if lines else ""


def _newest_checkpoint(directory: Path) -> str:
    steps = sorted((directory / "checkpoints").glob("step_????????"))
    return f" ({int(steps[-1].name[5:])} iterations)" if steps else ", of which there is none: from the beginning"
