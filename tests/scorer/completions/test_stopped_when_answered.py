"""Completions that end with their answers: in the scorer's loop, with a real target, and in the figures of a run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prefixrl.common.config.load import load
from prefixrl.common.config.run import RunConfig
from prefixrl.common.engines.interface.base import Continuation, Job
from prefixrl.common.engines.make import make_engine
from prefixrl.common.errors import ConfigError
from prefixrl.common.prompts.rendering import ByteRenderer
from prefixrl.common.wire.messages.groups import Prompt, Sampling, TaskKind, Verdict
from prefixrl.common.wire.messages.worker import ModelDigests, Scores, ScoreTask
from prefixrl.common.worker.join import Overrides, _with_overrides
from prefixrl.learner.broker.batches import batch_group
from prefixrl.learner.run.fractions import batch_fractions
from prefixrl.scorer.loop import Scorer
from prefixrl.scorer.verifier.pool import VerifierPool
from support import messages
from support.broker.scoring_world import Tasks, WritingEngine
from support.fakes import run_on_disk
from support.models.base_models import (
    AS_DECLARED,
    base_model,
    endless_target,
    judged,
    run_of,
    scored,
)
from support.paths import EXAMPLE

QUESTION = "?"
LIMIT = 60
ANSWER = "so \\boxed{1}.\n\n"
AFTER = "Wait, it is \\boxed{2}.\n\n"


class WatchingEngine(WritingEngine):
    """Writes given texts, and ends a row where its watch says so."""

    def _rows(self, job: Job) -> list[Continuation]:
        rows = super()._rows(job)
        for index, row in enumerate(rows):
            watch = job.watch(index)
            for size, token in enumerate(row.tokens.tolist(), 1):
                if watch and watch(token):
                    rows[index] = replace(
                        row, tokens=row.tokens[:size], finish="eos", was_stopped=True
                    )
                    break
        self._cut = [index for index, row in enumerate(rows) if row.finish == "length"]
        return rows


def config_of(folder: Path, **scorer: Any) -> RunConfig:
    section = {"max_new_tokens": LIMIT, "stop_when_answered": True, "keep_completions": True}
    return run_on_disk(folder, scorer={"engine": "transformers"} | section | scorer)


def score(
    config: RunConfig,
    *texts: str,
    prefix: str = "",
    kind: TaskKind = "train",
    code: str = "none",
    question: str = QUESTION,
    limit: int = LIMIT,
) -> list[Verdict]:
    """Return verdicts on a row per text, whose prefix is the beginning of it."""
    row = messages.row(ByteRenderer().encode(prefix).tolist() or [ord(" ")], version=None)
    row = msgspec.structs.replace(row, tokens=row.tokens if prefix else b"")
    prompt = Prompt("p", question, "1", code=code)
    groups = [messages.group(seq, row, prompt=prompt, seed=seq) for seq in range(len(texts))]
    sampling = Sampling(temperature=0.0, max_new_tokens=limit)
    task: ScoreTask = messages.score_task(*groups, kind=kind, sampling=sampling)
    engine: Any = WatchingEngine(list(texts), prompt_bytes=len(question.encode()))
    link, pool = Tasks(task), VerifierPool(1, 5)
    scorer = Scorer(config, link, engine, ByteRenderer(), pool, ModelDigests("", "", ""))  # type: ignore[arg-type]
    try:
        scorer.run(lambda: False)
    finally:
        pool.close()
    (scores,) = link.sent
    assert isinstance(scores, Scores)
    return [verdict for group in scores.groups for verdict in group.verdicts]


@pytest.mark.parametrize("kind", ["train", "eval"])
def test_a_completion_ends_with_its_answer_and_is_counted(tmp_path: Path, kind: TaskKind) -> None:
    stopped, whole, cut = score(
        config_of(tmp_path), ANSWER + AFTER, "so \\boxed{1}", "no answer, " * 9, kind=kind
    )
    assert (stopped.completion, stopped.reward, stopped.finish) == (ANSWER, 1.0, "eos")
    assert stopped.completion_tokens == len(ANSWER)
    assert (whole.reward, whole.finish, cut.finish) == (1.0, "eos", "length")
    assert [each.stopped_share for each in (stopped, whole, cut)] == [1.0, 0.0, 0.0]


def test_without_the_setting_it_goes_on_to_another_answer(tmp_path: Path) -> None:
    config = config_of(tmp_path, stop_when_answered=False)
    (verdict,) = score(config, ANSWER + AFTER)
    assert (verdict.extracted, verdict.stopped_share) == ("2", 0.0)


def test_an_answer_in_the_prefix_does_not_end_what_the_target_writes(tmp_path: Path) -> None:
    prefix = "so \\boxed{2}.\n\n"
    (verdict,) = score(config_of(tmp_path), prefix + "Wait.\n\n" + ANSWER + AFTER, prefix=prefix)
    assert verdict.completion == prefix + "Wait.\n\n" + ANSWER
    assert (verdict.reward, verdict.is_answered, verdict.stopped_share) == (1.0, True, 1.0)


def test_a_box_that_the_prefix_opens_ends_the_text_where_the_target_closes_it(
    tmp_path: Path,
) -> None:
    (verdict,) = score(config_of(tmp_path), ANSWER + AFTER, prefix="so \\boxed{")
    assert (verdict.completion, verdict.stopped_share) == (ANSWER, 1.0)


def test_a_thought_that_the_prompt_opens_is_not_ended_by_a_box(tmp_path: Path) -> None:
    text = "\\boxed{3}\n\n</think>" + ANSWER + AFTER
    (verdict,) = score(config_of(tmp_path), text, question="1?<think>")
    assert verdict.completion == "\\boxed{3}\n\n</think>" + ANSWER and verdict.reward == 1.0


def test_rows_of_another_verifier_are_written_to_their_ends(tmp_path: Path) -> None:
    (verdict,) = score(config_of(tmp_path), ANSWER + AFTER, code="answers")
    assert (verdict.completion, verdict.stopped_share) == (ANSWER + AFTER, 0.0)


def test_an_extended_text_ends_with_the_answer_that_its_first_part_began(tmp_path: Path) -> None:
    config = config_of(tmp_path, truncated="extend", extension_tokens=40)
    at = ANSWER.index("1")
    (verdict,) = score(config, ANSWER + AFTER, limit=at)
    assert (verdict.completion, verdict.finish, verdict.stopped_share) == (ANSWER, "eos", 1.0)


def test_the_share_of_several_continuations_is_their_mean(tmp_path: Path) -> None:
    config = config_of(tmp_path, continuations=2, temperature=0.7)
    row = messages.row([ord(" ")], version=None)
    row = msgspec.structs.replace(row, tokens=b"")
    group = messages.group(0, row, prompt=Prompt("p", QUESTION, "1"), seed=0)
    sampling = Sampling(temperature=0.7, max_new_tokens=LIMIT)
    engine: Any = WatchingEngine(["so \\boxed{1}", ANSWER + AFTER], prompt_bytes=1)
    link, pool = Tasks(messages.score_task(group, sampling=sampling)), VerifierPool(1, 5)
    try:
        Scorer(config, link, engine, ByteRenderer(), pool, ModelDigests("", "", "")).run(  # type: ignore[arg-type]
            lambda: False
        )
    finally:
        pool.close()
    (scores,) = link.sent
    assert isinstance(scores, Scores)
    assert scores.groups[0].verdicts[0].stopped_share == 0.5
    assert batch_fractions([batch_group(scores.groups[0])])["stopped_when_answered_fraction"] == 0.5


# --- a real target --------------------------------------------------------------------------------


@pytest.mark.parametrize("bitwise", [False, True])
def test_a_real_target_is_ended_and_judged_by_its_first_answer(
    tmp_path: Path, bitwise: bool
) -> None:
    plain = base_model(EXAMPLE / "target", tmp_path / "plain")
    config = run_of(plain)
    ended = judged(config, make_engine("transformers", str(plain), "scorer", config))
    target = endless_target(tmp_path / "target")
    settings = (*AS_DECLARED, f"bitwise={str(bitwise).lower()}", "scorer.stop_when_answered=true")
    config = run_of(target, *settings)
    engine = make_engine("transformers", str(target), "scorer", config)
    groups = scored(config, engine, "Let us add them up:")
    stopped = [verdict for group in groups for verdict in group.verdicts]
    assert [each.reward for each in stopped] == [each.reward for each in ended]
    assert [each.extracted for each in stopped] == [each.extracted for each in ended]
    assert [each.completion.strip() for each in stopped] == [each.completion for each in ended]
    assert {(each.finish, each.stopped_share) for each in stopped} == {("eos", 1.0)}
    figures = batch_fractions([batch_group(group) for group in groups])
    assert figures["stopped_when_answered_fraction"] == 1.0 and not figures["truncated_fraction"]
    config = run_of(target, *settings[:-1])
    engine = make_engine("transformers", str(target), "scorer", config)
    assert {each.finish for each in judged(config, engine)} == {"length"}


# --- refusals -------------------------------------------------------------------------------------

STOP = "scorer.stop_when_answered=true"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("scorer.engine=simulated",), "engine = 'simulated': it writes a completion to its end"),
        (
            ("scorer.engine=openai", "scorer.openai.url=http://localhost:1/v1"),
            "leave stop_when_answered out, or use vllm or transformers",
        ),
        (
            ("reward.function=mine.py:score",),
            'reward.function = ".*mine.py:score": it would be given',
        ),
        (("reward.url=http://localhost:1",), "reward.url"),
        (("data.code=answers",), "with code = 'answers'"),
        (("scorer.prm.model=a/b", "scorer.prm.format=two_class"), "steps behind the answer"),
    ],
)
def test_the_setting_is_refused_where_an_answer_ends_otherwise(
    settings: tuple[str, ...], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        load(EXAMPLE / "run.toml", (STOP, *settings))


def test_direct_mode_has_no_target_to_end(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="stop_when_answered = true has no effect with mode"):
        load(EXAMPLE.parent / "arithmetic_direct" / "run.toml", (STOP,))


def test_a_worker_may_not_take_an_engine_that_cannot_end_a_completion(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    with pytest.raises(ConfigError, match="--engine simulated: stop_when_answered = true"):
        _with_overrides(config, "scorer", Overrides(engine="simulated"))
    assert _with_overrides(config, "scorer", Overrides(engine="vllm")).scorer.engine == "vllm"
    assert _with_overrides(config, "rollout", Overrides(engine="simulated"))
