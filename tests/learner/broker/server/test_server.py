"""A whole broker behind its socket, talked to by real clients."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prefixrl.common.config.run import RunConfig
from prefixrl.common.journal import journal as journals
from prefixrl.common.journal.journal import Journal
from prefixrl.common.journal.records import GroupScored, JournalRecord
from prefixrl.common.run.digests import model_digests, scorer_digests
from prefixrl.common.wire.messages import learner as rank_messages
from prefixrl.common.wire.messages import worker as worker_messages
from prefixrl.common.wire.messages.protocol import PROTOCOL
from prefixrl.common.wire.messages.weights import WeightsNote
from prefixrl.learner.broker import batches
from prefixrl.learner.broker.server import Broker
from support import fakes


def test_another_protocol_is_rejected_with_both_numbers(config: RunConfig, broker: Broker) -> None:
    with fakes.peers(fakes.endpoint_of(config), "old", "new") as (old, new):
        old.say(
            worker_messages.Hello(
                protocol=PROTOCOL + 1, role="scorer", incarnation="i", host="node7", pid=1
            )
        )
        reason = old.hear(worker_messages.Reject).reason
        assert f"protocol {PROTOCOL}" in reason
        assert f"scorer on node7 speaks {PROTOCOL + 1}" in reason
        assert new.join("scorer").worker == "scorer-0", "who was rejected is not enrolled"


def test_the_welcome_carries_the_run_its_config_and_the_weight_server(
    config: RunConfig, broker: Broker
) -> None:
    with fakes.peers(fakes.endpoint_of(config), "one") as (one,):
        welcome = one.join("rollout")
    assert RunConfig.model_validate_json(welcome.config_json) == config
    assert (welcome.protocol, welcome.run_id) == (PROTOCOL, broker.run.header.run_id)
    assert welcome.weights_endpoint == broker.run.start.weights_endpoint


@pytest.mark.parametrize("part", ["model", "tokenizer", "chat_template"])
@pytest.mark.parametrize("role", ["rollout", "scorer"])
def test_a_worker_that_loaded_something_else_is_refused_by_name(
    role: Any, part: str, config: RunConfig, broker: Broker
) -> None:
    right = model_digests(config.model_of(role))
    wrong = msgspec.structs.replace(right, **{part: "another"})
    what = {"rollout": "adapter", "scorer": "target"}[role]
    with fakes.peers(fakes.endpoint_of(config), "wrong", "right") as (bad, good):
        bad.join(role)
        bad.say(fakes.ready(config, role, digests=wrong))
        reason = bad.hear(worker_messages.Reject).reason
        assert f"another {what}: digest of its {part.replace('_', ' ')} is another" in reason
        good.ready(config, role)
        good.say(worker_messages.Heartbeat(progress=0, busy_row_s=0.0, leases=(), state=""))
        good.hear(worker_messages.Beat)
        assert [worker["name"] for worker in fakes.status(fakes.learner(good))["workers"]] == [
            f"{role}-1"
        ]


def test_a_scorer_with_another_reward_function_is_refused_with_the_remedy(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("def score(question, answer, gold): return 1.0")
    config = fakes.run_on_disk(tmp_path, reward={"function": f"{mine}:score"})
    right = scorer_digests(config, config.model_of("scorer"))
    assert right.reward_function
    wrongs = [msgspec.structs.replace(right, reward_function=digest) for digest in ("another", "")]
    with (
        fakes.serving(config),
        fakes.peers(fakes.endpoint_of(config), "a", "b", "right") as (*bad, good),
    ):
        for peer, wrong in zip(bad, wrongs, strict=True):
            peer.join("scorer")
            peer.say(fakes.ready(config, "scorer", digests=wrong))
            reason = peer.hear(worker_messages.Reject).reason
            assert f"digest of its file is {wrong.reward_function or 'missing'}" in reason
            assert f"copy the learner's {mine}:score to its host" in reason
        good.join("scorer")
        good.say(fakes.ready(config, "scorer", digests=right))
        good.say(worker_messages.Heartbeat(progress=0, busy_row_s=0.0, leases=(), state=""))
        good.hear(worker_messages.Beat)


def test_in_direct_mode_a_scorer_with_another_tokenizer_is_refused_and_its_model_does_not_count(
    tmp_path: Path,
) -> None:
    config = fakes.run_on_disk(tmp_path, mode="direct")
    right = scorer_digests(config, config.model_of("scorer"))
    assert right.model == ""
    wrong = msgspec.structs.replace(right, tokenizer="another")
    with (
        fakes.serving(config),
        fakes.peers(fakes.endpoint_of(config), "bad", "good") as (bad, good),
    ):
        bad.join("scorer")
        bad.say(fakes.ready(config, "scorer", digests=wrong))
        expected = "loaded another adapter's tokenizer: digest of its tokenizer is another"
        assert expected in bad.hear(worker_messages.Reject).reason
        good.join("scorer")
        good.say(fakes.ready(config, "scorer", digests=right))
        good.say(worker_messages.Heartbeat(progress=0, busy_row_s=0.0, leases=(), state=""))
        good.hear(worker_messages.Beat)


def test_the_batch_and_the_status_report_how_many_rows_a_limit_cut(
    config: RunConfig, broker: Broker
) -> None:
    with fakes.peers(fakes.endpoint_of(config), "rank", "rollout", "scorer") as (
        rank,
        rollout,
        scorer,
    ):
        fakes.learner(rank)
        rollout.ready(config, "rollout")
        scorer.ready(config, "scorer")
        for _ in range(2):
            task = rollout.hear(worker_messages.PrefixTask)
            rollout.say(fakes.sampled(task))
            score = scorer.hear(worker_messages.ScoreTask)
            groups = tuple(
                msgspec.structs.replace(group, verdicts=(cut, *group.verdicts[1:]))
                for group in fakes.scored(score).groups
                for cut in [msgspec.structs.replace(group.verdicts[0], reward=0.0, finish="length")]
            )
            scorer.say(worker_messages.Scores(score.task, score.kind, groups))
            scorer.hear(worker_messages.Ack)
        batch = fakes.train(rank, 0)
        assert [group.truncated for group in batch.groups] == [1] * 4
        assert fakes.status(rank)["truncated_fraction"] == 1 / fakes.ROWS


def test_weights_that_were_never_published_are_refused(config: RunConfig, broker: Broker) -> None:
    with fakes.peers(fakes.endpoint_of(config), "rank", "rollout") as (rank, rollout):
        fakes.learner(rank)
        rollout.join("rollout")
        rollout.say(fakes.ready(config, "rollout", version=7))
        assert (
            "weights d7 were never published as version 7"
            in rollout.hear(worker_messages.Reject).reason
        )


def test_a_rollout_with_another_initial_adapter_is_refused_when_the_learner_publishes(
    config: RunConfig, broker: Broker
) -> None:
    with fakes.peers(fakes.endpoint_of(config), "rank", "rollout") as (rank, rollout):
        rollout.ready(config, "rollout")
        rollout.hear(worker_messages.PrefixTask)
        rank.join("rank")
        rank.say(
            rank_messages.Published(
                WeightsNote(0, "other", fakes.NOTE.probe_tokens, fakes.NOTE.probe_logprobs)
            )
        )
        reason = rollout.hear(worker_messages.Reject).reason
        assert "its initial adapter has digest d0, the learner's other" in reason


def test_malformed_messages_are_counted_and_the_broker_lives(
    config: RunConfig, broker: Broker
) -> None:
    junk = [b"", b"\xc1", b"\x91" * 5000, msgspec.msgpack.encode({"type": "Hello", "x": 1})]
    with fakes.peers(fakes.endpoint_of(config), "bad", "good") as (bad, good):
        for data in junk:
            bad.say(worker_messages.Heartbeat(progress=0, busy_row_s=0.0, leases=(), state=""))
            bad.client._socket.send_multipart([data])  # what no encoder would make
        good.join("operator")
        fakes.wait_until(lambda: fakes.status(good)["malformed_messages"] == len(junk), "the count")


def test_a_worker_may_not_send_what_its_role_does_not_make(
    config: RunConfig, broker: Broker
) -> None:
    with fakes.peers(fakes.endpoint_of(config), "rollout", "scorer") as (rollout, scorer):
        rollout.ready(config, "rollout")
        task = rollout.hear(worker_messages.PrefixTask)
        scorer.ready(config, "scorer")
        scorer.say(fakes.sampled(task))
        assert "a scorer may not send Prefixes" in scorer.hear(worker_messages.Reject).reason


def test_an_unknown_peer_gets_unknown_and_no_message_of_it_counts(
    config: RunConfig, broker: Broker
) -> None:
    with fakes.peers(fakes.endpoint_of(config), "stranger") as (stranger,):
        for message in (
            worker_messages.Heartbeat(progress=0, busy_row_s=0.0, leases=(), state=""),
            rank_messages.GetStatus(),
            rank_messages.IterationDone(0, 1),
        ):
            stranger.say(message)
            stranger.hear(worker_messages.Unknown)
    assert broker.ledger.completed == 0


def test_a_new_worker_takes_over_the_identity_and_gets_the_task_again(
    config: RunConfig, broker: Broker
) -> None:
    with fakes.peers(fakes.endpoint_of(config), "same") as (first,):
        first.ready(config, "rollout")
        task = first.hear(worker_messages.PrefixTask)
        with fakes.peers(fakes.endpoint_of(config), "same") as (second,):
            second.ready(config, "rollout")
            assert second.hear(worker_messages.PrefixTask).groups == task.groups
            assert first.hears_nothing_of(worker_messages.PrefixTask)


class HeldJournal(Journal):
    """A disk that takes its time with scored groups until the test lets it go on."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.reached, self.go_on = threading.Event(), threading.Event()

    def append(self, records: Sequence[JournalRecord]) -> None:
        if any(isinstance(record, GroupScored) for record in records):
            self.reached.set()
            assert self.go_on.wait(30.0)
        super().append(records)


