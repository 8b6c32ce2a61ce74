"""The broker's checks on answers that cross an update.

Published and proved weights for every token, spans that add up.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prefixrl.common.wire.messages import worker as messages
from prefixrl.common.wire.messages.groups import Row, VersionSpan
from prefixrl.common.wire.messages.learner import Accepted, IterationDone, Published
from prefixrl.common.wire.messages.weights import WeightsNote
from prefixrl.common.wire.packing import pack_logprobs
from support import fakes
from support.broker.dispatch_desk import Desk
from support.messages import evaluate

V1 = WeightsNote(1, "d1", fakes.NOTE.probe_tokens, fakes.NOTE.probe_logprobs)
PROOF = messages.Installed(1, "d1", fakes.NOTE.probe_logprobs, checksum=fakes.INSTALLED)
CROSSED = (VersionSpan(0, "d0", 1), VersionSpan(1, "d1", 1))


@contextmanager
def swapped(
    folder: Path, swap: str = "in_flight"
) -> Iterator[tuple[fakes.Peer, fakes.Peer, fakes.Peer, list[messages.PrefixTask]]]:
    """Rank, scorer and a rollout that was told to install version 1 while it holds a task."""
    config = fakes.run_on_disk(folder, rollout={"groups_per_task": 4, "swap": swap})
    with (
        fakes.serving(config),
        fakes.peers(fakes.endpoint_of(config), "rank", "scorer", "rollout") as all_of_them,
    ):
        rank, scorer, rollout = all_of_them
        fakes.learner(rank)
        rollout.ready(config, "rollout")
        scorer.ready(config, "scorer")
        task = rollout.hear(messages.PrefixTask)
        rank.say(Published(V1))
        rank.hear(Accepted)
        while rollout.hear(messages.Beat).latest != V1:
            pass
        rollout.say(messages.Staged(1))
        yield rank, scorer, rollout, [task]


def written(task: messages.PrefixTask, *spans: VersionSpan) -> messages.Prefixes:
    """Make a rollout's result of a task, its rows with these spans."""
    prefixes = fakes.sampled(task)

    def row(old: Row) -> Row:
        return msgspec.structs.replace(old, spans=spans)

    groups = tuple(
        msgspec.structs.replace(group, rows=tuple(map(row, group.rows)))
        for group in prefixes.groups
    )
    return msgspec.structs.replace(prefixes, groups=groups)


def test_a_rollout_swaps_with_a_task_open_and_its_crossed_answers_are_trained(
    tmp_path: Path,
) -> None:
    with swapped(tmp_path) as (rank, scorer, rollout, (task,)):
        assert rollout.hear(messages.Swap) == messages.Swap(1)
        assert rollout.hears_nothing_of(messages.PrefixTask), "no work until the weights are proved"
        rollout.say(PROOF)
        assert rollout.hear(messages.Probed) == messages.Probed(
            version=1, outcome="proved", by="checksum"
        )
        assert rollout.hears_nothing_of(messages.PrefixTask), "its one slot is taken"
        rollout.say(written(task, *CROSSED))
        rollout.hear(messages.Ack)
        scorer.say(fakes.scored(scorer.hear(messages.ScoreTask)))
        batch = fakes.train(rank, 0)
        assert {group.version for group in batch.groups} == {0}
        rank.say(IterationDone(0, 1))
        rank.hear(Accepted)
        actual = fakes.status(rank)
        assert actual["age_histogram"] == {"0": 4}
        # Version 1 is younger than the iteration only here, where nothing was trained before it was published.
        assert actual["token_age_histogram"] == {"-1": 8, "0": 8}
        assert actual["crossed_fraction"] == 1.0


def test_a_proof_whose_answer_was_lost_is_answered_again(tmp_path: Path) -> None:
    with swapped(tmp_path) as (_, _, rollout, _):
        rollout.hear(messages.Swap)
        for _ in range(3):
            rollout.say(PROOF)
            assert rollout.hear(messages.Probed) == messages.Probed(
                version=1, outcome="proved", by="checksum"
            )


def test_draining_waits_for_the_task(tmp_path: Path) -> None:
    with swapped(tmp_path, "drain") as (_, _, rollout, (task,)):
        assert rollout.hears_nothing_of(messages.Swap), "a lease is open"
        rollout.say(written(task, VersionSpan(0, "d0", 2)))
        assert rollout.hear(messages.Swap) == messages.Swap(1)


def test_crossed_answers_are_refused_where_rollouts_drain(tmp_path: Path) -> None:
    desk = Desk(fakes.run_on_disk(tmp_path, rollout={"groups_per_task": 4}))
    rollout = desk.worker("rollout")
    desk.dispatch()
    (task,) = desk.tasks(rollout, messages.PrefixTask)
    with pytest.raises(ValueError, match=r"row 0: tokens of versions \[0, 1\].*swap = .drain."):
        desk.dispatcher.take_prefixes(rollout, written(task, *CROSSED), now_s=1.0)
    other = desk.replaced(rollout)
    desk.dispatch()
    assert desk.tasks(other, messages.PrefixTask)[0].groups == task.groups


