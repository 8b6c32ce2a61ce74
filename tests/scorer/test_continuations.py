"""Several continuations per prefix in the scorer's loop, and completions from its memory.

What changes and what must not.
"""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from prefixrl.common.config.load import load
from prefixrl.common.config.run import RunConfig
from prefixrl.common.engines.interface.base import Job
from prefixrl.common.engines.make import make_engine
from prefixrl.common.prompts.rendering import ByteRenderer, Renderer
from prefixrl.common.seeds import row_uniforms
from prefixrl.common.wire.messages.groups import (
    GroupPrefixes,
    Prompt,
    Row,
    Sampling,
    TargetText,
    TaskKind,
    TextVerdict,
    Verdict,
)
from prefixrl.common.wire.messages.worker import ModelDigests, Refused, Revoke, Scores, ScoreTask
from prefixrl.common.wire.packing import pack_tokens
from prefixrl.learner.data import problems
from prefixrl.scorer.loop import Scorer
from prefixrl.scorer.verifier.pool import VerifierPool
from support import messages
from support.broker.scoring_world import Tasks, WritingEngine, check_scores
from support.fakes import run_on_disk
from support.runs.run_helper import RUN_FILE

M, LIMIT = 3, 20
EMPTY = Row(tokens=b"", logprobs=b"", finish="length", spans=())


def run_config(folder: Path, **scorer: Any) -> RunConfig:
    given = {"max_new_tokens": LIMIT, "engine": "simulated", "continuations": M} | scorer
    return run_on_disk(folder, scorer=given, rollout={"engine": "simulated"})


def task_of(
    rows: int, kind: TaskKind = "train", question: str = "?", seeds: Any = (7, 8)
) -> ScoreTask:
    """Groups of prefixes of no token."""
    groups = tuple(
        GroupPrefixes(
            seq=seq,
            prompt=Prompt(f"p{seq}", question, "1"),
            seed=seed,
            prompt_tokens=b"",
            rows=(EMPTY,) * rows,
        )
        for seq, seed in enumerate(seeds)
    )
    return messages.score_task(
        *groups, kind=kind, sampling=Sampling(temperature=0.7, max_new_tokens=LIMIT)
    )


def run(scorer: Scorer, pool: VerifierPool) -> None:
    try:
        scorer.run(lambda: False)
    finally:
        pool.close()


def score(config: RunConfig, task: ScoreTask, texts: list[str]) -> tuple[list[Verdict], list[Job]]:
    """Verdicts of a scorer whose target writes these texts, and what the target was asked for."""
    engine, pool, link = WritingEngine(texts, prompt_bytes=1), VerifierPool(1, 5), Tasks(task)
    digests = ModelDigests("", "", "")
    run(Scorer(config, link, engine, ByteRenderer(), pool, digests), pool)  # type: ignore[arg-type]
    (scores,) = link.sent
    assert isinstance(scores, Scores)
    for group in scores.groups:
        check_verdicts(config, task, group)
    return [verdict for group in scores.groups for verdict in group.verdicts], engine.jobs


def check_verdicts(config: RunConfig, task: ScoreTask, group: Any) -> None:
    """Check that the broker accepts it, apart from an empty prefix, which no rollout sends."""
    prefixes = msgspec.structs.replace(group.prefixes, rows=tuple(LONGER for _ in group.verdicts))
    prefixes = msgspec.structs.replace(prefixes, prompt_tokens=pack_tokens([1]))
    whole = msgspec.structs.replace(group, prefixes=prefixes, version=-1)
    check_scores(whole, len(group.verdicts), config.scorer.texts_per_row(task.kind))


LONGER = messages.row([1], version=None)
RIGHT, WRONG, NONE = r"\boxed{1}", r"\boxed{2}", "I say no"
LONG = r"Long thoughts: it is \boxed{1}"
"""Right, but for the limit."""