def test_scores_are_acknowledged_only_after_the_journal_holds_them(config: RunConfig) -> None:
    path = Path(config.directory) / "journal"
    journals_held_up: list[HeldJournal] = []

    def hold(broker: Broker) -> None:
        broker.journal.close()
        journals_held_up.append(HeldJournal(path))
        broker.journal = journals_held_up[0]

    with (
        fakes.serving(config, hold),
        fakes.peers(fakes.endpoint_of(config), "r", "s") as (rollout, scorer),
    ):
        rollout.ready(config, "rollout")
        task = rollout.hear(worker_messages.PrefixTask)
        rollout.say(fakes.sampled(task))
        rollout.hear(worker_messages.Ack)
        scorer.ready(config, "scorer")
        score = scorer.hear(worker_messages.ScoreTask)
        scorer.say(fakes.scored(score))
        assert journals_held_up[0].reached.wait(20.0)
        assert scorer.hears_nothing_of(worker_messages.Ack)
        journals_held_up[0].go_on.set()
        assert scorer.hear(worker_messages.Ack) == worker_messages.Ack(score.task)
        on_disk = [record for record in journals.read(path) if isinstance(record, GroupScored)]
        assert [record.group.prefixes for record in on_disk] == list(score.groups)


def test_a_result_sent_twice_is_acknowledged_twice_and_counted_once(
    config: RunConfig, broker: Broker
) -> None:
    with fakes.peers(fakes.endpoint_of(config), "r", "s", "rank") as (rollout, scorer, rank):
        rollout.ready(config, "rollout")
        rollout.say(fakes.sampled(rollout.hear(worker_messages.PrefixTask)))
        scorer.ready(config, "scorer")
        score = scorer.hear(worker_messages.ScoreTask)
        for _ in range(2):
            scorer.say(fakes.scored(score))
            scorer.hear(worker_messages.Ack)
        groups = fakes.status(fakes.learner(rank))["groups"]
        assert groups["duplicates_ignored"] == len(score.groups)


