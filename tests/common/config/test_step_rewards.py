"""The section `[scorer.prm]`: defaults by format, and settings that are refused."""

from typing import Any

import pytest
from pydantic import ValidationError

from prefixrl.common.config.load import load
from prefixrl.common.config.section import FROM_RUN_FILE
from prefixrl.common.config.step_rewards import ProcessModelConfig
from prefixrl.common.errors import ConfigError
from support.paths import EXAMPLES
from support.tables import table


def section(**keys: Any) -> ProcessModelConfig:
    return ProcessModelConfig.model_validate(
        {"model": "m", "format": "step_tag", **keys}, context=FROM_RUN_FILE
    )


def test_tag_form_and_separator_are_those_of_the_format() -> None:
    shepherd, qwen = section(), section(format="two_class")
    assert (shepherd.tag, shepherd.form, shepherd.between) == ("ки", "{step} {tag}\n", "\n")
    assert (qwen.tag, qwen.form, qwen.between) == ("<extra_0>", "{step}{tag}", "\n\n")
    assert section(step_tag="T", step_form="{step}{tag}", separator=";").between == ";"


@table(__file__)
def test_settings_without_sense_are_refused_with_the_reason(
    keys: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValidationError, match=said):
        section(**keys)


STEPS = ("scorer.prm.model=x/y", "scorer.prm.format=step_tag", "scorer.prm.placement=step")


@table(__file__)
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
