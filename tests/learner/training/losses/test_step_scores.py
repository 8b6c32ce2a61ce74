"""Scores of steps as rewards of tokens: vectors worked out by hand, slow twins, an iteration against plain loops."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixrl.common.config.run import RunConfig
from prefixrl.learner.models.batch import IterationData
from prefixrl.learner.models.model import Models
from prefixrl.learner.training.advantages import group_advantages
from prefixrl.learner.training.iteration import train_iteration
from prefixrl.learner.training.step_scores import (
    StepMoments,
    row_steps,
    step_baselines,
    step_moments,
)
from support.models.tiny_model import (
    DEEPSPEED_WARNINGS,
    random_iteration,
    run_config,
    save_model,
    with_tokenizer,
)

pytestmark = DEEPSPEED_WARNINGS

PRM = {"model": "unused", "format": "step_tag", "placement": "step"}
FLOOR = 1e-6
Rows = list[list[float]]


def less_baselines(rows: Rows, groups: list[int], form: Any, floor: float = 0.0) -> Rows:
    moments = [StepMoments(*step_moments([(0, each) for each in row])) for row in rows]
    result = step_baselines(moments, groups, form, floor)
    return [
        [(each - result[index].offset) * result[index].scale for each in row]
        for index, row in enumerate(rows)
    ]


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("paper", [[1.1875, 0.6250, 0.8125], [-1.7083, -0.1042], [0.4583]]),
        ("code", [[1.1875, 0.5417, 1.0208], [-1.7083, 0.2708], [0.4583]]),
    ],
)
def test_steps_of_one_token_have_the_returns_of_token_rewards_worked_out_by_hand(
    form: str, expected: Rows
) -> None:
    rows = less_baselines([[0.5, -0.25, 0.75], [-1.25, 0.25], [0.375]], [0, 0, 0], form)
    for row, returns in zip(rows, expected, strict=True):
        assert [sum(row[t:]) for t in range(len(row))] == pytest.approx(returns, abs=1e-4)


def test_with_zscore_the_scores_of_all_steps_of_a_group_have_mean_0_and_deviation_1() -> None:
    rows = less_baselines([[0.9, 0.7], [0.1, 0.3, 0.5]], [0, 0], "zscore")
    assert rows[0] == pytest.approx([0.4 / math.sqrt(0.1), 0.2 / math.sqrt(0.1)])
    assert rows[1] == pytest.approx([-0.4 / math.sqrt(0.1), -0.2 / math.sqrt(0.1), 0.0], abs=1e-9)
    assert less_baselines([[0.9, 0.7], [0.1]], [0, 1], "zscore") == [
        [0.0, 0.0],
        [0.0],
    ]  # each alone in its group


score = st.floats(0.0, 1.0).map(lambda x: round(x, 3))


@given(
    st.lists(
        st.tuples(st.lists(score, min_size=1, max_size=5), st.integers(0, 2)),
        min_size=1,
        max_size=9,
    ),
    st.sampled_from(["paper", "code", "mean", "zscore", "none"]),
)
def test_baselines_are_those_of_loops_over_rows_and_steps(
    grouped: list[tuple[list[float], int]], form: Any
) -> None:
    rows, groups = [row for row, _ in grouped], [group for _, group in grouped]
    for index, actual in enumerate(less_baselines(rows, groups, form, 0.5)):
        assert actual == pytest.approx(
            [twin(each, index, rows, groups, form, 0.5) for each in rows[index]], abs=1e-9
        )


def twin(value: float, index: int, rows: Rows, groups: list[int], form: str, floor: float) -> float:
    """A score less its baseline, as the formulas of the page are written."""
    own = [row for row, group in zip(rows, groups, strict=True) if group == groups[index]]
    others = [
        sum(row) / len(row)
        for j, row in enumerate(rows)
        if groups[j] == groups[index] and j != index
    ]
    mus = [sum(row) / len(row) for row in own]
    if form == "none":
        return value
    if len(own) == 1:
        return 0.0
    if form == "paper":
        return value - sum(others) / len(others)
    if form == "code":
        return len(own) / (len(own) - 1) * (value - sum(mus) / len(mus))
    if form == "mean":
        return value - sum(mus) / len(mus)
    steps = [each for row in own for each in row]
    mean = sum(steps) / len(steps)
    deviation = math.sqrt(sum((each - mean) ** 2 for each in steps) / (len(steps) - 1))
    return (value - mean) / (deviation + floor)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_tokenizer(save_model(tmp_path_factory.mktemp("models") / "adapter"))


def config_of(adapter: Path, name: str, prm: dict[str, Any], **sections: Any) -> RunConfig:
    algorithm = {"name": name, "kl": 0.0, "minibatches": 1} | sections.pop("more", {})
    scorer = {"prm": PRM | prm}
    return run_config(
        adapter, algorithm=algorithm, mode="direct", target=None, scorer=scorer, **sections
    )


def mean_advantages(
    data: IterationData,
    form: str,
    weights: tuple[float, float],
    *,
    is_one_group: bool = False,
    gamma: float = 1.0,
) -> list[float]:
    """Mean advantage of each row's tokens, without a critic; `weights` are those of steps and verdict."""
    steps = [
        data.samples[row].steps or ((data.lengths[row][1], 0.0),)
        for row in range(len(data.lengths))
    ]
    scores, groups = [[score for _, score in row] for row in steps], list(data.groups)
    groups = [0] * len(groups) if is_one_group else groups
    baseline = "leave_one_out" if form in ("paper", "code") else "mean"
    floor = FLOOR if form == "zscore" else None
    outcomes = group_advantages(data.rewards, groups, baseline, floor)  # type: ignore[arg-type]
    results = []
    for row, (of_row, outcome) in enumerate(zip(steps, outcomes, strict=True)):
        tokens = data.lengths[row][1]
        rewards = [0.0] * tokens
        rewards[-1] += weights[1] * outcome
        for end, each in of_row:
            rewards[end - 1] += weights[0] * twin(each, row, scores, groups, form, FLOOR)
        returns = [
            sum(gamma ** (s - t) * rewards[s] for s in range(t, tokens)) for t in range(tokens)
        ]
        results.append(sum(returns) / tokens)
    return results


