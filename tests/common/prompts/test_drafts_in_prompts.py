"""A draft in the adapter's prompt: its place, special tokens in it, a long one."""

import pytest

from prefixrl.common.config.load import load
from prefixrl.common.config.run import RunConfig
from prefixrl.common.prompts.asking import asking_lines, renderers_here
from prefixrl.common.prompts.limits import SpecialTexts
from prefixrl.common.prompts.rendering import OMISSION_TOKENS, Renderer, renderer_of
from prefixrl.deploy.runs.show import prompt_lines
from prefixrl.learner.check.report import forecast
from support.paths import EXAMPLE

QUESTION = "sum 3 1 4"
SETTINGS = ('target.placement="advice"', "adapter.sees=draft")


def config_of(*settings: str) -> RunConfig:
    template = 'adapter.prompt_template="{problem} {draft}"'
    return load(EXAMPLE / "run.toml", (*SETTINGS, template, *settings))


def text_of(renderer: Renderer, draft: str) -> str:
    ids = renderer.prompt(QUESTION, draft=draft)
    return renderer.decode_with_special(ids)


def test_the_draft_stands_in_its_place() -> None:
    renderer = renderer_of(config_of(), "rollout")
    assert f"{QUESTION} Let us add: 3 4" in text_of(renderer, "Let us add: 3 4")
    assert f"{QUESTION} <" in text_of(renderer, "")


def test_special_tokens_of_a_draft_are_left_out() -> None:
    renderer = renderer_of(config_of(), "rollout")
    special = next(iter(renderer._special._tokens))
    half = len(special) // 2
    nested = special[:half] + special + special[half:]
    for draft in (f"Let us {special}add", f"Let us {nested}add"):
        assert text_of(renderer, draft) == text_of(renderer, "Let us add")


def test_a_special_token_that_the_removal_spells_is_left_out_too() -> None:
    assert SpecialTexts(["<a>", "<b>"]).without("1<<b>a>2<b>") == "12"


@pytest.mark.parametrize("most", [14, 20, 30, 60])
def test_of_a_long_draft_the_middle_is_left_out(most: int) -> None:
    renderer = renderer_of(config_of(f"rollout.max_prompt_tokens={most}"), "rollout")
    draft = "Let us add: " + "3 4 8 " * 40 + "so \\boxed{8}"
    ids = renderer.prompt(QUESTION, draft=draft)
    assert ids.size <= most
    text = renderer.decode_with_special(ids)
    has_room = most > 14
    assert ("Let us add" in text) == ("boxed{8}" in text) == has_room
    if has_room:
        assert ids.size > most - 2 * OMISSION_TOKENS


def test_a_question_that_is_too_long_is_so_with_any_draft() -> None:
    renderer = renderer_of(config_of("rollout.max_prompt_tokens=3"), "rollout")
    with pytest.raises(ValueError, match="allowed are 1 to 3"):
        renderer.prompt(QUESTION, draft="Let us add")


def test_check_and_show_have_the_draft_and_the_advice_in_their_prompts() -> None:
    config = load(EXAMPLE / "run.toml", SETTINGS)
    lines = asking_lines(config, renderers_here(config), QUESTION)
    assert any("adapter: " in line and "a prompt with a draft ends with" in line for line in lines)
    text = forecast(config).text
    assert "one for each of " in text and "each with a draft of scorer.max_new_tokens" in text
    prompts = "\n".join(prompt_lines(config_of(), QUESTION, "add up"))
    assert "adapter: " in prompts and "prompt with a draft, " in prompts
    assert "prompt with advice, " in prompts and "prompt without advice, " in prompts
