"""The watchdog of a launch: it names the process that holds the run up. Pure.

    check ─▶ a process that a signal stopped | a broker that does not answer | no event for launch.stall_s ─▶ a sentence

An event is a result of a worker, a trained iteration or a published version. A finding is reported once, again
each time that it has lasted twice as long, and when it is over.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from prefixrl.common.run.status import StatusDocument

AWAY_S = 60.0
"""A longer time between two checks: the whole job was suspended, and what did not happen meanwhile is no stall."""
NOTICED_S = 10.0
"""A stopped process or a silent broker of a shorter time is no news."""


@dataclass(frozen=True)
class Watched:
    """A process on this machine; `is_stopped`: by a signal, as SIGSTOP."""

    name: str
    pid: int
    is_stopped: bool

    @property
    def label(self) -> str:
        """Name and process."""
        return f"{self.name} (pid {self.pid})"


@dataclass
class _Finding:
    since_s: float
    told_s: float = 0.0
    """Age of the finding when it was last reported; 0 before the first report."""


BROKER, RUN = "broker", "the run"


@dataclass
class Watchdog:
    """Findings that last, by what they are about."""

    stall_s: float
    stall: str = ""
    """The present stall in words, "" while the run goes on."""
    _findings: dict[str, _Finding] = field(default_factory=dict)
    _checked_s: float = math.inf
    _back_s: float = -math.inf
    """Time since which it checks without a pause."""
    _broker_pid: int = 0
    _answered_s: float | None = None
    """Time of the last answer of this broker. None before its first answer."""

    def check(
        self, now_s: float, document: StatusDocument | None, processes: Sequence[Watched]
    ) -> list[str]:
        """Return the lines to print, by a steady clock, the broker's document (None: no answer) and local processes."""
        faults = {
            each.label: f"was stopped by a signal; `kill -CONT {each.pid}` lets it go on, {{}} so far"
            for each in processes
            if each.is_stopped
        }
        since_s = dict.fromkeys(faults, now_s)
        broker = next((each for each in processes if each.name == BROKER), None)
        silent_since_s = self._silent_since_s(now_s, document is not None, broker)
        if broker and silent_since_s is not None:
            faults.setdefault(broker.label, "has not answered for {}; without it nothing goes on")
            since_s.setdefault(broker.label, silent_since_s)
        # After a pause of this process, or of the whole host, idle times count from its return.
        if now_s - self._checked_s > AWAY_S:
            self._back_s = now_s
        self._checked_s = now_s
        self.stall = ""
        idle_s = 0.0
        if document is not None and _works(document):
            idle_s = min(document.idle_s, now_s - self._back_s)
        if document is not None and idle_s >= self.stall_s:
            self.stall = stall_of(document)
            faults[RUN] = f"makes {self.stall}"
            since_s[RUN] = now_s - idle_s
        # Without the broker's document its silence takes the place of an idle time.
        elif broker and broker.label in faults and self._answered_s is not None:
            silent_s = now_s - max(self._answered_s, self._back_s)
            if silent_s >= self.stall_s:
                self.stall = f"the {broker.label} has not answered for {silent_s:.0f} s"
        return [*self._over(faults, now_s), *self._lasting(faults, since_s, now_s)]

    def _silent_since_s(self, now_s: float, answers: bool, broker: Watched | None) -> float | None:
        """Return the time of the last answer of a broker that does not answer now; None if it never answered."""
        if broker and (answers or broker.pid != self._broker_pid):
            self._broker_pid = broker.pid
            self._answered_s = now_s if answers else None
        return None if answers else self._answered_s

    def _over(self, faults: Mapping[str, str], now_s: float) -> list[str]:
        ended = [name for name in self._findings if name not in faults]
        over = {name: self._findings.pop(name) for name in ended}
        return [
            f"{name} goes on after {now_s - finding.since_s:.0f} s"
            for name, finding in over.items()
            if finding.told_s
        ]

    def _lasting(
        self, faults: Mapping[str, str], since_s: Mapping[str, float], now_s: float
    ) -> list[str]:
        sentences = []
        for name, sentence in faults.items():
            finding = self._findings.setdefault(name, _Finding(since_s[name]))
            age_s = now_s - finding.since_s
            if age_s >= max(NOTICED_S, 2 * finding.told_s):
                finding.told_s = age_s
                sentences.append(f"STALL {name} {sentence.replace('{}', f'{age_s:.0f} s')}")
        return sentences


def _works(document: StatusDocument) -> bool:
    """Return False while models are loaded, when all is judged, and if nothing is trained."""
    is_loading = document.learner_phase == "loading" or any(
        each.phase == "loading" for each in document.workers
    )
    judged = document.evaluations
    is_judged = judged.get("asked", 0) <= judged.get("judged", 0) + judged.get("failed", 0)
    # Only an upload of the last checkpoint may go on then, and it has a deadline of its own.
    is_over = document.learner_phase == "ending" and is_judged
    return bool(document.total_iterations) and not is_loading and not is_over


def stall_of(document: StatusDocument) -> str:
    """Return in words that nothing happens, what is waited for, and what happened last."""
    match document.learner_phase:
        case "waiting":
            cause = f"the learner is waiting for {document.waiting_for}"
        case "":
            cause = "no learner has asked for a batch yet"
        case phase:
            cause = f"the learner is {phase}"
    waiting = [each for each in document.workers if each.activity == "waiting"]
    cause += f", {waiting[0].name} is {waiting[0].state}" if waiting else ""
    last = document.last_event or "none since the broker started"
    return f"no progress for {document.idle_s:.0f} s: {cause}; the last event: {last}"
