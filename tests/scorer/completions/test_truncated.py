"""Completions that the length limit cut: in the scorer, then in the ledger and the batch."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from prefixrl.common.config.run import RunConfig
from prefixrl.common.engines.interface.base import Continuation
from prefixrl.common.errors import ConfigError
from prefixrl.common.prompts.rendering import ByteRenderer
from prefixrl.common.wire.messages.groups import Sampling, TaskKind
from prefixrl.common.wire.messages.learner import Batch, GetBatch
from prefixrl.common.wire.messages.worker import Ack, ModelDigests, PrefixTask, Scores, ScoreTask
from prefixrl.learner.run.fractions import batch_fractions
from prefixrl.scorer.loop import Scorer
from prefixrl.scorer.verifier.pool import VerifierPool
from support.broker.dispatch_desk import Desk
from support.broker.scoring_world import Tasks, WritingEngine, check_scores
from support.fakes import endpoint_of, learner, peers, ready, run_on_disk, sampled, serving, status

EARLY = r"It is \boxed{1}, let me check that once more."
LATE = r"Long thoughts, then it is \boxed{1}"
LIMIT = 20


def run_config(folder: Path, **scorer: Any) -> RunConfig:
    given = {"max_new_tokens": LIMIT, "engine": "simulated"} | scorer
    return run_on_disk(folder, scorer=given, rollout={"engine": "simulated"})


def without_prefixes(task: ScoreTask, gold: str = "1") -> ScoreTask:
    """The same task with nothing written yet, so that a row's text is the engine's."""
    empty = msgspec.structs.replace(task.groups[0].rows[0], tokens=b"", logprobs=b"")
    groups = tuple(
        msgspec.structs.replace(
            group,
            rows=(empty,) * len(group.rows),
            prompt=msgspec.structs.replace(group.prompt, question="?", gold=gold),
        )
        for group in task.groups
    )
    return msgspec.structs.replace(task, groups=groups)


def score(
    config: RunConfig,
    task: ScoreTask,
    texts: list[str],
    kind: TaskKind = "train",
    gold: str = "1",
    engine_type: type[WritingEngine] = WritingEngine,
) -> tuple[Scores, WritingEngine]:
    """Return a scorer's verdicts on a task when its target writes these texts."""
    engine, pool = engine_type(texts, prompt_bytes=1), VerifierPool(1, 5)
    link = Tasks(msgspec.structs.replace(without_prefixes(task, gold), kind=kind))
    scorer = Scorer(config, link, engine, ByteRenderer(), pool, ModelDigests("", "", ""))  # type: ignore[arg-type]
    try:
        scorer.run(lambda: False)
    finally:
        pool.close()
    (scores,) = link.sent
    assert isinstance(scores, Scores)
    return scores, engine


def one_task(config: RunConfig) -> ScoreTask:
    """Two groups of two rows."""
    desk = Desk(config)
    rollout, scorer = desk.worker("rollout"), desk.worker("scorer")
    desk.sample_everything(rollout)
    desk.dispatch()
    task: ScoreTask = desk.tasks(scorer, ScoreTask)[0]
    return msgspec.structs.replace(task, sampling=Sampling(temperature=0.0, max_new_tokens=LIMIT))


TEXTS = [EARLY, LATE, r"\boxed{1}", r"\boxed{2}"]
"""Cut with an answer, cut before it, whole and right, whole and wrong."""


@pytest.mark.parametrize("truncated", ["judge", "zero", "mask"])
def test_without_a_gold_answer_nothing_is_judged_and_the_answer_is_still_found(
    tmp_path: Path, truncated: str
) -> None:
    config = run_config(tmp_path, truncated=truncated)
    scores, _ = score(config, one_task(config), TEXTS, kind="eval", gold="")
    verdicts = [each for group in scores.groups for each in group.verdicts]
    assert [each.status for each in verdicts] == ["no_gold"] * 4
    assert not any(each.is_judged for each in verdicts)
    assert [each.extracted for each in verdicts] == ["1", "", "1", "2"]
    assert [each.finish for each in verdicts] == ["length", "length", "eos", "eos"]
    assert verdicts[2].completion == TEXTS[2]


