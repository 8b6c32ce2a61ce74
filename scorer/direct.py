"""The scorer's loop in direct mode: whole answers in, verdicts out. There is no target, no engine, no torch in this process.

    broker ── ScoreTask ──▶ decode ──▶ verifier children ──▶ Scores ──▶ broker

An answer that the length limit cut is not verified, unless `scorer.truncated` asks for it: its reward is 0, its finish
`length`, and nothing is extracted from it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from prefixrl.common.config import RunConfig
from prefixrl.common.link import Link
from prefixrl.common.messages import (
    Done,
    FromBroker,
    ModelDigests,
    Ready,
    Row,
    ScoreTask,
    Welcome,
)
from prefixrl.common.packing import token_ids
from prefixrl.scorer.decoder import Decoder
from prefixrl.scorer.judging import Answered, Judging
from prefixrl.scorer.verifier_pool import VerifierPool

IDLE_S = 0.05
POLL_S = 0.005


@dataclass
class BusySlots:
    """Slot-seconds at work. A task that was prefetched waits for a slot: it makes none busier."""

    slots: int
    noted_s: float
    """Monotonic time of the last note."""
    at_work: int = 0
    """Slots at work since then."""
    total_s: float = 0.0

    def note(self, open_tasks: int, now_s: float) -> None:
        """So many tasks are open from now on."""
        self.total_s += self.at_work * (now_s - self.noted_s)
        self.noted_s, self.at_work = now_s, min(open_tasks, self.slots)


class DirectScorer:
    """A tokenizer and a verifier."""

    def __init__(
        self,
        config: RunConfig,
        link: Link,
        decoder: Decoder,
        verifier: VerifierPool,
        digests: ModelDigests,
    ) -> None:
        self._slots = config.scorer.verifier_children
        self._busy = BusySlots(self._slots, time.monotonic())
        self._link = link
        self._decoder = decoder
        self._digests = digests
        section = config.scorer
        assert section.truncated != "extend", "refused with the config"
        cut = section.truncated or "zero"
        self._judging = Judging(link, verifier, section.keep_completions, cut)

    def say_ready(self) -> None:
        """Tell the broker what is loaded; tasks of an earlier acquaintance are delivered as usual."""
        self._link.send(Ready(self._slots, self._digests, -1, "", "verifier"))

    def run(self, stopping: Callable[[], bool]) -> str:
        """Work until the run is over or the process is asked to stop; returns why it ended."""
        while not stopping():
            message = self._link.receive(POLL_S if self._judging.open else IDLE_S)
            while message is not None:
                if isinstance(message, Done):
                    return message.reason
                self._handle(message)
                message = self._link.receive(0.0)
            self._judging.collect()
            self._report()
        return "asked to stop"

    def _handle(self, message: FromBroker) -> None:
        match message:
            case ScoreTask():
                self._start(message)
            case Welcome():
                self.say_ready()
            case _:
                pass  # a Revoke comes too late: a task starts when it arrives

    def _start(self, task: ScoreTask) -> None:
        self._judging.begin(task)
        for index, row in enumerate(row for group in task.groups for row in group.rows):
            self._judging.take(Answered(task.task, index, self._text(row), row.finish, 0))

    def _text(self, row: Row) -> str:
        ids = token_ids(row.tokens)
        return self._decoder.text(ids[:-1] if row.finish == "eos" else ids)

    def _report(self) -> None:
        judging, vitals = self._judging, self._link.vitals
        vitals.progress = judging.verified
        self._busy.note(len(judging.open), time.monotonic())
        vitals.busy_slot_s = self._busy.total_s
        vitals.leases = tuple(judging.open)
        vitals.state = f"verifying {judging.pending}" if judging.pending else "waiting"
