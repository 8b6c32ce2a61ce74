"""Tasks without a prefix: what the scorer sends back of a draft, and of answers that the broker kept."""

from typing import Any

from prefixrl.common.config.load import load
from prefixrl.common.config.run import RunConfig
from prefixrl.common.prompts.rendering import renderer_of
from prefixrl.common.wire.messages.groups import GroupPrefixes, Prompt, Row, Sampling, TargetText
from prefixrl.common.wire.messages.worker import ModelDigests, Scores
from prefixrl.learner.broker.groups.answers import NO_PREFIX
from prefixrl.scorer.loop import Scorer
from prefixrl.scorer.verifier.pool import VerifierPool
from support import messages
from support.broker.scoring_world import ConstantEngine, Tasks, check_scores
from support.paths import EXAMPLE

QUESTION = "sum 3 1"
TEMPLATE = 'target.prompt_template="""{problem}\n{prefix}"""'
GREEDY = Sampling(temperature=0.0, max_new_tokens=30)


def config_of(*settings: str) -> RunConfig:
    return load(EXAMPLE / "run.toml", ('target.placement="advice"', TEMPLATE, *settings))


def row_of(text: str) -> Row:
    return messages.row([7, 8], "length", None, text=text)


def prompt_of(config: RunConfig, advice: str) -> str:
    renderer = renderer_of(config, "scorer")
    return renderer.decode_with_special(renderer.prompt(QUESTION, advice=advice))


def scores_of(
    config: RunConfig, *groups: GroupPrefixes, **fields: Any
) -> tuple[Scores, list[str], Any]:
    """Return the scorer's result, the rows as the target read them, and the verifier."""
    renderer = renderer_of(config, "scorer")
    link: Any = Tasks(messages.score_task(*groups, sampling=GREEDY, **fields))
    engine: Any = ConstantEngine(renderer.encode("so \\boxed{4}"))
    pool: Any = CountingPool(1, 5)
    try:
        Scorer(config, link, engine, renderer, pool, ModelDigests("", "", "")).run(lambda: False)
    finally:
        pool.close()
    (scores,) = link.sent
    read = [renderer.decode_with_special(row) for job in engine.jobs for row in job.rows]
    return scores, read, pool


class CountingPool(VerifierPool):
    """Counts the answers that are judged."""

    judged = 0

    def submit(self, *answer: Any) -> None:
        self.judged += 1
        super().submit(*answer)


def test_a_draft_is_the_answer_without_advice_and_nothing_is_judged() -> None:
    config = config_of("adapter.sees=draft", "reward.no_leak=true")
    prefixes = messages.group(0, NO_PREFIX, prompt=Prompt("p", QUESTION, ""), prompt_tokens=b"")
    scores, read, pool = scores_of(config, prefixes, kind="draft", version=-1)
    (group,) = scores.groups
    (verdict,) = group.verdicts
    check_scores(group, 1, kind="draft")
    assert read == [prompt_of(config, "")]
    assert verdict.completion == "so \\boxed{4}" and verdict.status == "no_gold"
    assert verdict.completion_tokens > 0
    assert scores.prompt_tokens == renderer_of(config, "scorer").prompt(QUESTION).size
    assert pool.judged == 0


def test_an_answer_that_the_broker_kept_is_judged_and_not_asked_for() -> None:
    config = config_of()
    prompt = Prompt("p", QUESTION, "4")
    group = messages.group(0, row_of("add up"), prompt=prompt)
    other = messages.group(1, row_of("count"), prompt=prompt)
    kept_answers = TargetText("so \\boxed{5}", "eos"), None
    scores, read, pool = scores_of(config, group, other, kind="eval", answers=kept_answers)
    first, second = (each.verdicts[0] for each in scores.groups)
    assert read == [prompt_of(config, "count")]
    assert (first.reward, first.completion, first.was_cached) == (0.0, "so \\boxed{5}", True)
    assert first.completion_tokens == 0
    assert (second.reward, second.completion, second.was_cached) == (1.0, "so \\boxed{4}", False)
    assert pool.judged == 2
    assert scores.prompt_tokens == 0


def test_a_task_whose_answers_are_all_kept_needs_no_engine() -> None:
    group = messages.group(0, row_of("add up"), prompt=Prompt("p", QUESTION, "4"))
    kept_answers = (TargetText("so \\boxed{4}", "length"),)
    scores, read, _ = scores_of(config_of(), group, kind="eval", answers=kept_answers)
    verdict = scores.groups[0].verdicts[0]
    assert read == []
    assert (verdict.reward, verdict.finish, verdict.was_cached) == (1.0, "length", True)