def test_a_training_row_without_a_gold_answer_is_a_failure_with_its_kind(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    scores, _ = score(config, one_task(config), TEXTS, gold="")
    for group in scores.groups:
        assert group.faults == {"gold answer unreadable": 2}
        assert {each.extracted for each in group.verdicts} == {"the problem has no gold answer"}


@pytest.mark.parametrize(
    ("truncated", "kind", "rewards", "statuses"),
    [
        pytest.param("", "train", (1, 0, 1, 0), ("ok", "no_answer", "ok", "ok"), id="default"),
        pytest.param("judge", "train", (1, 0, 1, 0), ("ok", "no_answer", "ok", "ok"), id="judge"),
        pytest.param(
            "zero", "train", (0, 0, 1, 0), ("no_answer", "no_answer", "ok", "ok"), id="zero"
        ),
        pytest.param(
            "zero",
            "eval",
            (0, 0, 1, 0),
            ("no_answer", "no_answer", "ok", "ok"),
            id="zero in an evaluation",
        ),
        pytest.param(
            "mask", "train", (0, 0, 1, 0), ("truncated", "truncated", "ok", "ok"), id="mask"
        ),
        pytest.param(
            "mask",
            "eval",
            (1, 0, 1, 0),
            ("ok", "no_answer", "ok", "ok"),
            id="mask in an evaluation",
        ),
        pytest.param("extend", "train", (1, 1, 1, 0), ("ok", "ok", "ok", "ok"), id="extend"),
    ],
)
def test_a_cut_completion_is_worth_what_the_setting_says(
    truncated: str,
    kind: TaskKind,
    rewards: tuple[float, ...],
    statuses: tuple[str, ...],
    tmp_path: Path,
) -> None:
    config = run_config(tmp_path, truncated=truncated or None)
    scores, engine = score(config, one_task(config), TEXTS, kind)
    verdicts = [verdict for group in scores.groups for verdict in group.verdicts]
    assert tuple(verdict.reward for verdict in verdicts) == rewards
    assert tuple(verdict.status for verdict in verdicts) == statuses
    is_extended = truncated == "extend"
    assert len(engine.jobs) == 1 + is_extended
    # The first does not end within twice the limit either.
    assert [verdict.finish for verdict in verdicts] == [
        "length",
        "eos" if is_extended else "length",
        "eos",
        "eos",
    ]


class WithoutRoom(WritingEngine):
    """Completes nothing further."""

    def _rows(self, job: Any) -> list[Continuation]:
        if not job.key.endswith("+"):
            return super()._rows(job)
        none = np.zeros(0, np.int32)
        return [Continuation(none, none.astype(np.float32), "error", (), error="no room")] * len(
            job.rows
        )


def test_a_text_that_cannot_be_extended_is_judged_as_it_was_cut(tmp_path: Path) -> None:
    config = run_config(tmp_path, truncated="extend")
    scores, _ = score(config, one_task(config), TEXTS, engine_type=WithoutRoom)
    verdicts = [verdict for group in scores.groups for verdict in group.verdicts]
    assert [each.reward for each in verdicts] == [1, 0, 1, 0]
    assert [each.status for each in verdicts] == ["ok", "no_answer", "ok", "ok"]
    assert [each.finish for each in verdicts] == ["length", "length", "eos", "eos"]
    assert [each.completion_tokens for each in verdicts[:2]] == [LIMIT] * 2


def test_an_extension_goes_on_where_the_row_was_cut_and_once_only(tmp_path: Path) -> None:
    config = run_config(tmp_path, truncated="extend", extension_tokens=5)
    scores, engine = score(config, one_task(config), TEXTS)
    cut, extension = engine.jobs
    assert extension.sampling.max_new_tokens == 5 and extension.uniforms.shape == (2, 5)
    assert [
        row.size - given.size for row, given in zip(extension.rows, cut.rows, strict=False)
    ] == [LIMIT, LIMIT]
    tokens = [verdict.completion_tokens for group in scores.groups for verdict in group.verdicts]
    assert tokens[:2] == [LIMIT + 5] * 2
    # Draws of its own, the same ones whenever the task is done again.
    again = score(config, one_task(config), TEXTS)[1].jobs[1]
    assert (again.uniforms == extension.uniforms).all()
    assert not np.isin(extension.uniforms, cut.uniforms).any()


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        pytest.param(
            {"extension_tokens": 7},
            "extension_tokens = 7 with truncated absent",
            id="without truncated",
        ),
        pytest.param(
            {"extension_tokens": 7, "truncated": "zero"}, 'with truncated = "zero"', id="with zero"
        ),
        pytest.param({"truncated": "drop"}, "judge", id="an unknown setting"),
    ],
)
def test_settings_that_say_nothing_are_refused(
    keys: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    with pytest.raises((ConfigError, ValueError), match=complaint):
        run_config(tmp_path, **keys)


def test_a_masked_row_is_counted_by_its_cause_and_never_trained(tmp_path: Path) -> None:
    """Real broker, real scorer loop: of eight rows two are cut, six are trained; a group of cut rows alone fails."""
    config = run_config(tmp_path, truncated="mask")
    texts = [TEXTS[:1] + TEXTS[2:3], TEXTS[1:3], TEXTS[2:], TEXTS[2:]]
    with serving(config), peers(endpoint_of(config), "rank", "r", "s") as (rank, rollout, scorer):
        learner(rank)
        rollout.join("rollout")
        scorer.join("scorer")
        say_ready(config, rollout, scorer)
        judge(config, rollout, scorer, texts[0] + texts[1])
        judge(config, rollout, scorer, texts[2] + texts[3])
        rank.say(GetBatch(0, 0, 1))
        batch = rank.hear(Batch)
        assert status(rank)["rows_left_out"] == {"truncated": 2}
    assert [group.rewards for group in batch.groups] == [(1.0,), (1.0,), (1.0, 0.0), (1.0, 0.0)]
    assert [group.statuses for group in batch.groups] == [
        {"truncated": 1, "ok": 1},
        {"truncated": 1, "ok": 1},
        {"ok": 2},
        {"ok": 2},
    ]
    assert batch_fractions(batch.groups)["truncated_masked_fraction"] == 2 / 8


def test_a_group_of_nothing_but_masked_rows_fails_with_that_cause_and_is_not_tried_again(
    tmp_path: Path,
) -> None:
    config = run_config(tmp_path, truncated="mask")
    with serving(config), peers(endpoint_of(config), "rank", "r", "s") as (rank, rollout, scorer):
        learner(rank)
        rollout.join("rollout")
        scorer.join("scorer")
        say_ready(config, rollout, scorer)
        judge(config, rollout, scorer, TEXTS[:2] + TEXTS[2:])
        document = status(rank)
    assert document["causes"] == {"failed: every row cut by the length limit": 1}
    assert document["queues"]["scored"] == 1


def say_ready(config: RunConfig, rollout: Any, scorer: Any) -> None:
    """Report the worker as ready, with the engine that the config names."""
    for peer, role in ((rollout, "rollout"), (scorer, "scorer")):
        peer.say(msgspec.structs.replace(ready(config, role), engine="simulated"))  # type: ignore[arg-type]


def judge(config: RunConfig, rollout: Any, scorer: Any, texts: list[str]) -> None:
    """One task through the rollout and a real scorer loop."""
    rollout.say(sampled(rollout.hear(PrefixTask)))
    rollout.hear(Ack)
    task = scorer.hear(ScoreTask)
    result, _ = score(
        config,
        msgspec.structs.replace(task, sampling=Sampling(temperature=0.0, max_new_tokens=LIMIT)),
        texts,
    )
    # The very prefixes that the task named, with the verdicts of the real loop.
    groups = tuple(
        msgspec.structs.replace(group, prefixes=given)
        for group, given in zip(result.groups, task.groups, strict=True)
    )
    for group in groups:
        check_scores(group, 2)
    scorer.say(msgspec.structs.replace(result, groups=groups))
    scorer.hear(Ack)
