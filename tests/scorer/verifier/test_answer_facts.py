"""Facts about an answer that a reward function takes besides its text, in real children; cut answers of direct mode."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from prefixrl.common.config.foreign import user_function
from prefixrl.common.config.load import load
from prefixrl.common.config.run import RunConfig
from prefixrl.common.prompts.rendering import ByteRenderer, renderer_of
from prefixrl.common.run.digests import function_digest
from prefixrl.common.wire.messages.groups import (
    Finish,
    GroupPrefixes,
    Prompt,
    Row,
    Sampling,
    TargetText,
    Verdict,
)
from prefixrl.common.wire.messages.worker import ModelDigests, ScoreTask
from prefixrl.common.wire.packing import pack_tokens
from prefixrl.scorer.direct import Decoder, DirectScorer
from prefixrl.scorer.loop import Scorer
from prefixrl.scorer.verifier.exchange import AnswerFacts
from prefixrl.scorer.verifier.pool import RewardFunction, VerifierPool
from support import messages
from support.broker.scoring_world import Tasks, WritingEngine
from support.paths import EXAMPLE, EXAMPLES

TELLS = """
def score(question, text, gold, finish, tokens, source, prefix):
    facts = {"tokens": tokens, "was_cut": finish == "length", "prefix": len(prefix), "source": len(source)}
    assert finish in ("stop", "length")
    return {"reward": float(text.startswith(prefix))} | facts