def test_a_rank_receives_the_missing_groups_and_their_holders(
    config: RunConfig, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "NOT_YET_EVERY_S", 0.05)
    with fakes.peers(fakes.endpoint_of(config), "rank", "r", "s") as (rank, rollout, scorer):
        fakes.learner(rank)
        rank.say(rank_messages.GetBatch(0, 0, 1))
        assert "any rollout: none is connected" in rank.hear(rank_messages.NotYet).waiting_for
        rollout.ready(config, "rollout", slots=6)
        tasks = [rollout.hear(worker_messages.PrefixTask) for _ in range(6)]
        rank.say(rank_messages.GetBatch(0, 0, 1))
        fakes.wait_until(
            lambda: (
                rank.say(rank_messages.GetBatch(0, 0, 1))
                or rank.hear(rank_messages.NotYet).waiting_for
            ).startswith("groups 0 (sampling, rollout-0 on host for"),
            "the names",
        )
        scorer.ready(config, "scorer")
        rollout.say(fakes.sampled(tasks[0]))
        scorer.hear(worker_messages.ScoreTask)
        rank.say(rank_messages.GetBatch(0, 0, 1))
        waiting_for = rank.hear(rank_messages.NotYet).waiting_for
        assert "0 (scoring, scorer-0 on host for" in waiting_for
        assert waiting_for.endswith("and 10 more")


