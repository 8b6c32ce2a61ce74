"""Answers with which a reward is tried, and what the table says of their rewards."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from prefixrl.common.config.load import load
from prefixrl.common.errors import DataError
from prefixrl.common.evaluation.trials import TriedReward
from prefixrl.common.wire.messages.groups import Prompt
from prefixrl.learner.check import reward_trial
from prefixrl.learner.check.reward_trial import (
    Bounds,
    RewardTrial,
    TriedCase,
    check_line,
    try_reward,
    writable,
)
from prefixrl.learner.check.tried_answers import (
    GOLD,
    KEPT,
    WRONG,
    AnswerLimit,
    Case,
    chosen,
    differ,
    gold_cases,
    hostile_cases,
    wrong_cases,
)
from support.paths import EXAMPLE

LIMIT = AnswerLimit(64)
USUAL = Bounds()
PROBLEMS = [Prompt(f"p{number}", f"{number} + 1?", str(number + 1)) for number in range(12)]


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("7", "8", True),
        ("7", "7.0", False),
        ("1/2", "0.5", False),
        ("1,000", "1000", False),
        (" Paris. ", "paris", False),
        ("1,2", "2, 1", False),
        ("(1,2)", "(2,1)", True),
        ("$7$", "7", False),
        ("x", "y", True),
        ("", "7", True),
        ("1/0", "7", True),
    ],
)
def test_answers_that_a_verifier_may_take_for_equal_are_no_wrong_answers(
    one: str, other: str, expected: bool
) -> None:
    assert differ(one, other) is differ(other, one) is expected


def test_wrong_answers_are_other_golds_in_the_same_form() -> None:
    problems = [Prompt("a", "?", "7"), Prompt("b", "?", "7.0"), Prompt("c", "?", "8")]
    golds, wrongs = (
        gold_cases(problems, "so {gold}!", LIMIT),
        wrong_cases(problems, "so {gold}!", LIMIT),
    )
    assert [each.answer.text for each in golds] == ["so 7!", "so 7.0!", "so 8!"]
    assert [each.answer.text for each in wrongs] == ["so 8!", "so 8!", "so 7!"]
    assert [(each.answer.gold, each.prompt_id) for each in wrongs] == [
        ("7", "a"),
        ("7.0", "b"),
        ("8", "c"),
    ]
    assert wrong_cases(problems[:2], "{gold}", LIMIT) == []


def test_hostile_answers_hold_the_right_one_but_never_as_the_last_and_one_is_cut() -> None:
    golds = [each.gold for each in PROBLEMS]
    cases = {
        each.kind: each for each in hostile_cases(PROBLEMS[6:7], golds, r"\boxed{{gold}}", LIMIT)
    }
    texts = {kind: case.answer.text for kind, case in cases.items()}
    assert texts["an empty text"] == "" and texts["the question itself"] == "6 + 1?"
    boxes = texts["many boxes, the right one first"].splitlines()
    assert boxes[0] == r"\boxed{7}" and r"\boxed{7}" not in boxes[1:] and len(boxes) == 12
    assert " 7 " in texts["the numbers up to 999"]
    assert texts['the word "correct"'] == r"\boxed{correct}"
    cut = cases["a text cut by the limit"].answer
    assert cut.is_cut and cut.tokens == LIMIT.tokens and len(cut.text) > 5 * LIMIT.tokens
    assert not cases["an empty text"].answer.is_cut and len(texts) == 7


def test_a_hostile_text_that_is_the_right_answer_is_left_out() -> None:
    problems = [Prompt("a", "Repeat: yes", "Repeat: yes")]
    kinds = [each.kind for each in hostile_cases(problems, ["Repeat: yes"], "{gold}", LIMIT)]
    assert "the question itself" not in kinds and "many boxes, the right one first" not in kinds


def test_problems_are_drawn_by_the_seed_and_stay_in_order() -> None:
    drawn = chosen(PROBLEMS, 5, 1)
    assert drawn == chosen(PROBLEMS, 5, 1) and len(drawn) == 5
    assert [PROBLEMS.index(each) for each in drawn] == sorted(
        PROBLEMS.index(each) for each in drawn
    )
    assert chosen(PROBLEMS, 100, 1) == PROBLEMS


def test_tests_of_programs_are_no_answers_unless_a_function_judges(tmp_path: Path) -> None:
    programs = [Prompt("a", "?", '{"inputs": [], "outputs": []}', "tests")]
    with pytest.raises(DataError, match=r"no problem of data\.train has a gold answer"):
        writable(load(EXAMPLE / "run.toml"), programs)
    (tmp_path / "mine.py").write_text("def score(q, t, g): return 1")
    with_function = load(EXAMPLE / "run.toml", (f"reward.function={tmp_path}/mine.py:score",))
    assert writable(with_function, programs) == programs


# --- the table ------------------------------------------------------------------------------------


def case(kind: str, group: int = -1, earned: float | None = None) -> Case:
    answer = gold_cases(PROBLEMS[:1], "{gold}", LIMIT)[0].answer
    return Case(kind, "p0", answer, earned, group)


def tried(kind: str, *rewards: float | None, elapsed_s: float = 0.01, **fields: Any) -> TriedCase:
    """A case, and a verdict for each call; None is an error."""
    calls = [
        TriedReward(reward=0.0, status="error", extracted="no service", fault="function raised")
        if reward is None
        else TriedReward(reward=reward, status="ok", elapsed_s=elapsed_s, parts={"form": reward})
        for reward in rewards
    ]
    return TriedCase(case(kind, **fields), tuple(calls))


def trial(*cases: TriedCase, bounds: Bounds = USUAL, **fields: Any) -> RewardTrial:
    return RewardTrial("reward.function = f", "{gold}", list(cases), 5.0, bounds, **fields)


def text_of(whole: RewardTrial) -> str:
    return "\n".join(whole.lines())


@pytest.mark.parametrize(
    ("cases", "bounds", "is_right"),
    [
        pytest.param([(GOLD, 1.0), (WRONG, 0.0)], Bounds(), True, id="as it should be"),
        pytest.param([(GOLD, 0.9)], Bounds(), False, id="a gold earns less"),
        pytest.param([(GOLD, 0.9)], Bounds(least_right=0.9), True, id="as much as it must"),
        pytest.param([(GOLD, None)], Bounds(), False, id="a gold is an error"),
        pytest.param([(GOLD, 1.0), (WRONG, 0.1)], Bounds(), False, id="a wrong one earns"),
        pytest.param([(GOLD, 1.0), (WRONG, 0.1)], Bounds(1.0, 0.1), True, id="what it may"),
        pytest.param([(GOLD, 1.0), ("an empty text", 0.1)], Bounds(), False, id="hostile"),
        pytest.param([(GOLD, 1.0), (WRONG, None)], Bounds(), True, id="a wrong one is an error"),
        pytest.param([(GOLD, 1.0), (KEPT, 0.5)], Bounds(), True, id="kept answers have no bound"),
    ],
)
def test_a_reward_is_right_where_golds_earn_enough_and_wrong_answers_not_too_much(
    cases: Sequence[tuple[str, float | None]], bounds: Bounds, is_right: bool
) -> None:
    whole = trial(*(tried(kind, reward, reward) for kind, reward in cases), bounds=bounds)
    assert whole.is_right is is_right
    assert ("NOT RIGHT" in text_of(whole)) is not is_right


def test_one_bad_call_of_two_is_enough() -> None:
    assert not trial(tried(GOLD, 1.0, 0.5)).is_right
    assert not trial(tried(GOLD, 1.0, None)).is_right
    assert not trial(tried(GOLD, 1.0, 1.0), tried(WRONG, 0.0, 1.0)).is_right


def test_a_hostile_text_that_earns_by_luck_is_shown_and_no_fault() -> None:
    lucky = [tried("the question itself", float(luck), float(luck)) for luck in (1, 0, 0)]
    text = text_of(trial(tried(GOLD, 1.0, 1.0), *lucky))
    assert "NOT RIGHT" not in text and "the question itself" in text and "0.333" in text
    assert not trial(tried(GOLD, 1.0, 1.0), *lucky[:2]).is_right, "half of them are no luck"


def test_the_table_has_counts_means_and_ends_of_each_kind() -> None:
    text = text_of(trial(tried(GOLD, 1.0, 1.0), tried(WRONG, 0.0, 0.0), tried(WRONG, 0.5, 0.5)))
    rows = [line.split() for line in text.splitlines() if line.startswith("gold answers")]
    assert rows[0][-5:] == ["1", "0", "1.000", "1.000", "1.000"]
    assert rows[1][-5:] == ["2", "0", "0.250", "0.000", "0.500"]
    assert "NOT RIGHT: 1 wrong answers earn more than 0" in text and "--most-wrong 0.5" in text


def test_instability_errors_and_parts_are_told() -> None:
    text = text_of(trial(tried(GOLD, 1.0, 1.0), tried(WRONG, 0.0, 0.25), tried(WRONG, None, None)))
    assert "two calls with the same answer differed for 1 of 3, by up to 0.25" in text
    assert "function raised: 2 of 6 calls; the first: no service" in text
    assert "part form: 0 to 1, mean 0.5" in text
    assert "no reward" in text_of(trial(tried(GOLD, None, None)))
    assert "gave the same" in text_of(trial(tried(GOLD, 1.0, 1.0)))


def test_the_time_is_that_of_second_calls_and_a_slow_one_is_named() -> None:
    slow_start = TriedCase(
        case(GOLD),
        (
            TriedReward(reward=1.0, status="ok", elapsed_s=4.0),
            TriedReward(reward=1.0, status="ok", elapsed_s=0.02),
        ),
    )
    assert "median 20 ms, 95th percentile 20 ms, longest 20 ms, limit 5 s" in text_of(
        trial(slow_start)
    )
    remembers = text_of(trial(slow_start, is_called_again=False))
    assert "median 4.00 s" in remembers and "raise the limit" in remembers
    quick = [tried(GOLD, 1.0, 1.0, elapsed_s=0.01) for _ in range(19)]
    # The slowest of twenty is no part of the 95th percentile, the slowest of ten is.
    assert "raise" not in text_of(trial(*quick, tried(GOLD, 1.0, 1.0, elapsed_s=4.9)))
    assert "raise" in text_of(trial(*quick[:9], tried(GOLD, 1.0, 1.0, elapsed_s=4.9)))


def test_kept_answers_have_a_distribution_and_are_compared_with_the_run() -> None:
    kept = [
        tried(KEPT, 1.0, 1.0, group=0, earned=1.0),
        tried(KEPT, 0.0, 0.0, group=0, earned=1.0),
        tried(KEPT, 0.3, 0.3, group=1, earned=0.3),
        tried(KEPT, 0.3, 0.3, group=1, earned=0.3),
    ]
    text = text_of(trial(tried(GOLD, 1.0, 1.0), *kept))
    assert "rewards of kept answers: 0: 25.0%, 0.25 to 0.50: 50.0%, 1: 25.0%" in text
    assert "75.0% of them have the reward that the run gave them; its mean was 0.650" in text
    assert "rewards differ in 1 of 2 of their groups" in text


# --- with a real judge ----------------------------------------------------------------------------


@pytest.mark.slow
def test_the_form_that_earns_most_is_taken(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def score(question, text, gold): return float(text.endswith(f'<answer>{gold}</answer>'))"
    )
    config = load(EXAMPLE / "run.toml", (f"reward.function={tmp_path}/mine.py:score",))
    whole = try_reward(config, PROBLEMS, None, Bounds())
    assert whole.form == "<answer>{gold}</answer>" and whole.is_right
    assert len(whole.of_kind(GOLD)) == len(whole.of_kind(WRONG)) == 12
    assert len(whole.of_kind("an empty text")) == reward_trial.HOSTILE_PROBLEMS
    trial = try_reward(config, PROBLEMS[:2], "{gold}", Bounds())
    assert trial.form == "{gold}" and len(trial.poor_golds) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        pytest.param(
            "return float(text == gold)",
            "reward.function: 3 gold answers, written as {gold}, earn 1, 3 wrong ones 0; a call",
            id="right",
        ),
        pytest.param(
            "return 1.0 if text == gold else 0.25",
            "reward.function: 3 gold answers, written as {gold}, earn 1, 3 wrong ones 0.25; a call",
            id="a part for wrong answers",
        ),
        pytest.param("return 1.0", "warning: reward.function: 3 gold answers", id="wrong"),
        pytest.param("return 0.5", "warning: reward.function: 3 gold answers", id="half"),
        pytest.param(
            "raise ValueError(text)", "6 errors, the first: ValueError: ", id="all are errors"
        ),
    ],
)
def test_check_says_in_a_line_what_a_few_answers_earn(
    body: str, expected: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(f"def score(question, text, gold): {body}")
    config = load(EXAMPLE / "run.toml", (f"reward.function={tmp_path}/mine.py:score",))
    line = check_line(config, PROBLEMS)
    assert expected in line and line.count("\n") == 0
    assert line.startswith("warning") is ("text == gold" not in body)
    assert capfd.readouterr().err == ""


def test_check_goes_on_where_the_function_cannot_be_tried(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("1 / 0\ndef score(question, text, gold): ...")
    config = load(EXAMPLE / "run.toml", (f"reward.function={tmp_path}/mine.py:score",))
    line = check_line(config, PROBLEMS)
    assert line.startswith("warning: reward.function could not be tried: ")
    assert "ZeroDivisionError" in line
