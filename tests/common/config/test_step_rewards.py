"""The section `[scorer.prm]`: defaults by format, and settings that are refused."""

from typing import Any

import pytest
from pydantic import ValidationError

from prefixrl.common.config.load import load
from prefixrl.common.config.section import FROM_RUN_FILE
from prefixrl.common.config.workers.process_model import ProcessModelConfig
from prefixrl.common.errors import ConfigError
from support.paths import EXAMPLES


def section(**keys: Any) -> ProcessModelConfig:
    return ProcessModelConfig.model_validate(
        {"model": "m", "format": "step_tag", **keys}, context=FROM_RUN_FILE
    )


def test_tag_form_and_separator_are_those_of_the_format() -> None:
    shepherd, qwen = section(), section(format="two_class")
    assert (shepherd.tag, shepherd.form, shepherd.between) == ("ки", "{step} {tag}\n", "\n")
    assert (qwen.tag, qwen.form, qwen.between) == ("<extra_0>", "{step}{tag}", "\n\n")
    assert section(step_tag="T", step_form="{step}{tag}", separator=";").between == ";"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        pytest.param(
            {"coefficient": 0.8, "outcome_coefficient": 0.5},
            "together they exceed 1, the largest reward",
            id="weights above 1",
        ),
        pytest.param({"coefficient": 0.0}, "would be without effect", id="no weight"),
        pytest.param(
            {"good_token": "-"}, "every step would have the same score", id="the same token twice"
        ),
        pytest.param(
            {"step_form": "{tag}{step}"},
            "needs {step} once and {tag} once behind it",
            id="a form with its tag first",
        ),
        pytest.param(
            {"format": "two_class", "good_token": "+"},
            r"good_token = .\+. has no effect with format = .two_class.",
            id="a token of another format",
        ),
        pytest.param(
            {"good_class": 0},
            "good_class = 0 has no effect with format = .step_tag.",
            id="a class of another format",
        ),
        pytest.param(
            {"placement": "step", "aggregate": "min"},
            "aggregate = .min. has no effect with placement = .step.",
            id="an aggregate without effect",
        ),
        pytest.param(
            {"gpu_memory_utilization": 0.5},
            "no effect with engine = .transformers.",
            id="memory of another engine",
        ),
    ],
)
def test_settings_without_sense_are_refused_with_the_reason(
    keys: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValidationError, match=said):
        section(**keys)


STEPS = ("scorer.prm.model=x/y", "scorer.prm.format=step_tag", "scorer.prm.placement=step")


@pytest.mark.parametrize(
    ("run_file", "more", "said"),
    [
        pytest.param(
            "arithmetic/run.toml",
            (),
            'scorer.prm.placement = "step" with mode = "prefix"',
            id="in prefix mode",
        ),
        pytest.param(
            "arithmetic_direct/run.toml",
            ("algorithm.name=rloo", "algorithm.advantage_function=mine.py:advantages"),
            "the function has no baseline for rewards of tokens",
            id="with a user's function",
        ),
        pytest.param(
            "arithmetic_direct/run.toml",
            ("algorithm.name=prime", "implicit_reward.outcome_coefficient=0"),
            (
                'implicit_reward.outcome_coefficient = 0 with scorer.prm.model = "x/y": its '
                "scores would have no weight"
            ),
            id="with no weight",
        ),
    ],
)
def test_rewards_of_steps_that_nothing_could_train_are_refused(
    run_file: str, more: tuple[str, ...], said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(EXAMPLES / run_file, (*STEPS, *more))
    assert said in str(caught.value)


@pytest.mark.parametrize("placement", ["row", "step"])
def test_an_implicit_reward_model_may_stand_beside_it(placement: str) -> None:
    settings = (*STEPS[:2], f"scorer.prm.placement={placement}", "algorithm.name=prime")
    config = load(EXAMPLES / "arithmetic_direct/run.toml", settings)
    assert config.implicit_reward and config.scorer.prm
