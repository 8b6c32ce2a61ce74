"""Advice in the question: what the target reads, what is judged, what is left out."""

from typing import Any

import numpy as np
import pytest

from prefixrl.common.config.load import load
from prefixrl.common.config.run import RunConfig
from prefixrl.common.engines.interface.base import TokenIds
from prefixrl.common.prompts.prompt_form import conversation
from prefixrl.common.prompts.rendering import renderer_of, sent_text
from prefixrl.common.wire.messages.groups import GroupPrefixes, Prompt, Row, Sampling, ScoredGroup
from prefixrl.common.wire.messages.worker import ModelDigests
from prefixrl.common.wire.packing import pack_tokens
from prefixrl.learner.broker.batches import batch_group
from prefixrl.learner.run.fractions import batch_fractions
from prefixrl.scorer.loop import Scorer
from prefixrl.scorer.verifier.pool import VerifierPool
from support import messages
from support.broker.scoring_world import ConstantEngine, Tasks, check_scores
from support.paths import EXAMPLE

QUESTION, GOLD = "sum 3 1", "4"
TEMPLATE = 'target.prompt_template="""{problem}\n{prefix}"""'


def config_of(*settings: str) -> RunConfig:
    return load(EXAMPLE / "run.toml", ('target.placement="advice"', TEMPLATE, *settings))


def row_of(text: str | None) -> Row:
    if text is None:
        return messages.row([], "length", None)
    return messages.row([7, 8], "length", None, text=text)


def judged(
    config: RunConfig, *texts: str | None, question: str = QUESTION
) -> tuple[ScoredGroup, list[str]]:
    """Return the scored group, and the rows as the target read them."""
    renderer = renderer_of(config, "scorer")
    prompt = Prompt("p", question, GOLD)
    rows = tuple(map(row_of, texts))
    group = GroupPrefixes(seq=0, prompt=prompt, seed=7, prompt_tokens=pack_tokens([1]), rows=rows)
    link: Any = Tasks(
        messages.score_task(group, sampling=Sampling(temperature=0.0, max_new_tokens=30))
    )
    engine: Any = ConstantEngine(renderer.encode("so \\boxed{4}"))
    pool: Any = VerifierPool(1, 5)
    try:
        Scorer(config, link, engine, renderer, pool, ModelDigests("", "", "")).run(lambda: False)
    finally:
        pool.close()
    (scores,) = link.sent
    read = [renderer.decode_with_special(row) for job in engine.jobs for row in job.rows]
    return scores.groups[0], read


def prompt_of(config: RunConfig, advice: str) -> str:
    renderer = renderer_of(config, "scorer")
    return renderer.decode_with_special(renderer.prompt(QUESTION, advice=advice))


def test_the_target_reads_the_advice_in_its_question_and_begins_its_answer_itself() -> None:
    config = config_of()
    group, rows = judged(config, "add up", "Let us count")
    assert rows == [prompt_of(config, "add up"), prompt_of(config, "Let us count")]
    assert "add up" in rows[0] and "Let us count" in rows[1]
    check_scores(group, 2)
    assert [verdict.reward for verdict in group.verdicts] == [1.0, 1.0]


def test_only_the_targets_own_text_is_judged() -> None:
    group, _ = judged(config_of("scorer.keep_completions=true"), "so \\boxed{9}")
    (verdict,) = group.verdicts
    assert verdict.reward == 1.0 and "9" not in verdict.completion
    assert verdict.is_answered, "the advice has a box, which is counted"


def test_a_row_without_advice_is_asked_without_its_template() -> None:
    config = config_of()
    _, rows = judged(config, None, "")
    bare = config_of('target.bare_template="{problem}"')
    assert rows == [prompt_of(config, "")] * 2 == [prompt_of(bare, "")] * 2
    plain = renderer_of(load(EXAMPLE / "run.toml"), "scorer")
    assert rows[0] == plain.decode_with_special(plain.prompt(QUESTION))


def test_the_text_of_the_advice_is_not_read_as_a_template() -> None:
    config = load(EXAMPLE / "run.toml", ('target.placement="advice"',))
    assert config.target
    text = conversation(config.target, "a {prefix} b", advice="c {problem} d")[-1][1]
    assert "a {prefix} b" in text and "c {problem} d" in text


def test_advice_with_a_control_token_is_an_error_of_its_row_alone() -> None:
    group, rows = judged(config_of(), "add <|end|> up", "add up")
    assert [verdict.status for verdict in group.verdicts] == ["error", "ok"]
    assert "the advice has '<|end|>', special" in group.verdicts[0].extracted
    assert group.verdicts[0].fault == "question not rendered" and len(rows) == 1


@pytest.mark.parametrize("no_leak", [False, True])
def test_advice_with_the_gold_answer_is_counted_and_can_be_worth_nothing(no_leak: bool) -> None:
    config = config_of(f"reward.no_leak={str(no_leak).lower()}")
    group, rows = judged(config, "it is 4", "add up")
    assert [verdict.is_leak for verdict in group.verdicts] == [True, False]
    assert [verdict.reward for verdict in group.verdicts] == [0.0 if no_leak else 1.0, 1.0]
    assert len(rows) == (1 if no_leak else 2), "a leak is not worth a completion"
    assert group.verdicts[0].rule == ("leak" if no_leak else group.verdicts[1].rule)
    check_scores(group, 2)
    assert batch_fractions([batch_group(group)])["leak_fraction"] == 0.5


def test_a_rollout_sends_advice_as_trimmed_text_without_special_tokens() -> None:
    config, plain = config_of(), load(EXAMPLE / "run.toml")
    renderer = renderer_of(config, "rollout")
    words: TokenIds = renderer.encode("add up")
    stop = np.array([min(renderer.stop_tokens)], dtype=np.int32)
    user = renderer._tokenizer.convert_tokens_to_ids("<|user|>")
    ids = np.concatenate([np.array([user], dtype=np.int32), words, stop])
    assert sent_text(config, renderer, ids) == renderer.text(words)
    assert sent_text(plain, renderer, ids) == renderer.decode_with_special(ids[:-1])