"""
TOKENS_ALONE = "def score(question, text, gold, *, tokens):\n    return tokens / 100\n"
WITHOUT = "def score(question, text, gold):\n    return 0.5\n"
WITHOUT_BUT_VERDICT = (
    "def score(question, text, gold, verdict):\n    return 0.5 + verdict.reward / 2\n"
)
DIRECT = EXAMPLES / "arithmetic_direct"
SOURCE = "sums/easy"
LIMIT = 20
TEMPLATE = 'target.prompt_template="""{problem}\n{prefix}"""'


def pool_of(folder: Path, source: str) -> VerifierPool:
    path = folder / "mine.py"
    path.write_text(source)
    return VerifierPool(1, 60, RewardFunction(f"{path}:score", function_digest(f"{path}:score")))


def verdicts_of(scorer: Any, pool: VerifierPool, link: Any) -> list[Verdict]:
    try:
        scorer.run(lambda: False)
    finally:
        pool.close()
    return [each for scores in link.sent for group in scores.groups for each in group.verdicts]


def task_of(rows: Sequence[Row], **fields: Any) -> ScoreTask:
    prompt = Prompt("p", "?", "4", source=SOURCE)
    group = GroupPrefixes(
        seq=0, prompt=prompt, seed=7, prompt_tokens=pack_tokens([1]), rows=tuple(rows)
    )
    sampling = Sampling(temperature=0.0, max_new_tokens=LIMIT)
    return messages.score_task(group, sampling=sampling, **fields)


def completed(
    folder: Path, prefixes: Sequence[str], texts: list[str], *settings: str, **fields: Any
) -> list[Verdict]:
    """Return verdicts on the texts that a target writes behind prefixes; a token is a byte."""
    simulated = ("scorer.engine=simulated", "rollout.engine=simulated")
    config = load(EXAMPLE / "run.toml", (*simulated, *settings))
    rows = [
        messages.row(ByteRenderer().encode(text).tolist(), version=None, text=text)
        for text in prefixes
    ]
    link, pool = Tasks(task_of(rows, **fields)), pool_of(folder, TELLS)
    engine, digests = WritingEngine(texts, prompt_bytes=1), ModelDigests("", "", "")
    scorer = Scorer(config, link, engine, ByteRenderer(), pool, digests)  # type: ignore[arg-type]
    return verdicts_of(scorer, pool, link)


def parts(**given: float) -> dict[str, float]:
    return {"was_cut": 0.0, "source": float(len(SOURCE))} | given


def test_a_function_learns_tokens_finish_prefix_and_source_of_a_completion(tmp_path: Path) -> None:
    texts = ["Let us see \\boxed{4}", "Now: " + "." * 100, "4"]
    whole, cut, bare = completed(tmp_path, ["Let us ", "Now: ", ""], texts)
    assert [each.reward for each in (whole, cut, bare)] == [1.0] * 3
    # A token is a byte; the stop that ended a text is one of its tokens, as for the limit.
    assert whole.parts == parts(prefix=7, tokens=len(texts[0]) - 7 + 1)
    assert cut.parts == parts(prefix=5, tokens=LIMIT, was_cut=1.0)
    assert bare.parts == parts(prefix=0, tokens=2)
    assert [each.finish for each in (whole, cut, bare)] == ["eos", "length", "eos"]


def test_an_extended_completion_ends_where_its_extension_does(tmp_path: Path) -> None:
    text = "." * 30
    (verdict,) = completed(tmp_path, [""], [text], "scorer.truncated=extend")
    assert verdict.parts == parts(prefix=0, tokens=len(text) + 1)


def test_a_cached_completion_and_one_that_the_broker_kept_have_their_tokens(tmp_path: Path) -> None:
    texts = ["so \\boxed{4}"] * 2
    _, cached = completed(tmp_path, ["so "] * 2, texts[:1], "scorer.cache_bytes=2_000_000")
    assert cached.was_cached and cached.completion_tokens == 0
    assert cached.parts == parts(prefix=3, tokens=len("\\boxed{4}") + 1)
    answers = (TargetText("so \\boxed{4}", "eos"),)
    (kept,) = completed(tmp_path, ["so "], [], kind="eval", answers=answers)
    assert kept.parts == parts(prefix=3, tokens=len("\\boxed{4}"))


def test_advice_is_the_prefix_of_a_text_that_does_not_begin_with_it(tmp_path: Path) -> None:
    settings = ('target.placement="advice"', TEMPLATE)
    (verdict,) = completed(tmp_path, ["add up"], ["so \\boxed{4}"], *settings)
    assert verdict.reward == 0.0
    assert verdict.parts["prefix"] == len("add up")


# --- direct mode: cut answers ---------------------------------------------------------------------

ANSWER = "Let us add them up: 3 4 so \\boxed{4}"


def direct_config(folder: Path, source: str, *settings: str) -> RunConfig:
    (folder / "mine.py").write_text(source)
    return load(DIRECT / "run.toml", (f"reward.function={folder}/mine.py:score", *settings))


def answered(folder: Path, source: str, *settings: str) -> list[Verdict]:
    """Return verdicts on an answer that ended, and on the same answer cut, twice."""
    config = direct_config(folder, source, *settings)
    tokens = renderer_of(config, "rollout").encode(ANSWER).tolist()
    ends: tuple[tuple[list[int], Finish], ...] = (
        (tokens, "length"),
        ([*tokens, 0], "eos"),
        (tokens, "length"),
    )
    tasks = [
        task_of([messages.row(ids, finish)], task=str(i)) for i, (ids, finish) in enumerate(ends)
    ]
    link, pool = Tasks(*tasks, one_by_one=True), pool_of(folder, source)
    decoder = Decoder(config.model_of("scorer"))
    scorer = DirectScorer(config, link, decoder, pool, ModelDigests("", "", ""))  # type: ignore[arg-type]
    return verdicts_of(scorer, pool, link)


def test_in_direct_mode_a_function_that_takes_finish_judges_cut_answers(tmp_path: Path) -> None:
    cut, whole, again = answered(tmp_path, TELLS)
    assert cut.status == whole.status == "ok" and cut.reward == 1.0
    assert whole.parts == parts(prefix=0, tokens=cut.parts["tokens"] + 1)
    assert cut.parts == again.parts == parts(prefix=0, tokens=cut.parts["tokens"], was_cut=1.0)
    assert (cut.finish, whole.finish, cut.completion_tokens) == ("length", "eos", 0)


@pytest.mark.parametrize("source", [WITHOUT, WITHOUT_BUT_VERDICT, TOKENS_ALONE])
def test_a_function_without_finish_never_sees_a_cut_answer_which_has_reward_0(
    tmp_path: Path, source: str
) -> None:
    # The first one waits until a child has said what the function takes, the last does not.
    cut, whole, again = answered(tmp_path, source)
    assert whole.status == "ok" and whole.reward > 0 and whole.rule == "function"
    for verdict in (cut, again):
        assert (verdict.reward, verdict.status, verdict.finish) == (0.0, "no_answer", "length")
        assert (verdict.extracted, verdict.rule, verdict.parts) == ("", "", {})


@pytest.mark.parametrize(
    ("truncated", "source", "expected"),
    [
        pytest.param("zero", TELLS, (0.0, "no_answer"), id="zero although it takes finish"),
        pytest.param("mask", TELLS, (0.0, "truncated"), id="mask although it takes finish"),
        pytest.param("judge", WITHOUT, (0.5, "ok"), id="judge although it takes no finish"),
    ],
)
def test_a_key_that_says_what_a_cut_answer_is_worth_holds_for_every_function(
    tmp_path: Path, truncated: str, source: str, expected: tuple[float, str]
) -> None:
    cut, whole, _ = answered(tmp_path, source, f"scorer.truncated={truncated}")
    assert (cut.reward, cut.status) == expected
    assert whole.status == "ok"


def test_many_cut_answers_that_wait_for_the_first_child_are_all_settled(tmp_path: Path) -> None:
    pool = pool_of(tmp_path, WITHOUT)
    cut = AnswerFacts(finish="length", is_zero_if_cut=True)
    results = {}
    try:
        for key in range(6):
            pool.submit(key, f"text {key // 2}", "4", "?", facts=cut if key % 3 else AnswerFacts())
        deadline_s = time.monotonic() + 200
        while pool.pending:
            assert time.monotonic() < deadline_s
            pool.wait(1.0)
            results |= dict(pool.poll())
    finally:
        pool.close()
    assert [results[key].reward for key in range(6)] == [0.5, 0, 0, 0.5, 0, 0]


def test_the_facts_are_those_that_a_function_may_take() -> None:
    _, by_name = user_function.CALLS["reward.function"]
    assert set(user_function.FACTS) == by_name - {"verdict", "verify"}
    assert set(user_function.FACTS) == set(AnswerFacts.__struct_fields__) - {"is_zero_if_cut"}
