"""The scorer of direct mode: whole answers in, verdicts out; no target, engine or torch.

    broker ── ScoreTask ──▶ decode ──▶ verifier children ──▶ Scores ──▶ broker

An answer that the length limit cut is not verified unless `scorer.truncated` asks for it, or the
user's function takes `finish`: its reward is 0, its finish `length`, and nothing is extracted from it.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import DataError
from prefixrl.common.prompts.rendering import pieces_of
from prefixrl.common.wire.messages.fields import MOST_ROWS
from prefixrl.common.wire.messages.worker import ModelDigests, Ready, ScoreTask
from prefixrl.common.wire.packing import token_ids
from prefixrl.common.worker.link import Link
from prefixrl.scorer.judging import Answered, Judging, ProcessReward, ScorerLoop
from prefixrl.scorer.process.step_scoring import StepScoring
from prefixrl.scorer.verifier.pool_thread import JudgeThread

TEXTS_PER_CHILD = 16
"""Texts to hold per child of the verifier: most are judged in a millisecond, and new ones are a round trip away."""


class Decoder:
    """The tokenizer of a model folder, from `tokenizer.json` alone: fast, and without torch."""

    def __init__(self, model: str) -> None:
        """Read the tokenizer; raises DataError when it cannot be read."""
        path = Path(model) / "tokenizer.json"
        try:
            self._tokenizer: Tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library's errors have no class of their own
            raise DataError(
                f"no tokenizer of {model} can be read: {error}; direct mode needs a tokenizer.json there "
                "(AutoTokenizer.from_pretrained(...).save_pretrained(...) writes one)"
            ) from error

    def text(self, ids: NDArray[np.int32]) -> str:
        """Decode an answer, special tokens left out."""
        return str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=True))

    def pieces(self, ids: NDArray[np.int32]) -> list[str]:
        """Return the text that each token adds to an answer."""
        return pieces_of(self._tokenizer, ids)


@dataclass
class BusySeats:
    """Row-seconds at work; a text that waits for a child of the verifier has no seat."""

    seats: int
    counted_s: float
    """Monotonic time of the last count."""
    at_work: int = 0
    """Seats at work since then."""
    total_s: float = 0.0

    def count_busy(self, unjudged: int, now_s: float) -> None:
        """Add the time since the last count; from now on `unjudged` texts have no verdict."""
        self.total_s += self.at_work * (now_s - self.counted_s)
        self.counted_s = now_s
        self.at_work = min(unjudged, self.seats)


class DirectScorer(ScorerLoop):
    """A tokenizer and a verifier."""

    def __init__(
        self,
        config: RunConfig,
        link: Link,
        decoder: Decoder,
        verifier: JudgeThread,
        digests: ModelDigests,
        scoring: StepScoring | None = None,
    ) -> None:
        assert config.scorer.truncated != "extend", "refused with the config"
        judging = Judging(
            link,
            verifier,
            config,
            ProcessReward(scoring, decoder.pieces) if scoring else None,
        )
        seats = config.verifier_children(len(os.sched_getaffinity(0)))
        ready = Ready(
            seats=seats,
            room=min(MOST_ROWS, seats * TEXTS_PER_CHILD),
            takes_runs=False,
            digests=digests,
            version=-1,
            weights_digest="",
            engine="verifier",
        )
        super().__init__(link, judging, ready)
        self._busy = BusySeats(seats, time.monotonic())
        self._decoder = decoder

    def _start(self, task: ScoreTask) -> None:
        self._begin(task)
        for index, row in enumerate(row for group in task.groups for row in group.rows):
            sampled = token_ids(row.tokens)
            ids = sampled[:-1] if row.finish == "eos" else sampled
            self._judging.take_text(
                Answered(
                    task=task.task,
                    text_index=index,
                    text=self._decoder.text(ids),
                    finish=row.finish,
                    completion_tokens=0,
                    written_tokens=int(sampled.size),
                    tokens=ids,
                )
            )

    def _unended(self) -> dict[str, int]:
        return self._judging.unjudged

    def _take_back(self, task: str) -> bool:
        return False  # too late: a task starts when it arrives

    def _step(self) -> None:
        judging = self._judging
        vitals = self._link.vitals
        judging.collect()
        vitals.progress = judging.verified
        unjudged = sum(judging.unjudged.values())
        self._busy.count_busy(unjudged, time.monotonic())
        vitals.busy_row_s = self._busy.total_s
        vitals.waiting_rows = max(0, unjudged - self._busy.seats)
        vitals.activity = judging.activity
        vitals.state = judging.state or "waiting"
