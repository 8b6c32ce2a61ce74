"""Kept answers on the disk: a broker that is killed, a torn end, a damaged file, a full run folder."""

from pathlib import Path

import pytest

from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import DataError
from prefixrl.common.journal import journal as journals
from prefixrl.common.journal.records import AnswerKept
from prefixrl.common.run.directory_format import ANSWERS_FOLDER
from prefixrl.common.wire.messages.worker import Ack, ScoreTask
from prefixrl.learner.broker.__main__ import kept_answers
from support import fakes, messages
from support.broker.dispatch_desk import held_out
from support.messages import evaluate


def answer(number: int) -> AnswerKept:
    return AnswerKept(
        key=bytes([number]) * 16,
        text=f"answer {number} " * 50,
        finish="eos",
        is_draft=True,
        prompt_tokens=1,
        completion_tokens=2,
    )


def write(config: RunConfig, count: int) -> Path:
    folder = Path(config.directory) / ANSWERS_FOLDER
    journal = journals.Journal(folder)
    journal.append([answer(number) for number in range(count)])
    journal.close()
    return journals.open_path(folder, 0)


def restored(config: RunConfig) -> int:
    return kept_answers(config, Path(config.directory)).draft_total.requests


def test_every_torn_end_leaves_the_answers_before_it(config: RunConfig) -> None:
    path = write(config, 3)
    whole = path.read_bytes()
    size = len(whole) // 3
    for length in (0, 1, size - 1, size + 1, 2 * size + 20, 3 * size - 1, 3 * size):
        path.write_bytes(whole[:length])
        assert restored(config) == length // size
        assert path.stat().st_size == length // size * size, "the torn end is cut off"


def test_a_damaged_file_is_named_with_its_remedies(config: RunConfig) -> None:
    path = write(config, 3)
    content = bytearray(path.read_bytes())
    content[40] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"damaged at byte 0: .*or remove .*answers: what it holds"):
        restored(config)


def test_a_run_without_a_target_has_no_answers(tmp_path: Path) -> None:
    config = fakes.run_on_disk(tmp_path, mode="direct")
    with fakes.serving(config):
        pass
    assert not (Path(config.directory) / ANSWERS_FOLDER).exists()


def test_an_acknowledged_answer_outlives_a_killed_broker(config: RunConfig) -> None:
    child = fakes.broker_process(config)
    endpoint = Path(config.directory) / "endpoint"
    fakes.wait_until(endpoint.exists, "a socket")
    with fakes.peers(fakes.endpoint_of(config), "rank", "s") as (rank, scorer):
        rank.join("rank")
        scorer.ready(config, "scorer")
        rank.say(evaluate("first", -1, held_out(1)))
        task = scorer.hear(ScoreTask)
        assert task.answers == ()
        (prefixes,) = task.groups
        verdict = messages.verdict(completion="so 1")
        group = messages.scored_group(prefixes, verdict, version=-1, weights_digest="")
        scorer.say(type(fakes.scored(task))(task.task, "eval", (group,)))
        scorer.hear(Ack)
    fakes.end(child)
    again = fakes.broker_process(config, is_restart=True)
    before = endpoint.stat().st_mtime_ns
    fakes.wait_until(lambda: endpoint.stat().st_mtime_ns > before, "the next socket")
    with fakes.peers(fakes.endpoint_of(config), "rank2", "s2") as (rank, scorer):
        rank.join("rank")
        scorer.ready(config, "scorer")
        rank.say(evaluate("second", -1, held_out(1)))
        (text,) = scorer.hear(ScoreTask).answers
        assert text is not None and (text.text, text.finish) == ("so 1", "eos")
    fakes.end(again)
