"""The section `[scorer.prm]`: defaults by format, and settings that are refused."""

from typing import Any

import pytest
from pydantic import ValidationError

from prefixrl.common.config.section import FROM_RUN_FILE
from prefixrl.common.config.step_rewards import ProcessModelConfig


def section(**keys: Any) -> ProcessModelConfig:
    return ProcessModelConfig.model_validate({"model": "m", "format": "step_tag", **keys}, context=FROM_RUN_FILE)


def test_tag_form_and_separator_are_those_of_the_format() -> None:
    shepherd, qwen = section(), section(format="two_class")
    assert (shepherd.tag, shepherd.form, shepherd.between) == ("ки", "{step} {tag}\n", "\n")
    assert (qwen.tag, qwen.form, qwen.between) == ("<extra_0>", "{step}{tag}", "\n\n")
    assert section(step_tag="T", step_form="{step}{tag}", separator=";").between == ";"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"coefficient": 0.8, "outcome_coefficient": 0.5}, "together they exceed 1, the largest reward"),
        ({"coefficient": 0.0}, "would be without effect"),
        ({"good_token": "-"}, "every step would have the same score"),
        ({"step_form": "{tag}{step}"}, "needs {step} once and {tag} once behind it"),
        ({"format": "two_class", "good_token": "+"}, "good_token = '\\+' has no effect with format = 'two_class'"),
        ({"good_class": 0}, "good_class = 0 has no effect with format = 'step_tag'"),
        ({"gpu_memory_utilization": 0.5}, "no effect with engine = 'transformers'"),
    ],
)
def test_settings_without_sense_are_refused_with_the_reason(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        section(**keys)