def test_an_evaluation_is_of_one_version_and_holds_the_swap_up(tmp_path: Path) -> None:
    config = fakes.run_on_disk(tmp_path, rollout={"groups_per_task": 4, "swap": "in_flight"})
    with (
        fakes.serving(config),
        fakes.peers(fakes.endpoint_of(config), "rank", "rollout") as (rank, rollout),
    ):
        fakes.learner(rank)
        rank.say(evaluate("e"))
        rank.hear(Accepted)
        rollout.ready(config, "rollout")
        task = rollout.hear(messages.PrefixTask)
        assert task.kind == "eval"
        rank.say(Published(V1))
        rank.hear(Accepted)
        rollout.say(messages.Staged(1))
        assert rollout.hears_nothing_of(messages.Swap)
        rollout.say(written(task, VersionSpan(0, "d0", 2)))
        assert rollout.hear(messages.Swap) == messages.Swap(1)


def test_tokens_of_weights_that_did_not_pass_are_not_taken(tmp_path: Path) -> None:
    with swapped(tmp_path) as (_, _, rollout, (task,)):
        rollout.hear(messages.Swap)
        rollout.say(
            messages.Installed(1, "d1", pack_logprobs([-1.0, -2.5]), checksum=fakes.INSTALLED)
        )
        assert rollout.hear(messages.Probed).outcome == "refused"
        rollout.say(written(task, *CROSSED))
        assert "weights d1, which it did not prove to hold" in rollout.hear(messages.Reject).reason


def test_a_task_spoilt_by_such_weights_is_given_out_again(tmp_path: Path) -> None:
    with swapped(tmp_path) as (_, _, rollout, (task,)):
        rollout.hear(messages.Swap)
        rollout.say(messages.Refused(task.task, "sampled with weights that were not proved"))
        rollout.say(PROOF)
        again = rollout.hear(messages.PrefixTask)
        assert (again.version, again.groups) == (1, task.groups)


WRONG: dict[str, tuple[tuple[VersionSpan, ...], str]] = {
    "never published": ((VersionSpan(0, "d0", 1), VersionSpan(2, "d2", 1)), "never published as"),
    "another digest": ((VersionSpan(0, "d0", 1), VersionSpan(1, "d7", 1)), "weights d7 were never"),
    "too few tokens": ((VersionSpan(0, "d0", 1),), "for 2 tokens"),
    "too many tokens": ((VersionSpan(0, "d0", 2), VersionSpan(1, "d1", 1)), "for 2 tokens"),
    "an empty span": ((VersionSpan(0, "d0", 2), VersionSpan(1, "d1", 0)), "for 2 tokens"),
    "no span": ((), "for 2 tokens"),
    "falling": ((VersionSpan(1, "d1", 1), VersionSpan(0, "d0", 1)), r"[1, 0] of its spans do not"),
    "said twice": ((VersionSpan(0, "d0", 1), VersionSpan(0, "d0", 1)), "do not rise"),
}


@pytest.mark.parametrize("case", WRONG)
def test_spans_that_cannot_be_are_refused_by_name_and_the_groups_come_back(
    case: str, tmp_path: Path
) -> None:
    spans, reason = WRONG[case]
    with swapped(tmp_path) as (_, _, rollout, (task,)):
        rollout.hear(messages.Swap)
        rollout.say(PROOF)
        assert rollout.hear(messages.Probed).outcome == "proved"
        rollout.say(written(task, *spans))
        assert reason in rollout.hear(messages.Reject).reason
        rollout.join("rollout")


def test_a_result_older_than_its_task_is_refused(tmp_path: Path) -> None:
    desk = Desk(fakes.run_on_disk(tmp_path, rollout={"groups_per_task": 4, "swap": "in_flight"}))
    rollout = desk.worker("rollout", version=1)
    desk.dispatch()
    (task,) = desk.tasks(rollout, messages.PrefixTask)
    old = msgspec.structs.replace(written(task, *CROSSED), version=0, weights_digest="d0")
    with pytest.raises(ValueError, match="version 0 for a task at version 1"):
        desk.dispatcher.take_prefixes(rollout, old, now_s=1.0)
    with pytest.raises(ValueError, match="a token of version 0 in a result of version 1"):
        desk.dispatcher.take_prefixes(rollout, written(task, *CROSSED), now_s=1.0)


def test_a_task_that_waited_in_the_rollout_may_be_newer_than_its_lease(tmp_path: Path) -> None:
    with swapped(tmp_path) as (_, scorer, rollout, (task,)):
        rollout.hear(messages.Swap)
        rollout.say(PROOF)
        assert rollout.hear(messages.Probed).outcome == "proved"
        late: Any = written(task, VersionSpan(1, "d1", 2))
        rollout.say(msgspec.structs.replace(late, version=1, weights_digest="d1"))
        rollout.hear(messages.Ack)
        assert scorer.hear(messages.ScoreTask).version == 1