def test_every_rank_gets_the_same_batch_in_training_order_and_the_groups_that_it_asks_for(
    config: RunConfig,
) -> None:
    with (
        fakes.serving(config, ranks=2),
        fakes.peers(fakes.endpoint_of(config), "rank0", "rank1", "r", "s") as (
            zero,
            one,
            rollout,
            scorer,
        ),
    ):
        fakes.learner(zero)
        one.join("rank")
        zero.say(rank_messages.GetBatch(0, 0, 2))
        one.say(rank_messages.GetBatch(0, 1, 2))
        rollout.ready(config, "rollout")
        scorer.ready(config, "scorer", slots=1)
        for _ in range(6):
            fakes.score_one_item(rollout, scorer)
        batches = [rank.hear(rank_messages.Batch) for rank in (zero, one)]
        shards = {
            (0, 3): fakes.groups_of(zero, batches[0], (0, 3)),
            (1, 2): fakes.groups_of(one, batches[1], (1, 2)),
        }
        assert fakes.groups_of(one, batches[1], ()) == []
    assert batches[0] == batches[1]
    assert [group.seq for group in batches[0].groups] == [0, 1, 2, 3]
    for indices, carried in shards.items():
        assert [group.prefixes.seq for group in carried] == list(indices)
        for index, group in zip(indices, carried, strict=True):
            same = [
                [one.tokens == other.tokens for other in group.prefixes.rows]
                for one in group.prefixes.rows
            ]
            hashes = batches[0].groups[index].texts
            assert [[one == other for other in hashes] for one in hashes] == same


def test_groups_of_no_batch_or_of_none_of_its_indices_are_refused_and_those_trained_are_not_sent(
    config: RunConfig, broker: Broker
) -> None:
    with fakes.peers(fakes.endpoint_of(config), "zero", "r", "s") as (rank, rollout, scorer):
        fakes.learner(rank)
        rank.say(rank_messages.GetGroups(0, (0,)))
        assert (
            "of iteration 0, of which there is no batch" in rank.hear(worker_messages.Reject).reason
        )
        fakes.learner(rank)
        rollout.ready(config, "rollout")
        scorer.ready(config, "scorer")
        for _ in range(3):
            fakes.score_one_item(rollout, scorer)
        batch = fakes.train(rank, 0)
        for indices in ((0, 4), (1, 0), (0, 0)):
            rank.say(rank_messages.GetGroups(0, indices))
            assert (
                "other than ascending indices below 4" in rank.hear(worker_messages.Reject).reason
            )
            fakes.learner(rank)
        assert len(fakes.groups_of(rank, batch)) == 4
        rank.say(rank_messages.IterationDone(0, 1))
        rank.hear(rank_messages.Accepted)
        rank.say(rank_messages.GetGroups(0, (0,)))
        assert rank.hears_nothing_of(rank_messages.Groups)


def test_a_rank_that_is_ahead_of_the_report_waits_and_one_that_repeats_itself_is_harmless(
    config: RunConfig, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "NOT_YET_EVERY_S", 0.05)
    with fakes.peers(fakes.endpoint_of(config), "zero", "one", "r", "s") as (
        zero,
        one,
        rollout,
        scorer,
    ):
        fakes.learner(zero)
        one.join("rank")
        rollout.ready(config, "rollout")
        scorer.ready(config, "scorer")
        for _ in range(6):
            fakes.score_one_item(rollout, scorer)
        zero.say(rank_messages.GetBatch(0, 0, 1))
        zero.hear(rank_messages.Batch)
        one.say(rank_messages.GetBatch(1, 0, 1))
        assert "the report that iteration 0 is done" in one.hear(rank_messages.NotYet).waiting_for
        one.say(rank_messages.GetBatch(1, 0, 1))
        zero.say(rank_messages.IterationDone(0, 1))
        zero.say(rank_messages.GetBatch(0, 0, 1))
        zero.hear(rank_messages.Accepted)
        assert one.hear(rank_messages.Batch).iteration == 1
        assert zero.hears_nothing_of(rank_messages.Batch)


