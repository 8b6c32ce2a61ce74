"""A broker whose disk is full acknowledges nothing that is not written, and goes on."""

import json
from pathlib import Path

import pytest

from prefixrl.common.config.run import RunConfig
from prefixrl.common.journal import journal
from prefixrl.common.journal.records import BatchFormed, GroupScored, VersionPublished
from prefixrl.common.run import disk
from prefixrl.common.wire.messages.learner import Accepted, Batch, GetBatch, NotYet, Published
from prefixrl.common.wire.messages.weights import WeightsNote
from prefixrl.common.wire.messages.worker import Ack, PrefixTask, ScoreTask
from support import fakes
from support.runs.small_disk import small_disk

V1 = WeightsNote(1, "d1", fakes.NOTE.probe_tokens, fakes.NOTE.probe_logprobs)


def run_of_long_questions(folder: Path) -> RunConfig:
    """A run of which no record fits into what is left of a page of the disk."""
    config = fakes.run_on_disk(folder)
    rows = [{"id": f"p{i}", "question": "x" * 6000 + str(i), "answer": i} for i in range(40)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return config


def test_what_arrives_while_the_disk_is_full_is_acknowledged_once_there_is_room(
    tmp_path: Path,
) -> None:
    with small_disk(tmp_path / "disk", 4 << 20) as small:
        config = run_of_long_questions(small.path / "run")
        path = Path(config.directory) / "journal"
        with (
            fakes.serving(config),
            fakes.peers(fakes.endpoint_of(config), "rank", "rollout", "scorer") as (
                rank,
                rollout,
                scorer,
            ),
        ):
            fakes.learner(rank)
            rollout.ready(config, "rollout")
            scorer.ready(config, "scorer")
            for _ in range(2):
                rollout.say(fakes.sampled(rollout.hear(PrefixTask)))
                rollout.hear(Ack)
            small.fill()
            written = (path / "000000.msgpack").read_bytes()
            for _ in range(2):
                scorer.say(fakes.scored(scorer.hear(ScoreTask)))
            fakes.wait_until(
                lambda: "the journal cannot be written" in fakes.status(rank)["waiting_for"],
                "the reason",
            )
            rank.say(GetBatch(0, 0, 1))
            assert str(small.path) in rank.hear(NotYet).waiting_for
            # While it tries again there may be a part of a record for a moment.
            segment = path / "000000.msgpack"
            fakes.wait_until(lambda: segment.read_bytes() == written, "no half record")
            small.make_room()
            for _ in range(2):
                scorer.hear(Ack)
            rank.say(GetBatch(0, 0, 1))
            assert len(rank.hear(Batch).groups) == 4
            fakes.train(rank, 0)
            assert fakes.status(rank)["waiting_for"] == ""
        records = list(journal.read(path))
        assert sorted(
            each.group.prefixes.seq for each in records if isinstance(each, GroupScored)
        ) == [0, 1, 2, 3]
        assert sum(isinstance(each, BatchFormed) for each in records) == 1


def test_no_work_is_given_and_no_version_announced_while_the_disk_is_full(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 4 << 20) as small:
        config = run_of_long_questions(small.path / "run")
        with (
            fakes.serving(config),
            fakes.peers(fakes.endpoint_of(config), "rank", "rollout", "scorer", "other") as (
                rank,
                rollout,
                scorer,
                other,
            ),
        ):
            fakes.learner(rank)
            rollout.ready(config, "rollout")
            scorer.ready(config, "scorer")
            rollout.say(fakes.sampled(rollout.hear(PrefixTask)))
            score = scorer.hear(ScoreTask)
            small.fill()
            scorer.say(fakes.scored(score))
            fakes.wait_until(
                lambda: "the journal" in fakes.status(rank)["waiting_for"], "the reason"
            )
            other.ready(config, "rollout")
            rank.say(Published(V1))
            assert other.hears_nothing_of(PrefixTask, for_s=1.5)
            assert rank.hears_nothing_of(Accepted)
            small.make_room()
            other.hear(PrefixTask)
            rank.say(Published(V1))
            rank.hear(Accepted)
        versions = [
            each.note.version
            for each in journal.read(Path(config.directory) / "journal")
            if isinstance(each, VersionPublished)
        ]
        assert versions == [0, 1]


def test_a_disk_that_stays_full_ends_the_wait_with_its_name(tmp_path: Path) -> None:
    full = disk.FullDisk(tmp_path, "the journal")

    def no_room() -> None:
        raise OSError(28, "No space left on device")

    assert not full.takes(no_room, 0.0)
    assert not full.takes(lambda: pytest.fail("tried at once again"), disk.RETRY_S / 2)
    with pytest.raises(
        disk.TrainingFault, match=rf"waited 1800 s for room on the disk of {tmp_path}"
    ):
        full.takes(no_room, disk.WAIT_S + 1.0)


def test_another_error_than_a_full_disk_is_raised_as_it_is(tmp_path: Path) -> None:
    def broken() -> None:
        raise OSError(5, "Input/output error")

    with pytest.raises(OSError, match="Input/output"):
        disk.FullDisk(tmp_path, "the journal").takes(broken, 0.0)