def test_every_prefix_is_completed_so_often_and_worth_the_mean(tmp_path: Path) -> None:
    texts = [RIGHT, WRONG, RIGHT, *[NONE] * 3, *[RIGHT] * 3, WRONG, WRONG, RIGHT]
    verdicts, (job,) = score(run_config(tmp_path, keep_completions=True), task_of(2), texts)
    assert [verdict.reward for verdict in verdicts] == [2 / 3, 0.0, 1.0, 1 / 3]
    assert [verdict.status for verdict in verdicts] == ["ok", "no_answer", "ok", "ok"]
    each = [one for verdict in verdicts for one in verdict.continuations]
    assert [one.completion for one in each] == texts
    assert [one.extracted for one in each[:4]] == ["1", "2", "1", ""]
    assert verdicts[0].completion_tokens == len(RIGHT + WRONG + RIGHT) + M  # and their stops
    assert len(job.rows) == 2 * 2 * M


def test_every_continuation_has_draws_of_its_own_which_a_second_attempt_repeats(
    tmp_path: Path,
) -> None:
    texts = [RIGHT] * 12
    _, (job,) = score(run_config(tmp_path / "3"), task_of(2), texts)
    assert len(np.unique(job.uniforms)) == job.uniforms.size == 12 * LIMIT
    _, (again,) = score(run_config(tmp_path / "3"), task_of(2), texts)
    assert (again.uniforms == job.uniforms).all()
    # The first is what there is without the setting, and that is what it always was.
    _, (single,) = score(run_config(tmp_path / "1", continuations=1), task_of(2), texts[:4])
    assert (job.uniforms[::M] == single.uniforms).all()
    drawn = [row_uniforms(seed, "completion", 2, LIMIT) for seed in (7, 8)]
    assert (single.uniforms == np.concatenate(drawn)).all()


def test_evaluations_complete_a_prefix_once(tmp_path: Path) -> None:
    verdicts, (job,) = score(run_config(tmp_path), task_of(2, "eval"), [RIGHT, WRONG] * 2)
    assert [verdict.reward for verdict in verdicts] == [1, 0, 1, 0]
    assert len(job.rows) == 4 and not any(verdict.continuations for verdict in verdicts)


@pytest.mark.parametrize(
    ("truncated", "reward", "statuses"),
    [
        ("judge", 1 / 3, ["ok", "ok", "no_answer"]),
        ("zero", 1 / 3, ["ok", "ok", "no_answer"]),
        ("mask", 1 / 2, ["ok", "ok", "truncated"]),
        ("extend", 2 / 3, ["ok", "ok", "ok"]),
    ],
)
def test_a_cut_continuation_is_worth_what_the_setting_says(
    truncated: str, reward: float, statuses: list[str], tmp_path: Path
) -> None:
    config = run_config(tmp_path, truncated=truncated)
    (verdict,), jobs = score(config, task_of(1, seeds=(7,)), [RIGHT, WRONG, LONG])
    assert verdict.reward == pytest.approx(reward)
    assert [one.status for one in verdict.continuations] == statuses
    assert len(jobs) == 1 + (truncated == "extend")


def test_a_row_of_nothing_but_cut_continuations_is_left_out(tmp_path: Path) -> None:
    config = run_config(tmp_path, truncated="mask")
    (verdict,), _ = score(config, task_of(1, seeds=(7,)), [LONG] * 3)
    assert (verdict.status, verdict.finish, verdict.is_judged) == ("truncated", "length", False)


def test_extensions_have_draws_by_row_and_continuation(tmp_path: Path) -> None:
    config = run_config(tmp_path, truncated="extend", extension_tokens=5)
    _, (cut, extension) = score(
        config, task_of(2, seeds=(7,)), [RIGHT, LONG, LONG, LONG, LONG, RIGHT]
    )
    expected = [("extension 1", 0), ("extension 2", 0), ("extension", 1), ("extension 1", 1)]
    drawn = [row_uniforms(7, purpose, row + 1, 5)[row] for purpose, row in expected]
    assert (extension.uniforms == np.stack(drawn)).all()
    assert not np.isin(extension.uniforms, cut.uniforms).any()


def test_a_question_that_cannot_be_rendered_is_an_error_of_every_continuation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(
        renderer: ByteRenderer, question: str, system: str, earlier: Any, advice: str = ""
    ) -> Any:
        raise ValueError("too long")

    monkeypatch.setattr(ByteRenderer, "prompt", refuse)
    verdicts, jobs = score(run_config(tmp_path), task_of(2), [])
    assert not jobs and {verdict.status for verdict in verdicts} == {"error"}
    assert {one.fault for verdict in verdicts for one in verdict.texts} == {"question not rendered"}
    assert [len(verdict.texts) for verdict in verdicts] == [M] * 4


