"""A real broker process that is killed, and the end of a run."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from prefixrl.common.config.run import RunConfig
from prefixrl.common.journal import journal
from prefixrl.common.journal.history import history
from prefixrl.common.journal.records import SegmentStart
from prefixrl.common.wire.messages import learner as messages
from prefixrl.common.wire.messages.groups import Sampling
from prefixrl.common.wire.messages.weights import WeightsNote
from prefixrl.common.wire.messages.worker import Ack, Heartbeat, PrefixTask, ScoreTask, Unknown
from prefixrl.deploy.runs.inspect import newest_groups, trained_groups
from prefixrl.learner.broker.server import Broker
from support import fakes
from support.messages import evaluate

SAMPLING = Sampling(temperature=0.0, max_new_tokens=4)
V1 = WeightsNote(1, "d1", fakes.NOTE.probe_tokens, fakes.NOTE.probe_logprobs)


Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start(config: RunConfig) -> Iterator[Start]:
    """Starts a broker process at an iteration and waits for its socket; none is left afterwards."""
    children: list[subprocess.Popen[bytes]] = []
    endpoint = Path(config.directory) / "endpoint"

    def started(iteration: int, is_restart: bool = False) -> "subprocess.Popen[bytes]":
        before = endpoint.stat().st_mtime_ns if endpoint.exists() else 0
        children.append(fakes.broker_process(config, iteration, is_restart=is_restart))
        fakes.wait_until(
            lambda: endpoint.exists() and endpoint.stat().st_mtime_ns > before, "a socket"
        )
        return children[-1]

    yield started
    for child in children:
        fakes.end(child)


def trained_on(batch: messages.Batch) -> list[object]:
    """Everything of a batch but how long its groups waited, which is known only to the broker that saw it."""
    groups = [(each.seq, each.version, each.lengths, each.rewards) for each in batch.groups]
    return [batch.iteration, batch.seed, groups]


def test_the_counters_of_a_killed_broker_are_equal_after_its_restart(
    config: RunConfig, start: Start
) -> None:
    child = start(0)
    endpoint = fakes.endpoint_of(config)
    with fakes.peers(endpoint, "rank", "r", "s") as (rank, rollout, scorer):
        fakes.learner(rank)
        rollout.ready(config, "rollout")
        scorer.ready(config, "scorer")
        for _ in range(6):
            fakes.score_one_item(rollout, scorer)
        trained = fakes.train(rank, 0)
        rank.say(messages.IterationDone(0, 1))
        rank.hear(messages.Accepted)
        recorded = fakes.train(rank, 1)
        before = fakes.status(rank)
        fakes.end(child)
        start(1)
        assert fakes.endpoint_of(config) == endpoint, "workers know one address"
        rank.join("rank")
        after = fakes.status(rank)
        for part in ("run_id", "iteration", "groups", "causes", "queues", "age_histogram"):
            assert after[part] == before[part], part
        assert after["journal_bytes"] == before["journal_bytes"]
        again = fakes.train(rank, 1)
        assert trained_on(again) == trained_on(recorded), "same groups, same order, same seed"
        assert not {g.seq for g in again.groups} & {g.seq for g in trained.groups}
        rollout.say(Heartbeat(progress=0, busy_row_s=0.0, leases=(), state=""))
        rollout.hear(Unknown)


def test_a_broker_that_begins_at_a_segment_of_the_journal_knows_all_that_came_before(
    config: RunConfig, start: Start
) -> None:
    folder = Path(config.directory) / journal.FOLDER

    def with_short_segments(broker: Broker) -> None:
        broker.journal.close()
        broker.journal = journal.Journal(folder, segment_bytes=1)

    with (
        fakes.serving(config, with_short_segments),
        fakes.peers(fakes.endpoint_of(config), "rank", "r", "s") as (rank, rollout, scorer),
    ):
        fakes.learner(rank)
        rollout.ready(config, "rollout")
        scorer.ready(config, "scorer")
        for _ in range(6):
            fakes.score_one_item(rollout, scorer)
        fakes.train(rank, 0)
        rank.say(messages.IterationDone(0, 1))
        rank.hear(messages.Accepted)
        recorded = fakes.train(rank, 1)
        before = fakes.status(rank)
    starts = [each for each in journal.read(folder) if isinstance(each, SegmentStart)]
    assert starts and starts[-1].newest == fakes.NOTE
    assert history(journal.read(folder), config.algorithm.max_staleness).faults == []
    directory = folder.parent
    whole, later = list(trained_groups(directory)), list(trained_groups(directory, 1))
    assert (
        later == [each for each in whole if each.version_trained >= 1] == newest_groups(directory)
    )
    assert 0 < len(later) < len(whole)
    for number in range(len(starts)):
        (folder / f"{number:06d}.msgpack.zst").unlink(missing_ok=True)
        (folder / f"{number:06d}.msgpack").unlink(missing_ok=True)
    assert list(trained_groups(directory, 1)) == later, "one segment tells of them"
    start(1)
    with fakes.peers(fakes.endpoint_of(config), "rank") as (rank,):
        fakes.learner(rank)
        after = fakes.status(rank)
        for part in ("run_id", "iteration", "groups", "causes", "queues", "age_histogram"):
            assert after[part] == before[part], part
        assert trained_on(fakes.train(rank, 1)) == trained_on(recorded)


def test_what_was_under_way_when_the_broker_was_killed_is_delivered_or_sampled_again(
    config: RunConfig, start: Start
) -> None:
    child = start(0)
    with fakes.peers(fakes.endpoint_of(config), "rank", "r", "s") as (rank, rollout, scorer):
        fakes.learner(rank)
        rollout.ready(config, "rollout", slots=2)
        first, second = rollout.hear(PrefixTask), rollout.hear(PrefixTask)
        rollout.say(fakes.sampled(first))
        rollout.hear(Ack)
        scorer.ready(config, "scorer")
        score = scorer.hear(ScoreTask)
        fakes.end(child)
        start(0)
        # The scorer still holds its prefixes and delivers them under a task name nobody knows any more.
        scorer.ready(config, "scorer")
        scorer.say(fakes.scored(score))
        scorer.hear(Ack)
        rollout.ready(config, "rollout", slots=2)
        tasks = [rollout.hear(PrefixTask) for _ in range(2)]
        seeds = {group.seq: group.seed for task in tasks for group in task.groups}
        for group in second.groups:
            assert seeds[group.seq] == group.seed, "sampled again with the same seed"
        rank.join("rank")
        groups = fakes.status(rank)["groups"]
        assert groups["expired"] == groups["failed"] == 0
        assert fakes.status(rank)["queues"]["scored"] == len(score.groups)


@pytest.mark.parametrize(
    "message",
    [messages.IterationDone(0, 1), evaluate("x", -1, prefix_tokens=b"abc")],
    ids=["an iteration nobody was given", "ragged token ids"],
)
def test_a_report_that_cannot_be_true_does_not_end_the_broker(
    message: Any, config: RunConfig, start: Start
) -> None:
    start(0)
    with fakes.peers(fakes.endpoint_of(config), "rank") as (rank,):
        rank.join("rank")
        rank.say(message)
        rank.say(messages.GetStatus())
        rank.hear(messages.Status, timeout_s=1.0)


def test_a_run_that_is_over_answers_run_over(tmp_path: Path) -> None:
    config = fakes.run_on_disk(
        tmp_path, algorithm={"iterations": 1, "groups_per_iteration": 2, "max_staleness": 0}
    )
    with (
        fakes.serving(config),
        fakes.peers(fakes.endpoint_of(config), "rank", "r", "s") as (rank, rollout, scorer),
    ):
        fakes.learner(rank)
        rollout.ready(config, "rollout")
        scorer.ready(config, "scorer")
        fakes.score_one_item(rollout, scorer)
        fakes.train(rank, 0)
        rank.say(messages.IterationDone(0, 1))
        rank.hear(messages.Accepted)
        rank.say(messages.GetBatch(1, 0, 1))
        assert rank.hear(messages.RunOver).iterations == 1
        assert fakes.status(rank)["groups"]["outstanding"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(("is_restart", "answer"), [(False, messages.Halt), (True, messages.Batch)])
def test_a_recorded_iteration_is_held_by_ranks_only_where_a_broker_died_under_them(
    is_restart: bool, answer: type[Any], config: RunConfig, start: Start
) -> None:
    """Ranks that were started with the broker halt at once, however far the journal reaches."""
    child = start(0)
    with fakes.peers(fakes.endpoint_of(config), "rank", "r", "s") as (rank, rollout, scorer):
        fakes.learner(rank)
        rollout.ready(config, "rollout")
        scorer.ready(config, "scorer")
        for _ in range(2):
            fakes.score_one_item(rollout, scorer)
        fakes.train(rank, 0)
        fakes.end(child)
        start(0, is_restart)
        rank.join("rank")
        rank.say(messages.GetBatch(0, 0, 1, is_stopping=True))
        assert rank.hear(answer).iteration == 0
