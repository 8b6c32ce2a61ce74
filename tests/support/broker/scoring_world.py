"""A scorer's surroundings, without a model or a broker: an engine that writes given texts, a link with tasks."""

from typing import Any

import numpy as np

from prefixrl.common.engines.interface.base import Continuation, Job, JobResult, TokenIds
from prefixrl.common.prompts.rendering import ByteRenderer
from prefixrl.common.wire.messages.groups import ScoredGroup, TaskKind
from prefixrl.common.wire.messages.learner import FromBroker, ToBroker
from prefixrl.common.wire.messages.worker import Done, Refused, RowsLeft, Scores, ScoreTask
from prefixrl.common.wire.packing import check_prefixes, check_verdicts
from prefixrl.common.worker.link import Vitals

STOP = 0


def check_scores(
    group: ScoredGroup, rows_per_group: int, continuations: int = 1, kind: TaskKind = "train"
) -> None:
    if group.version >= 0:  # a fixed prefix comes from the broker itself, and may be empty
        check_prefixes(group.prefixes, rows_per_group)
    check_verdicts(group, continuations, kind)


class WritingEngine:
    """Goes on with each row's text where the row stands, and cuts it at the job's limit."""

    name, about, waits_for, usage = "writing", "", "", None
    seats, room, takes_runs = 1, 1, True
    progress, tokens, busy_row_s, waiting_rows = 0, 0, 0.0, 0

    def __init__(self, texts: list[str], prompt_bytes: int) -> None:
        self.texts, self.prompt_bytes = texts, prompt_bytes
        self.jobs: list[Job] = []
        self._open: list[Job] = []
        self._cut: list[int] = []

    def submit(self, job: Job) -> None:
        self.jobs.append(job)
        self._open.append(job)

    def cancel(self, key: str) -> bool:
        return False

    def rows_left(self, key: str) -> int:
        return sum(len(job.rows) for job in self._open if job.key == key)

    def step(self, timeout_s: float) -> list[JobResult]:
        jobs, self._open = self._open, []
        return [JobResult(job.key, tuple(self._rows(job)), 0.1) for job in jobs]

    def _rows(self, job: Job) -> list[Continuation]:
        texts = self.texts if not job.key.endswith("+") else [self.texts[i] for i in self._cut]
        continuations = []
        for row, text in zip(job.rows, texts, strict=True):
            ids = np.append(ByteRenderer().encode(text), STOP).astype(np.int32)
            tokens = ids[row.size - self.prompt_bytes :][: job.sampling.max_new_tokens]
            finish: Any = "eos" if tokens[-1] == STOP else "length"
            continuations.append(Continuation(tokens, np.zeros(0, dtype=np.float32), finish, ()))
        self._cut = [
            index
            for index, continuation in enumerate(continuations)
            if continuation.finish == "length"
        ]
        return continuations


class ConstantEngine(WritingEngine):
    """Writes the same answer to every row."""

    def __init__(self, answer: TokenIds) -> None:
        super().__init__([], 0)
        self._answer = answer

    def _rows(self, job: Job) -> list[Continuation]:
        no_logprobs = np.zeros(0, dtype=np.float32)
        return [Continuation(self._answer, no_logprobs, "length", ()) for _ in job.rows]


class Tasks:
    """A link with messages on it, and Done once every task is answered."""

    name = "scorer-0"

    def __init__(self, *messages: FromBroker, one_by_one: bool = False) -> None:
        self.vitals, self._messages, self._one_by_one = Vitals(), list(messages), one_by_one
        self.sent: list[ToBroker] = []
        self._due = 0

    def send(self, message: ToBroker) -> None:
        if not isinstance(message, RowsLeft):  # said on the way to a result
            self.sent.append(message)

    def receive(self, timeout_s: float) -> FromBroker | None:
        answered = sum(isinstance(message, Scores | Refused) for message in self.sent)
        if self._messages and (answered == self._due or not self._one_by_one):
            self._due += isinstance(self._messages[0], ScoreTask)
            return self._messages.pop(0)
        return Done("the run is over") if answered == self._due else None