OPENINGS = ("Let us add them up:", "Let us find the biggest one:", "Let us")
CACHE = "scorer.cache_bytes=1048576"


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(str(RUN_FILE.parent / "target"), 512)


def example(folder: Path, *settings: str) -> RunConfig:
    usual = (f"directory={folder}", "scorer.keep_completions=true", "scorer.engine=transformers")
    return load(RUN_FILE, (*usual, *settings))


def real_task(config: RunConfig, renderer: Renderer, name: str, which: range) -> ScoreTask:
    """Groups of problems of the example, four rows each, of three openings one twice."""
    texts = [OPENINGS[0], *OPENINGS]
    prefixes = [renderer.encode(text) for text in texts]
    rows = tuple(messages.row(ids, version=None) for ids in prefixes)
    known = problems.load(config.data.train, config.data)
    groups = tuple(
        GroupPrefixes(
            seq=seq,
            prompt=known[seq].prompt(),
            seed=100 + seq,
            prompt_tokens=pack_tokens([1]),
            rows=rows,
        )
        for seq in which
    )
    return messages.score_task(*groups, task=name, sampling=config.scorer_sampling())


def really_score(config: RunConfig, renderer: Renderer, *tasks: ScoreTask) -> list[list[Verdict]]:
    """One scorer with the real target and verifier, the tasks one after the other."""
    assert config.target is not None
    engine = make_engine("transformers", config.target.model, "scorer", config)
    link, pool = Tasks(*tasks, one_by_one=True), VerifierPool(1, 5)
    run(Scorer(config, link, engine, renderer, pool, ModelDigests("", "", "")), pool)  # type: ignore[arg-type]
    results = [each for each in link.sent if isinstance(each, Scores)]
    assert [each.task for each in results] == [each.task for each in tasks]
    return [[row for group in each.groups for row in group.verdicts] for each in results]


def told(verdict: TextVerdict) -> tuple[Any, ...]:
    """Return the verdicts without the cost of their texts."""
    return verdict.reward, verdict.status, verdict.extracted, verdict.finish, verdict.completion


@pytest.mark.parametrize(("truncated", "limit"), [("judge", 20), ("extend", 12)])
def test_a_cache_changes_no_verdict_and_spares_the_target_what_it_knows(
    truncated: str, limit: int, renderer: Renderer, tmp_path: Path
) -> None:
    limits = (f"scorer.truncated={truncated}", f"scorer.max_new_tokens={limit}")
    greedy = ("scorer.temperature=0.0", *limits)
    off, on = example(tmp_path, *greedy), example(tmp_path, *greedy, CACHE)
    whole = [("a", range(6)), ("b", range(4, 10)), ("c", range(10))]
    tasks = [real_task(off, renderer, name, which) for name, which in whole]
    without = really_score(off, renderer, *tasks)
    with_cache = really_score(on, renderer, *tasks)
    for one, other in zip(without, with_cache, strict=True):
        assert [told(verdict) for verdict in one] == [told(verdict) for verdict in other]
    rewards = [verdict.reward for task in without for verdict in task]
    assert 0 < sum(rewards) < len(rewards), "a test of nothing"
    assert not any(verdict.was_cached for task in without for verdict in task)
    cached = [sum(verdict.was_cached for verdict in task) for task in with_cache]
    # Of each group the opening that comes twice; then two known problems; then all of them.
    assert cached == [6, 6 + 2 * 3, 10 * 4]
    for verdict in with_cache[2]:
        assert verdict.completion_tokens == 0 and verdict.completion


def test_a_sampled_target_is_asked_for_every_row_whatever_its_cache(
    renderer: Renderer, tmp_path: Path
) -> None:
    """A scorer that gets a task after another one died gives the same verdicts, continuation by continuation."""
    config = example(tmp_path, CACHE, "scorer.continuations=3")
    task = real_task(config, renderer, "a", range(3))
    ((*actual,), (*repeated,)) = really_score(config, renderer, task, task)
    (elsewhere,) = really_score(config, renderer, task)
    assert list(map(drawn, actual)) == list(map(drawn, repeated)) == list(map(drawn, elsewhere))
    assert not any(verdict.was_cached for verdict in actual)
    assert any(len(set(drawn(verdict))) > 1 for verdict in actual), "draws of their own"
    assert {round(3 * verdict.reward, 9) for verdict in actual} <= {0, 1, 2, 3}
    single = example(tmp_path)
    (once,) = really_score(single, renderer, real_task(single, renderer, "a", range(3)))
    assert [drawn(verdict)[0] for verdict in actual] == [told(verdict) for verdict in once]


