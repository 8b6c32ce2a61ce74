"""The state of a run: its files, whether its learner works, its broker's document."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Literal

import msgspec

from prefixrl.common.errors import ConfigError, DataError, Halted, PeerLost, to_copy
from prefixrl.common.host.process import locked
from prefixrl.common.run import documents, json_lines
from prefixrl.common.run.directory_format import FORMAT_FILE, check_format
from prefixrl.common.run.replay import plan_of
from prefixrl.common.run.status import StatusDocument
from prefixrl.common.wire.address import ENDPOINT_FILE, address_in
from prefixrl.common.wire.messages.learner import GetStatus, Status
from prefixrl.common.wire.requester import Requester
from prefixrl.deploy.runs.checkpoints import config_of, newest_checkpoint

LEARNER_LOG = "logs/learner.log"
BLOCK_BYTES = 2**16
MOST_WORDS = 600
"""Longest end of a log that is a part of a sentence."""

State = Literal["running", "finished", "stopped", "failed", "killed"]


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One run, as its files show it."""

    directory: str
    state: State
    """stopped: the learner saved on request. failed: an error ended it. killed: it left no message."""
    iterations: int
    """Number of trained iterations."""
    total_iterations: int | None
    """None if the data's epochs end the run, and the run has not read its data yet."""
    reward: float | None
    """Mean reward of the newest iteration's samples."""
    accuracy: dict[str, float]
    """Accuracy by arm. Empty before the run is finished."""
    exit_code: int | None = None
    """Exit code of the learner. None while it runs, and if it was killed."""
    reason: str = ""
    """The learner's last words."""
    ended_by_cost: str = ""
    """The sentence about a finished run that `scorer.openai.most_cost` ended before its last iteration."""
    replay_of: str = ""
    """Directory of the run whose samples a replay trains on; "" for a run."""

    @property
    def words(self) -> str:
        """The state in a few words, which tell a replay from a run."""
        return f"{self.state}, replay of {self.replay_of}" if self.replay_of else self.state

    def __str__(self) -> str:
        """Return in one or two sentences how the run ended, and the command that resumes it."""
        beginning = f"replay of {self.replay_of}, " if self.replay_of else ""
        return beginning + self._ending()

    def _ending(self) -> str:
        directory = Path(self.directory)
        at = (
            f"{self.iterations} of {self.total_iterations}"
            if self.total_iterations
            else str(self.iterations)
        )
        log = directory / LEARNER_LOG
        see = f" (see {log})" if log.exists() else ""
        again = to_copy("prefixrl resume", directory)
        if (directory / "slurm").exists():
            again = "`prefixrl slurm run.toml --submit` with its run file"
        if plan := plan_of(directory):
            again = plan.command(directory)
        match self.state:
            case "finished":
                accuracy = ", ".join(f"{arm} {value:.3f}" for arm, value in self.accuracy.items())
                page = directory / "report.html"
                how = to_copy("prefixrl report", directory)
                report = f"report: {page}" if page.exists() else f"{how} writes its report"
                cost = f"{self.ended_by_cost}\n" if self.ended_by_cost else ""
                return f"finished: {at} iterations; {report}\n{cost}{accuracy}".rstrip()
            case "stopped":
                return f"stopped at iteration {at}, and saved; {again} resumes it"
            case "failed":
                return (
                    f"failed at iteration {at}: the learner ended with exit code {self.exit_code}, {self.reason}{see}\n"
                    f"With the cause removed, {again} resumes it"
                )
            case "killed":
                words = log_tail(log, 1) if log.exists() else []
                newest_words = ", of which there is none: from the beginning"
                if newest := newest_checkpoint(directory):
                    newest_words = f" ({newest} iterations)"
                return (
                    f"killed at iteration {at}: the learner left no word of its end{see}"
                    f"{f'; the newest line there: {words[0].strip()[:MOST_WORDS]}' if words else ''}\n"
                    f"{again} resumes it from its newest checkpoint{newest_words}"
                )
        return f"running: iteration {at}"


def state_of(run: Path) -> RunStatus:
    """Return the state of one run; raises ConfigError if there is no run, or a run of another release."""
    config = config_of(run, ())
    newest = next(iter(documents.newest_metrics(run)), None)
    summary = documents.summary_of(run)
    is_running = is_locked(run)
    # While it runs, a file about its end is of an earlier start.
    end = None if is_running else json_lines.document(run / documents.END_FILE, documents.RunEnd)
    plan = plan_of(run)
    total = plan.iterations if plan else config.algorithm.iterations
    path = run / "data" / "train.jsonl"
    if not total and path.exists() and (problems := path.read_bytes().count(b"\n")):
        total = config.iterations_in_all(problems)
    # A run that was extended has the summary of its first end until it reaches its second.
    is_complete = summary is not None and summary.versions >= (total or 0)
    state: State = "failed"
    if is_running:
        state = "running"
    elif summary and (is_complete if end is None else end.exit_code == 0):
        state = "finished"
    elif end is None:
        state = "killed"
    elif end.exit_code == Halted.exit_code or (plan and end.exit_code == 0):
        # A replay with the changes of its run ends once for each of them.
        state = "stopped"
    cost_end = summary.ended_by_cost if summary and state == "finished" else None
    return RunStatus(
        directory=str(run),
        state=state,
        iterations=newest.iteration + 1 if newest else 0,
        total_iterations=total,
        reward=newest.figures.get("reward") if newest else None,
        accuracy=summary.accuracy if summary and state == "finished" else {},
        exit_code=end.exit_code if end else None,
        reason=end.reason if end else "",
        ended_by_cost=cost_end.reason if cost_end else "",
        replay_of=plan.source if plan else "",
    )


