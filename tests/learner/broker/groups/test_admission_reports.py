"""Reports to admission: times at rollouts and scorers, waits of the learner, the worth of old samples."""

import logging
import math
from pathlib import Path

import pytest

from prefixrl.common.wire.messages.learner import Batch, GetBatch, IterationDone
from prefixrl.common.wire.messages.worker import PrefixTask, ScoreTask
from prefixrl.learner.broker.batches import BatchAnswers
from prefixrl.learner.broker.groups.admission import Supply
from prefixrl.learner.broker.workers.identity import Start
from prefixrl.learner.broker.workers.workers import Phase, Worker
from support.broker.dispatch_desk import Desk
from support.fakes import run_on_disk, sampled, scored

PEER = b"rank"


class Run:
    """A dispatcher, a desk for batches and one worker of each role; the clock stands unless told."""

    def __init__(self, folder: Path, staleness: int = 2) -> None:
        keys = {"admission": "just_in_time", "max_staleness": staleness}
        self.desk = Desk(run_on_disk(folder, algorithm=keys))
        self.batches = BatchAnswers(
            self.desk.config, self.desk.dispatcher, 40, Start(0, "tcp://127.0.0.1:9")
        )
        self.admission = self.desk.ledger.admission
        self.rollout, self.scorer = (
            self.desk.worker("rollout", slots=2),
            self.desk.worker("scorer", slots=2),
        )
        self.scores: list[ScoreTask] = []

    def look(self, now_s: float) -> bool:
        """Return True if the rank that waits has its batch."""
        answer = self.batches.answers(now_s).get(PEER)
        return answer is not None and isinstance(answer[0], Batch)

    def ask(self, iteration: int, now_s: float) -> bool:
        self.batches.take_request(PEER, GetBatch(iteration, 0, 1), now_s)
        return self.look(now_s)

    def work(self, items: int) -> None:
        """Sample what may be sampled, and let so many items be judged."""
        self.desk.dispatch()
        for task in self.desk.tasks(self.rollout, PrefixTask):
            self.desk.dispatcher.take_prefixes(self.rollout, sampled(task), 0.0)
        self.desk.dispatch()
        self.scores += self.desk.tasks(self.scorer, ScoreTask)
        for _ in range(items):
            self.desk.dispatcher.take_scores(self.scorer, scored(self.scores.pop(0)), 0.0)

    def done(self, iteration: int, now_s: float, old_ess: float | None = None) -> None:
        self.batches.iteration_done(IterationDone(iteration, iteration + 1, old_ess), now_s)


def test_a_wait_for_numbers_is_measured_from_the_request_to_the_last_group(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.work(2)
    assert run.ask(0, 100.0)
    run.done(0, 101.0)
    assert run.admission.lead == 4, "before the first iteration workers load"
    run.rollout.version = 1
    run.work(1)
    assert not run.ask(1, 101.5)
    assert not run.look(101.75)
    run.work(1)
    assert run.look(102.0)
    run.work(0)
    run.done(1, 103.0)
    assert run.admission.waited_s == 0.5
    assert run.admission.lead == 4 + math.ceil(run.desk.ledger.states()["scoring"] * 2.0 / 1.5) > 4


def test_a_report_that_comes_twice_counts_once(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.work(2)
    assert run.ask(0, 100.0)
    run.done(0, 101.0)
    before = run.admission.cap
    run.done(0, 102.0, 0.1)
    assert run.admission.cap == before


def test_the_log_tells_when_the_cap_tightens_and_when_it_is_wide_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path, staleness=1)
    with caplog.at_level(logging.INFO, "prefixrl.learner.broker.batches"):
        for iteration, old_ess in enumerate((0.3, 0.3, 0.9)):
            run.rollout.version = iteration
            run.work(0)
            while run.scores:
                run.work(1)
            assert run.ask(iteration, 100.0 + iteration)
            run.done(iteration, 100.5 + iteration, old_ess)
    (warning,) = caplog.records
    assert warning.levelno == logging.WARNING
    assert "0.30 of a fresh one, less than algorithm.min_ess" in warning.getMessage()
    run.admission.cap = run.admission.widest - 0.1
    with caplog.at_level(logging.INFO, "prefixrl.learner.broker.batches"):
        run.rollout.version = 3
        run.work(0)
        while run.scores:
            run.work(1)
        assert run.ask(3, 110.0)
        run.done(3, 111.0, None)
    assert [each.levelno for each in caplog.records] == [logging.WARNING, logging.INFO]


def test_the_times_of_items_and_the_slots_of_workers_are_known(tmp_path: Path) -> None:
    run = Run(tmp_path)
    other: Worker = run.desk.worker("scorer", slots=3)
    run.work(1)
    assert run.admission.times.sampling_s == 0.5
    assert run.admission.supply == Supply(rollouts=1, scoring_slots=5)
    other.phase = run.rollout.phase = Phase.LOADING
    run.desk.dispatch()
    assert run.admission.supply == Supply(rollouts=0, scoring_slots=2)