@pytest.mark.parametrize(
    ("name", "form", "zscore"),
    [
        pytest.param("rloo", "paper", "group", id="RLOO"),
        pytest.param("grpo", "zscore", "group", id="GRPO by group"),
        pytest.param("grpo", "zscore", "buffer", id="GRPO by buffer"),
        pytest.param("dr_grpo", "mean", "group", id="Dr. GRPO"),
    ],
)
def test_without_a_critic_advantages_are_those_of_plain_loops(
    adapter: Path, name: str, form: str, zscore: str
) -> None:
    more = {"zscore": zscore} if name == "grpo" else {}
    config = config_of(adapter, name, {"coefficient": 0.75, "outcome_coefficient": 0.25}, more=more)
    data = random_iteration(1)
    assert any(not sample.steps for sample in data.samples.values())
    metrics = train_iteration(Models.load(config, 0, 1, str(adapter)), data, config, 20)
    expected = mean_advantages(data, form, (0.75, 0.25), is_one_group=zscore == "buffer")
    assert metrics.row_advantages == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize(("form", "gamma"), [("paper", 1.0), ("code", 0.9)])
def test_scores_of_steps_and_an_implicit_reward_model_add_up(
    adapter: Path, form: str, gamma: float
) -> None:
    implicit = {"lr": 1e-3, "outcome_coefficient": 0.5, "baseline": form, "outcome_gamma": gamma}
    config = config_of(
        adapter, "rloo", {"outcome_coefficient": 0.5, "coefficient": 0.5}, implicit_reward=implicit
    )
    data = random_iteration(3)
    metrics = train_iteration(Models.load(config, 0, 1, str(adapter)), data, config, 20)
    # The reward model is its own reference at first, so its rewards are 0.
    expected = mean_advantages(data, form, (0.25, 0.25), gamma=gamma)
    assert metrics.row_advantages == pytest.approx(expected, abs=2e-5)


def test_the_implicit_reward_model_learns_verdicts_and_not_the_scores_in_the_rewards(
    adapter: Path,
) -> None:
    config = run_config(adapter, algorithm={"name": "prime"}, implicit_reward={"lr": 1e-3})
    data = random_iteration(4)
    mixed = replace(
        data, rewards=tuple(0.5 * each + 0.2 for each in data.rewards), verdicts=data.rewards
    )
    told = [
        train_iteration(Models.load(config, 0, 1, str(adapter)), each, config, 20).means
        for each in (data, mixed)
    ]
    assert told[0]["reward_model_loss"] == told[1]["reward_model_loss"]


def test_a_step_that_ends_outside_its_row_is_no_reward_of_another_token() -> None:
    sample = random_iteration(0).samples[0]
    for end in (0, len(sample.tokens) + 1):
        with pytest.raises(ValueError, match=f"ends after {end} tokens"):
            row_steps(replace(sample, steps=((end, 0.5),)))