def test_one_rank_that_is_stopped_halts_all_at_the_same_iteration(config: RunConfig) -> None:
    with (
        fakes.serving(config, ranks=2),
        fakes.peers(fakes.endpoint_of(config), "zero", "one", "r", "s") as (
            zero,
            one,
            rollout,
            scorer,
        ),
    ):
        fakes.learner(zero)
        one.join("rank")
        rollout.ready(config, "rollout")
        scorer.ready(config, "scorer")
        for _ in range(2):
            fakes.score_one_item(rollout, scorer)
        zero.say(rank_messages.GetBatch(0, 0, 2))
        zero.hear(rank_messages.Batch)
        one.say(rank_messages.GetBatch(0, 1, 2, is_stopping=True))
        assert one.hear(rank_messages.Batch).iteration == 0, "the other rank trains it already"
        zero.say(rank_messages.IterationDone(0, 1))
        zero.hear(rank_messages.Accepted)
        for rank, number in ((zero, 0), (one, 1)):
            rank.say(rank_messages.GetBatch(1, number, 2))
            assert rank.hear(rank_messages.Halt).iteration == 1


def test_a_batch_carries_the_waiting_times_by_cause_and_the_stages_of_its_groups(
    config: RunConfig,
) -> None:
    with (
        fakes.serving(config, ranks=2),
        fakes.peers(fakes.endpoint_of(config), "zero", "one", "r", "s") as (
            zero,
            one,
            rollout,
            scorer,
        ),
    ):
        fakes.learner(zero)
        one.join("rank")
        zero.say(rank_messages.GetBatch(0, 0, 2))
        zero.hear(rank_messages.NotYet)  # waits for rollouts for a second
        rollout.ready(config, "rollout", slots=2)
        tasks = [rollout.hear(worker_messages.PrefixTask) for _ in range(2)]
        for task in tasks:
            rollout.say(fakes.sampled(task))
            rollout.hear(worker_messages.Ack)
        zero.say(rank_messages.GetBatch(0, 0, 2))
        zero.hear(rank_messages.NotYet)  # waits for scorers for a second
        scorer.ready(config, "scorer", slots=2)
        for _ in tasks:
            scorer.say(fakes.scored(scorer.hear(worker_messages.ScoreTask)))
        zero.say(rank_messages.GetBatch(0, 0, 2))
        batch = zero.hear(rank_messages.Batch)
        one.say(rank_messages.GetBatch(0, 1, 2))
        again = one.hear(rank_messages.Batch)
    assert batch.waited_s["rollouts"] > 0.9 and batch.waited_s["scorers"] > 0.9
    assert (batch.groups, batch.waited_s) == (again.groups, again.waited_s)
    for group in batch.groups:
        assert group.stages.queued_s > 0.9 and group.stages.waiting_s >= 0.0
        assert group.completion_tokens == 3 * fakes.ROWS


def test_a_malformed_result_ends_its_worker_alone(config: RunConfig, broker: Broker) -> None:
    with fakes.peers(fakes.endpoint_of(config), "rank", "bad", "good") as (rank, bad, good):
        fakes.learner(rank)
        bad.ready(config, "rollout")
        task = bad.hear(worker_messages.PrefixTask)
        wrong = fakes.sampled(task)
        group = msgspec.structs.replace(wrong.groups[0], rows=wrong.groups[0].rows[:1])
        bad.say(msgspec.structs.replace(wrong, groups=(group, *wrong.groups[1:])))
        assert "holds 1 rows, the task asked for 2" in bad.hear(worker_messages.Reject).reason
        good.ready(config, "rollout")
        assert good.hear(worker_messages.PrefixTask).groups == task.groups