class Revocable(WritingEngine):
    """Starts nothing before the next step, until when a job may be called off."""

    def cancel(self, key: str) -> bool:
        before, self._open = len(self._open), [job for job in self._open if job.key != key]
        return len(self._open) < before


def test_a_task_that_was_taken_back_leaves_nothing_and_can_be_done_again(tmp_path: Path) -> None:
    config = run_config(tmp_path, continuations=1, cache_bytes=2**20)
    greedy = msgspec.structs.replace(
        task_of(1, seeds=(7,)), sampling=Sampling(temperature=0.0, max_new_tokens=LIMIT)
    )
    link = Tasks(greedy, Revoke("t"), msgspec.structs.replace(greedy, task="u"))
    engine, pool = Revocable([RIGHT], prompt_bytes=1), VerifierPool(1, 5)
    digests = ModelDigests("", "", "")
    scorer = Scorer(config, link, engine, ByteRenderer(), pool, digests)  # type: ignore[arg-type]
    run(scorer, pool)
    refused, scores = link.sent
    assert isinstance(refused, Refused) and isinstance(scores, Scores) and scores.task == "u"
    assert scores.groups[0].verdicts[0].reward == 1.0
    assert not scorer._completions._open_jobs and not scorer._decoding


def test_equal_rows_of_two_tasks_under_way_are_asked_for_once_and_the_first_task_stays(
    tmp_path: Path,
) -> None:
    """Both tasks come before the engine writes; the first is called off while the second waits for its row."""
    config = run_config(tmp_path, continuations=1, cache_bytes=2**20)
    greedy = msgspec.structs.replace(
        task_of(1, seeds=(7,)), sampling=Sampling(temperature=0.0, max_new_tokens=LIMIT)
    )
    second = msgspec.structs.replace(greedy, task="u")
    link = Tasks(greedy, second, Revoke(greedy.task))
    engine, pool = Revocable([RIGHT], prompt_bytes=1), VerifierPool(1, 5)
    digests = ModelDigests("", "", "")
    scorer = Scorer(config, link, engine, ByteRenderer(), pool, digests)  # type: ignore[arg-type]
    run(scorer, pool)
    assert [len(job.rows) for job in engine.jobs] == [1]
    scores = {each.task: each for each in link.sent if isinstance(each, Scores)}
    assert scores.keys() == {greedy.task, "u"} and len(link.sent) == 2
    verdicts = [scores[name].groups[0].verdicts[0] for name in (greedy.task, "u")]
    assert [verdict.reward for verdict in verdicts] == [1.0, 1.0]
    assert [verdict.was_cached for verdict in verdicts] == [False, True]
    assert [verdict.completion_tokens > 0 for verdict in verdicts] == [True, False]
    assert not scorer._completions._open_jobs and not scorer._decoding


def test_a_task_with_kept_answers_stays_although_it_is_called_off(tmp_path: Path) -> None:
    """Its kept answers are with the verifier at once."""
    config = run_config(tmp_path, continuations=1)
    sampling = Sampling(temperature=0.0, max_new_tokens=LIMIT)
    kept = (TargetText("\\boxed{5}", "eos"), None)
    task = msgspec.structs.replace(task_of(2, seeds=(7,)), kind="eval", sampling=sampling)
    link = Tasks(msgspec.structs.replace(task, answers=kept), Revoke("t"))
    engine, pool = Revocable([RIGHT], prompt_bytes=1), VerifierPool(1, 5)
    digests = ModelDigests("", "", "")
    scorer = Scorer(config, link, engine, ByteRenderer(), pool, digests)  # type: ignore[arg-type]
    run(scorer, pool)
    (scores,) = link.sent
    assert isinstance(scores, Scores)
    verdicts = [verdict for group in scores.groups for verdict in group.verdicts]
    assert [verdict.was_cached for verdict in verdicts] == [True, False]


def drawn(verdict: Verdict) -> list[tuple[Any, ...]]:
    return [told(one) for one in verdict.continuations]
