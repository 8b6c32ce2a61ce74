"""`prefixrl show` prints the tokens that the models see."""

import pytest

from prefixrl.common.config.load import load
from prefixrl.common.errors import ConfigError
from prefixrl.common.prompts.rendering import Renderer
from prefixrl.deploy.runs.show import prompt_lines
from support.paths import ROOT

RUN_FILE = ROOT / "deploy/examples/arithmetic/run.toml"
QUESTION = "sum 3 1 4"


def test_the_prompt_is_shown_as_both_models_see_it_with_special_tokens_and_ids() -> None:
    config = load(RUN_FILE)
    lines = list(prompt_lines(config, QUESTION, "Let us"))
    assert config.target is not None
    for role, model in (("adapter", config.adapter.model), ("target", config.target.model)):
        renderer = Renderer(model, 64)
        ids = renderer.prompt(QUESTION)
        start = lines.index(f"{role}: {model}")
        assert (
            lines[start + 1]
            == f"  prompt, {ids.size} tokens: {renderer.decode_with_special(ids)!r}"
        )
        shown = lines[start + 2].partition(": ")[2]
        assert [
            int(each.partition("=")[0]) for each in shown.split(" ") if "=" in each
        ] == ids.tolist()
        special = renderer.decode_with_special(ids[:1])
        assert special in lines[start + 1] and special not in renderer.text(ids), (
            "left out elsewhere"
        )
        assert (
            lines[start + 4]
            == f"  prefix, 2 tokens: {renderer.decode_with_special(renderer.encode('Let us'))!r}"
        )


def test_a_question_without_room_is_refused_with_both_numbers() -> None:
    config = load(RUN_FILE, ("scorer.max_prompt_tokens=3",))
    with pytest.raises(ConfigError, match=r"target: prompt has .* tokens, allowed are 1 to 3"):
        list(prompt_lines(config, QUESTION, ""))


def test_in_direct_mode_there_is_no_target_to_show() -> None:
    lines = list(
        prompt_lines(load(ROOT / "deploy/examples/arithmetic_direct/run.toml"), QUESTION, "")
    )
    assert not any(line.startswith("target") for line in lines)


def test_a_chat_endpoint_gets_the_messages_that_are_printed() -> None:
    config = load(ROOT / "deploy/examples/advice/chat.toml")
    *_, advised, bare = prompt_lines(config, QUESTION, "Let us")
    form = 'target: {}, in messages: [{{"role":"user","content":"{}"}}]'
    assert advised == form.format("prompt with advice", r"advice: Let us\nsum 3 1 4")
    assert bare == form.format("prompt without advice", "sum 3 1 4")
