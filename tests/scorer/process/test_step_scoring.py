"""Rewards of a scorer with a process reward model: coefficients, offsets, faults, evaluations."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from prefixrl.common.config.load import load
from prefixrl.common.run.digests import function_digest, process_digest, scorer_digests
from prefixrl.common.wire.messages.groups import (
    GroupPrefixes,
    Prompt,
    Row,
    ScoredGroup,
    TaskKind,
    TextVerdict,
    VersionSpan,
)
from prefixrl.common.wire.messages.worker import Scores
from prefixrl.common.wire.packing import check_verdicts, pack_logprobs, pack_tokens, token_ids
from prefixrl.learner.broker.batches import batch_group
from prefixrl.learner.broker.groups.filtering import AccuracyFilter, objection
from prefixrl.learner.broker.workers.identity import IdentityCheck
from prefixrl.learner.run.fractions import batch_fractions
from prefixrl.scorer.direct import Decoder, DirectScorer
from prefixrl.scorer.process.step_scoring import JudgedText, StepScoring
from prefixrl.scorer.process.steps import split_steps
from prefixrl.scorer.verifier.pool import RewardFunction, VerifierPool
from support.broker.scoring_world import Tasks, check_scores
from support.messages import score_task
from support.models.process_models import SEPARATOR, STEP_TAG, loaded, marked, settings_of
from support.paths import EXAMPLES

RUN_FILE = EXAMPLES / "arithmetic_direct" / "run.toml"
POLICY = EXAMPLES / "arithmetic_direct" / "policy"
QUESTION, GOLD = "sum 3 1", "4"
RIGHT = r"Let us add them up: 3 4 so \boxed{4}"
OTHER = r"Let us find the biggest one: 3 3 so \boxed{3}"


def row(text: str, finish: Any = "eos") -> Row:
    tokenizer = Decoder(str(POLICY))._tokenizer
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    ids += [tokenizer.token_to_id("<|end|>")] if finish == "eos" else []
    spans = (VersionSpan(3, "d3", len(ids)),)
    return Row(
        tokens=pack_tokens(ids),
        logprobs=pack_logprobs([-1.0] * len(ids)),
        finish=finish,
        spans=spans,
    )


def scored(
    folder: Path,
    *texts: Row,
    kind: TaskKind = "train",
    gold: str = GOLD,
    function: str | None = None,
    **keys: Any,
) -> ScoredGroup:
    """One group of a direct run whose scorer has the tiny model; `function`: its reward function."""
    config = load(RUN_FILE, (f"reward.function={function}",) if function else ())
    reward = RewardFunction(function, function_digest(function)) if function else None
    settings = settings_of(folder, **STEP_TAG | keys)
    group = GroupPrefixes(
        seq=0,
        prompt=Prompt("p", QUESTION, gold),
        seed=7,
        prompt_tokens=pack_tokens([1]),
        rows=texts,
    )
    task = score_task(group, kind=kind, version=3, weights_digest="d3", sampled_s=0.5)
    link, pool = Tasks(task), VerifierPool(1, 5, reward)
    scoring = StepScoring(settings, *loaded(folder, "step_tag"))
    digests = scorer_digests(config, str(POLICY), str(folder))
    scorer = DirectScorer(config, link, Decoder(str(POLICY)), pool, digests, scoring)  # type: ignore[arg-type]
    try:
        scorer.run(lambda: 0)
    finally:
        pool.close()
    (sent,) = [message for message in link.sent if isinstance(message, Scores)]
    check_scores(sent.groups[0], len(texts), kind=kind)
    return sent.groups[0]


def plain_scores(folder: Path, answer: str) -> list[float]:
    form, model = loaded(folder, "step_tag")
    return model.scores([marked(form, QUESTION, answer)])[0]


@pytest.mark.parametrize("takes_finish", [False, True])
def test_a_cut_answer_has_scores_where_a_function_judges_it_and_else_reward_0(
    step_tag_model: Path, tmp_path: Path, takes_finish: bool
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(f"def score(question, text, gold{', finish' * takes_finish}): return 0.5")
    cut = row(RIGHT, "length")
    group = scored(step_tag_model, cut, row(RIGHT), cut, function=f"{path}:score")
    first, whole, second = group.verdicts
    assert whole.process is not None and whole.outcome == 0.5
    for verdict in (first, second):
        assert (verdict.process is not None) is takes_finish
        assert takes_finish or (verdict.reward, verdict.status) == (0.0, "no_answer")


@pytest.mark.parametrize("aggregate", ["last", "min", "mean", "product"])
def test_a_row_has_the_reward_of_both_sources_and_the_scores_with_their_ends(
    step_tag_model: Path, aggregate: str
) -> None:
    keys = {"aggregate": aggregate, "coefficient": 0.75, "outcome_coefficient": 0.25}
    right, other = scored(step_tag_model, row(RIGHT), row(OTHER), **keys).verdicts
    for verdict, answer, outcome in ((right, RIGHT, 1.0), (other, OTHER, 0.0)):
        assert verdict.process is not None
        first, last = scores = list(verdict.process.scores)
        assert scores == pytest.approx(plain_scores(step_tag_model, answer), abs=1e-6)
        whole = {
            "last": last,
            "min": min(scores),
            "mean": (first + last) / 2,
            "product": first * last,
        }[aggregate]
        assert verdict.outcome == verdict.process.outcome == outcome
        assert verdict.reward == pytest.approx(0.25 * outcome + 0.75 * whole)
        decoder, ids = Decoder(str(POLICY)), token_ids(row(answer).tokens)
        for end, step in zip(verdict.process.ends, split_steps(answer, SEPARATOR, 9), strict=True):
            assert decoder.text(ids[:end]) == answer[: step.end]
    assert right.reward > other.reward


def test_with_scores_placed_at_steps_the_reward_is_the_verdict(step_tag_model: Path) -> None:
    right, other, cut = scored(
        step_tag_model,
        row(RIGHT),
        row(OTHER),
        row(RIGHT, "length"),
        placement="step",
        aggregate="last",
    ).verdicts
    for verdict, answer, outcome in ((right, RIGHT, 1.0), (other, OTHER, 0.0)):
        assert verdict.process is not None and verdict.reward == outcome
        assert list(verdict.process.scores) == pytest.approx(
            plain_scores(step_tag_model, answer), abs=1e-6
        )
        assert len(verdict.process.ends) == 2
    assert (cut.reward, cut.process) == (0.0, None)


@pytest.mark.parametrize("placement", ["row", "step"])
def test_a_score_without_a_place_is_refused_only_where_it_needs_one(
    step_tag_model: Path, placement: str
) -> None:
    keys = {"placement": placement} | ({"aggregate": "last"} if placement == "step" else {})
    scoring = StepScoring(
        settings_of(step_tag_model, **STEP_TAG | keys), *loaded(step_tag_model, "step_tag")
    )
    verdict = TextVerdict(
        reward=1.0, status="ok", extracted="4", finish="eos", completion_tokens=0, elapsed_ms=0
    )
    (actual,) = scoring.rewarded_verdicts(
        [JudgedText(QUESTION, RIGHT, lambda: ["another text"], verdict)]
    )
    if placement == "row":
        assert actual.status == "ok" and actual.process is not None and actual.process.ends == ()
    else:
        assert (actual.status, actual.fault) == ("error", "steps without a score")
        assert actual.extracted == "the tokens of the answer do not tell where its steps end"


def test_answers_to_choose_from_have_one_score_and_none_where_it_cannot_be_scored(
    step_tag_model: Path,
) -> None:
    settings = settings_of(step_tag_model, **STEP_TAG | {"aggregate": "min"})
    scoring = StepScoring(settings, *loaded(step_tag_model, "step_tag"))
    scores = scoring.answer_scores(QUESTION, [OTHER, RIGHT * 200, RIGHT])
    expected = [min(plain_scores(step_tag_model, answer)) for answer in (OTHER, RIGHT)]
    assert scores == pytest.approx([expected[0], 0.0, expected[1]], abs=1e-6)


def test_in_an_evaluation_several_answers_have_scores_and_the_verdict_alone_as_reward(
    step_tag_model: Path,
) -> None:
    right, other, cut = scored(
        step_tag_model, row(RIGHT), row(OTHER), row(RIGHT, "length"), kind="eval"
    ).verdicts
    for verdict, answer, outcome in ((right, RIGHT, 1.0), (other, OTHER, 0.0)):
        assert verdict.process is not None and verdict.reward == verdict.outcome == outcome
        assert list(verdict.process.scores) == pytest.approx(
            plain_scores(step_tag_model, answer), abs=1e-6
        )
    assert (cut.reward, cut.process) == (0.0, None)


def test_in_an_evaluation_a_single_answer_is_not_scored(step_tag_model: Path) -> None:
    (alone,) = scored(step_tag_model, row(RIGHT), kind="eval").verdicts
    assert (alone.reward, alone.process) == (1.0, None)


def test_in_an_evaluation_an_answer_too_long_for_the_model_keeps_its_verdict(
    step_tag_model: Path,
) -> None:
    long, other = scored(
        step_tag_model, row("3 " * 100 + RIGHT), row(OTHER), kind="eval", max_tokens=60
    ).verdicts
    assert (long.reward, long.status, long.process, long.fault) == (1.0, "ok", None, "")
    assert other.process is not None


def test_a_cut_answer_worth_0_and_one_without_a_verdict_are_not_scored(
    step_tag_model: Path,
) -> None:
    right, cut = scored(step_tag_model, row(RIGHT), row(RIGHT, "length")).verdicts
    assert (cut.reward, cut.process, cut.outcome) == (0.0, None, 0.0)
    assert right.process is not None
    without = scored(step_tag_model, row(RIGHT), gold="").verdicts[0]
    assert (without.status, without.process) == ("error", None)


def test_an_answer_without_steps_has_score_0(step_tag_model: Path) -> None:
    empty, right = scored(step_tag_model, row(""), row(RIGHT)).verdicts
    assert empty.process is not None
    assert (empty.reward, empty.process.scores, empty.process.ends) == (0.0, (), ())
    assert right.reward > 0.0


def test_a_group_without_any_step_has_score_0(step_tag_model: Path) -> None:
    assert [each.reward for each in scored(step_tag_model, row(""), row("")).verdicts] == [0.0, 0.0]


def test_an_answer_too_long_for_the_model_gets_no_verdict_and_the_others_do(
    step_tag_model: Path,
) -> None:
    long = RIGHT + " 3" * 100
    first, second = scored(step_tag_model, row(long), row(RIGHT), max_tokens=60).verdicts
    assert (first.status, first.fault) == ("error", "too long for the process reward model")
    assert first.extracted == "116 tokens with the question, scorer.prm.max_tokens = 60"
    assert second.process is not None and second.status == "ok"


def test_a_group_scored_again_has_the_same_scores(step_tag_model: Path) -> None:
    rows = [row(RIGHT), row(OTHER), row(RIGHT + " 3 3")]
    again = [scored(step_tag_model, *rows).verdicts for _ in range(2)]
    assert [each.reward for each in again[0]] == [each.reward for each in again[1]]


def test_filter_and_figures_are_about_answers_and_not_about_scores(step_tag_model: Path) -> None:
    all_right = scored(step_tag_model, row(RIGHT), row(RIGHT))
    mixed = scored(step_tag_model, row(RIGHT), row(OTHER))
    band = AccuracyFilter(0.01, 0.99, 10, 0.0)
    actual = objection(all_right, band)
    assert actual is not None and actual.cause == "accuracy 1"
    assert objection(mixed, band) is None
    groups = [batch_group(each) for each in (all_right, mixed)]
    figures = batch_fractions(groups)
    scores = [
        score
        for each in (all_right, mixed)
        for v in each.verdicts
        if v.process
        for score in v.process.scores
    ]
    assert (figures["outcome"], figures["steps"]) == (0.75, 2.0)
    assert (figures["all_right_groups_fraction"], figures["all_wrong_groups_fraction"]) == (
        0.5,
        0.0,
    )
    assert figures["step_score"] == pytest.approx(sum(scores) / len(scores))
    plain = scored(step_tag_model, row(RIGHT), kind="eval")
    assert "outcome" not in batch_fractions([batch_group(plain)])


@pytest.mark.nightly
def test_a_scorer_with_another_process_reward_model_is_refused(
    step_tag_model: Path, two_class_model: Path, tmp_path: Path
) -> None:
    config = load(RUN_FILE, (f"scorer.prm.model={step_tag_model}", "scorer.prm.format=step_tag"))
    check = IdentityCheck(config, tmp_path, None)
    check.check("scorer", scorer_digests(config, str(POLICY), str(step_tag_model)))
    for other in (str(two_class_model), None):
        with pytest.raises(
            ValueError, match=f"another scorer.prm.model.*{process_digest(str(step_tag_model))}"
        ):
            check.check("scorer", scorer_digests(config, str(POLICY), other))


def test_scores_that_do_not_fit_their_ends_are_refused_by_the_broker(step_tag_model: Path) -> None:
    group = scored(step_tag_model, row(RIGHT))
    (verdict,) = group.verdicts
    assert isinstance(verdict, TextVerdict) and verdict.process is not None
    for ends in ((1,), (5, 4), (1, 2, 3)):
        forged = replace(verdict, process=replace(verdict.process, ends=ends))
        with pytest.raises(ValueError, match="2 scores of steps with ends"):
            check_scores(replace(group, verdicts=(forged,)), 1)


def test_a_score_at_no_token_of_its_row_is_refused_by_the_broker_where_it_is_a_reward(
    step_tag_model: Path,
) -> None:
    group = scored(step_tag_model, row(RIGHT), placement="step", aggregate="last")
    (verdict,) = group.verdicts
    tokens = token_ids(group.prefixes.rows[0].tokens).size
    check_verdicts(group, has_step_rewards=True)
    for ends in ((), (0, 2), (2, tokens + 1)):
        forged = replace(verdict, process=replace(verdict.process, ends=ends))
        check_verdicts(replace(group, verdicts=(forged,)))
        with pytest.raises(
            ValueError, match=f"row 0: 2 scores of steps with ends .* in a row of {tokens} tokens"
        ):
            check_verdicts(replace(group, verdicts=(forged,)), has_step_rewards=True)