def nothing_left(run: Path) -> str:
    """Return what a launch can still do for a finished run; "" for any other run."""
    if not (run / documents.SUMMARY_FILE).exists():
        return ""
    state = state_of(run)
    iterations = config_of(run, ()).algorithm.iterations
    # A run that was extended is finished until it goes on; of epochs a filter leaves fewer iterations than are counted.
    if state.state != "finished" or state.iterations < (iterations or 0):
        return ""
    key = "algorithm.iterations" if iterations else "data.epochs"
    more = to_copy("prefixrl resume", run, "--change", f"{key}=N")
    return (
        f"the run in {run} is finished after {state.iterations} iterations: nothing more is trained; {more} "
        f"prolongs it, --fresh starts it anew"
    )


# --- is it over? -----------------------------------------------------------------------------------------------------


def is_locked(run: Path) -> bool:
    """Return True if a learner of this host works in the directory; its lock is not taken."""
    try:
        with locked(run / "lock", fcntl.LOCK_SH | fcntl.LOCK_NB):
            return False
    except OSError as error:  # no learner works where there is no lock, or locks are not supported
        return isinstance(error, BlockingIOError)


def is_over(run: Path) -> bool:
    """Return True if the files alone prove that no learner works for the run, on any host."""
    if is_locked(run):
        return False
    return (run / documents.END_FILE).exists() or (
        (run / documents.SUMMARY_FILE).exists() and state_of(run).state == "finished"
    )


def is_going_on(run: Path) -> bool:
    """Return True while a learner works for the run; ask the broker about a learner of another host."""
    if is_over(run):
        return False
    if is_locked(run):
        return True
    try:
        fetch(run)
    except (PeerLost, ConfigError):
        return False
    return True


# --- the broker ------------------------------------------------------------------------------------------------------


@contextmanager
def operator(run: Path, answer_s: float = 3.0) -> Iterator[Requester]:
    """Connect to a run's broker with the operator's key; ConfigError without a run, PeerLost without an answer."""
    check_format(run)
    if plan := plan_of(run):
        raise ConfigError(
            f"{run} holds a replay of {plan.source}, which has no broker and no workers; Ctrl-C ends "
            f"{plan.command(run)}, and the same command goes on"
        )
    endpoint = run / ENDPOINT_FILE
    if not endpoint.exists():
        why = f"no file {endpoint}" if run.exists() else "there is no such folder"
        raise ConfigError(f"{run} holds no run that was ever started ({why})")
    if is_over(run):
        raise ConfigError(
            "\n".join([f"the run in {run} is not running: {state_of(run)}", *rung_alarms(run)])
        )
    try:
        requester = Requester(address_in(run, "operator"), "operator", answer_s)
    except PeerLost as error:
        remedy = f"is the learner running? ({to_copy('prefixrl resume', run)} resumes the run)"
        raise PeerLost("\n".join([f"{error}; {remedy}", *rung_alarms(run)])) from None
    with closing(requester):
        yield requester


def document_of(asking: Requester) -> StatusDocument:
    """Return the state of the run now."""
    document = asking.ask_broker(GetStatus(), Status)[0].document
    return msgspec.json.decode(document, type=StatusDocument)


def fetch(run: Path, answer_s: float = 3.0) -> bytes:
    """Return a run's status document as JSON; raises ConfigError and PeerLost."""
    with operator(run, answer_s) as asking:
        return asking.ask_broker(GetStatus(), Status)[0].document


# --- the metrics -----------------------------------------------------------------------------------------------------


def rung_alarms(run: Path) -> list[str]:
    """Return the alarms that rang in a run, a line each, from its files."""
    try:
        lines = documents.metrics_of(run)
    except DataError:
        return []  # the damage is told by the commands that need every line
    return [documents.alarm_words(each) for each in documents.alarm_spans(lines)]


def log_tail(path: Path, count: int) -> list[str]:
    """Return the newest lines; reads no more of a long log than it needs."""
    if not count:
        return []
    with path.open("rb") as file:
        left_bytes = file.seek(0, os.SEEK_END)
        content = b""
        while left_bytes and content.count(b"\n") <= count:
            size = min(BLOCK_BYTES, left_bytes)
            left_bytes -= size
            file.seek(left_bytes)
            content = file.read(size) + content
    return content.decode(errors="replace").splitlines()[-count:]


def runs_below(folder: Path) -> list[Path]:
    """Return the run directories in a folder, at any depth; raises ConfigError if there is no run."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder")
    runs = []
    for path, folders, files in os.walk(folder):
        if FORMAT_FILE in files:
            runs.append(Path(path))
            folders.clear()  # a run directory holds no other run
    if not runs:
        raise ConfigError(f"{folder} holds no run at any depth (no file {FORMAT_FILE})")
    return sorted(runs)
