"""The form of a prompt and the ends of texts: chat templates of many shapes, plain prompts, keys that set them."""

from pathlib import Path

import numpy as np
import pytest

from prefixrl.common.config.load import changed, load
from prefixrl.common.config.prompting import ModelConfig
from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import ConfigError, DataError
from prefixrl.common.prompts.asking import asking_lines, renderers_here
from prefixrl.common.prompts.rendering import Renderer, masked_tokens, renderer_of
from prefixrl.learner.data.lengths import unaskable
from prefixrl.learner.data.rows import Problem
from support.models.base_models import CLOSER, EOS, base_model
from support.models.chat_tokenizers import llama, qwen
from support.paths import EXAMPLE

QUESTION = "sum 3 1 4"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's adapter as a base model."""
    return base_model(EXAMPLE / "adapter", tmp_path_factory.mktemp("base") / "adapter")


def run_of(*settings: str) -> RunConfig:
    return load(EXAMPLE / "run.toml", settings)


def asked(config: RunConfig) -> list[str]:
    """The lines about how its models are asked `QUESTION`."""
    return asking_lines(config, renderers_here(config), QUESTION)


def test_the_token_that_closes_a_turn_is_a_stop_beside_the_eos_of_a_base_model(base: Path) -> None:
    renderer = Renderer(str(base), 100)
    assert renderer.eos_tokens == {EOS} and renderer.closer == CLOSER
    assert renderer.stop_tokens == {EOS, CLOSER}


def test_where_the_closer_is_the_eos_nothing_is_added(tmp_path: Path) -> None:
    for folder in (qwen(tmp_path / "q"), llama(tmp_path / "l"), EXAMPLE / "adapter"):
        renderer = Renderer(str(folder), 500)
        assert renderer.stop_tokens == renderer.eos_tokens == {renderer.closer}


@pytest.mark.parametrize(
    ("template", "closer"),
    [
        pytest.param(
            "{% for m in messages %}[{{ m.role }}] {{ m.content }} <|im_end|>\n{% endfor %}",
            "<|im_end|>",
            id="behind the text",
        ),
        pytest.param(
            (
                "{% for m in messages %}[{{ m.role }}] {{ m.content|trim }}"
                "\n\n<|im_end|><|endoftext|>{% endfor %}"
            ),
            "<|im_end|>",
            id="behind white space",
        ),
        pytest.param(
            (
                "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}"
                "{{ eos_token }}{% endif %}{% endfor %}"
            ),
            "<|im_end|>",
            id="the end-of-sequence token",
        ),
        pytest.param(
            "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}",
            "<|im_start|>",
            id="the beginning of the next message",
        ),
        pytest.param(
            "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}",
            "",
            id="no token",
        ),
        pytest.param(
            (
                "{% for m in messages %}{% if m.role != 'user' %}{{ raise_exception('') }}"
                "{% endif %}{{ m.content }}{% endfor %}"
            ),
            "",
            id="an answer that cannot be rendered",
        ),
    ],
)
def test_the_closer_is_the_first_added_token_behind_an_answer(
    template: str, closer: str, tmp_path: Path
) -> None:
    folder = qwen(tmp_path / "q")
    renderer = Renderer(str(folder), 500, ModelConfig(model=str(folder), chat_template=template))
    assert renderer.closer == (renderer.encode(closer).tolist()[0] if closer else None)


def test_stops_are_added_as_text_or_id_and_can_replace_the_models_own(base: Path) -> None:
    so = Renderer(str(base), 100).encode("so").tolist()[0]
    for given, own, expected in (
        (["so", 5], True, {EOS, CLOSER, so, 5}),
        (["<|im_end|>"], False, {CLOSER}),
        ([EOS], False, {EOS}),
    ):
        assert Renderer(str(base), 100, stop_tokens=given, own_stops=own).stop_tokens == expected
    config = run_of(
        f"target.model={base}",
        'scorer.stop_tokens=["so"]',
        "rollout.stop_tokens=[5]",
        "rollout.own_stops=false",
    )
    assert renderer_of(config, "scorer").stop_tokens == {EOS, CLOSER, so}
    assert renderer_of(config, "rollout").stop_tokens == {5}


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        pytest.param(
            "so so",
            (
                "scorer.stop_tokens: 'so so' is 2 tokens of .*its added tokens are "
                r"'<\|endoftext\|>', .*stop_texts"
            ),
            id="two tokens",
        ),
        pytest.param(
            "elephant",
            "scorer.stop_tokens: 'elephant' is 1 tokens of .* a stop must be one that it knows",
            id="an unknown word",
        ),
        pytest.param(
            40,
            "scorer.stop_tokens: 40 is no token of .*0 to 39",
            id="a number beyond the vocabulary",
        ),
        pytest.param(-1, "scorer.stop_tokens: -1 is no token", id="a negative number"),
    ],
)
def test_a_stop_that_is_no_token_is_refused_with_those_there_are(
    given: str | int, complaint: str, base: Path
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Renderer(str(base), 100, stop_tokens=[given], role="scorer")


def test_without_a_chat_template_the_prompt_is_the_prompt_template_with_the_question(
    base: Path, tmp_path: Path
) -> None:
    file = tmp_path / "shots.txt"
    file.write_text("sum 1 1 so \\boxed{2} {question} so\n", encoding="utf-8")
    config = run_of(
        f"target.model={base}", "target.chat_template=false", f"target.prompt_template={file}"
    )
    renderer = renderer_of(config, "scorer")
    assert (
        renderer.prompt(QUESTION).tolist()
        == renderer.encode(f"sum 1 1 so \\boxed{{2}} {QUESTION} so").tolist()
    )
    assert not renderer.has_chat_template and renderer.stop_tokens == {EOS}
    file.unlink()
    assert (
        renderer_of(RunConfig.model_validate_json(config.model_dump_json()), "scorer")
        .prompt(QUESTION)
        .size
        > 3
    )


def test_a_prompt_template_a_system_turn_and_options_go_through_the_chat_template(
    tmp_path: Path,
) -> None:
    folder = qwen(tmp_path / "q")
    template = Renderer(str(folder), 500)._form.template
    assert template is not None
    (tmp_path / "own.jinja").write_text(
        template + "{% if think == false %}<think></think>{% endif %}"
    )
    asked = {
        "system": "Be brief.",
        "prompt_template": "Solve: {problem}",
        "template_options": {"think": False},
    }
    config = run_of(f"adapter.model={folder}", f"adapter.chat_template={tmp_path}/own.jinja")
    config = config.model_copy(update={"adapter": config.adapter.model_copy(update=asked)})
    renderer = renderer_of(config, "rollout")
    assert renderer.decode_with_special(renderer.prompt("1+1?")) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nSolve: 1+1?<|im_end|>\n<|im_start|>assistant\n"
        "<think></think>"
    )


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        pytest.param(
            {"template_options": {"enable_thinking": False}},
            "adapter.template_options.enable_thinking: .*no such variable",
            id="an option that the template has not",
        ),
        pytest.param(
            {"chat_template": "{{ raise_exception('never') }}"},
            "adapter.chat_template: .* cannot render user: never",
            id="a template that raises",
        ),
        pytest.param(
            {"chat_template": "{% if %}"},
            "adapter.chat_template: .* cannot render",
            id="a template that does not parse",
        ),
    ],
)
def test_a_template_that_cannot_be_used_as_asked_is_refused(
    asked: dict[str, object], complaint: str
) -> None:
    model = str(EXAMPLE / "adapter")
    with pytest.raises(ConfigError, match=complaint):
        Renderer(model, 100, ModelConfig.model_validate({"model": model, **asked}))


def test_a_system_turn_without_a_template_is_refused(base: Path, tmp_path: Path) -> None:
    folder = base_model(EXAMPLE / "adapter", tmp_path / "bare")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match=r"adapter.system has no effect: .* has no chat template"):
        Renderer(str(folder), 100, ModelConfig(model=str(folder), system="Be brief."))


def test_control_tokens_are_the_special_ones_that_end_no_text(base: Path) -> None:
    plain = Renderer(str(EXAMPLE / "adapter"), 100)
    assert plain.control_tokens == {0, 2, 3, 4}
    assert Renderer(str(base), 100).control_tokens == {2, 3, 4}
    assert Renderer(str(base), 100, stop_tokens=["<|user|>"]).control_tokens == {2, 4}
    assert plain.has_control(np.asarray([7, 3])) and not plain.has_control(np.asarray([7, 1]))
    assert masked_tokens(run_of(), str(EXAMPLE / "adapter")) == (0, 2, 3, 4)
    assert masked_tokens(run_of("rollout.control_tokens=allow"), str(EXAMPLE / "adapter")) == ()
    assert masked_tokens(run_of(), str(EXAMPLE)) == ()


def test_the_lines_about_a_base_model_show_prompt_and_stops_and_warn_of_its_closer(
    base: Path,
) -> None:
    lines = asked(run_of(f"target.model={base}"))
    assert f"target: chat template, a prompt ends with '<|user|> {QUESTION} <|assistant|>'" in lines
    assert "target: a text ends at 0 '<|endoftext|>', 1 '<|im_end|>'" in lines
    warnings = [line for line in lines if line.startswith("warning: ")]
    assert len(warnings) == 2
    assert warnings[0].startswith(
        "warning: target: 1 '<|im_end|>' closes a turn of its chat template and is no eos of"
    )
    assert "texts end there too" in warnings[0] and "target.chat_template = false" in warnings[0]
    assert "tokenizers of different families" in warnings[1]


def test_the_lines_about_the_example_warn_of_nothing() -> None:
    assert not any("warning" in line for line in asked(run_of()))


def test_the_lines_warn_of_a_folder_without_a_template_unless_that_is_meant(tmp_path: Path) -> None:
    folder = base_model(EXAMPLE / "adapter", tmp_path / "bare")
    (folder / "chat_template.jinja").unlink()
    models = (f"adapter.model={folder}", f"target.model={folder}")
    actual = [line for line in asked(run_of(*models)) if "warning" in line]
    assert [line.split(":")[1].strip() for line in actual] == ["adapter", "target"]
    assert "has no chat template" in actual[0] and "adapter.chat_template = false" in actual[0]
    meant = ("adapter.chat_template=false", "target.chat_template=false")
    assert not any("warning" in line for line in asked(run_of(*models, *meant)))


def test_the_lines_warn_of_a_template_that_closes_nothing_and_leave_out_what_is_not_here() -> None:
    config = run_of(
        "target.model=org/away",
        "adapter.chat_template={% for m in messages %}{{ m.content }}{% endfor %}",
    )
    lines = asked(config)
    assert any(
        "no token closes an assistant's turn" in line and "rollout.stop_tokens" in line
        for line in lines
    )
    assert "target: how it is asked is not known before it is on this host (org/away)" in lines


def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("none")
    with pytest.raises(DataError, match=rf"no tokenizer of {tmp_path} can be read"):
        Renderer(str(tmp_path), 100)


def test_settings_over_a_resolved_config_keep_its_templates_and_read_new_ones(
    tmp_path: Path,
) -> None:
    config = run_of("adapter.prompt_template=Q {problem}", "target.chat_template=false")
    assert changed(config, ("rollout.temperature=0.5",), "here").adapter == config.adapter
    (tmp_path / "other.txt").write_text("R {problem}")
    actual = changed(config, (f"target.prompt_template={tmp_path}/other.txt",), "here").target
    assert (
        actual is not None
        and actual.prompt_template == "R {problem}"
        and actual.chat_template is False
    )


def test_a_short_question_behind_long_worked_examples_is_found_to_be_too_long() -> None:
    config = run_of(
        f"adapter.prompt_template={'so ' * 500}{{problem}}", "rollout.max_prompt_tokens=400"
    )
    assert "rollout.max_prompt_tokens" in unaskable([Problem("p", "sum 1", "1")], config)["p"]
    assert unaskable([Problem("p", "sum 1", "1")], run_of("rollout.max_prompt_tokens=400")) == {}


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        pytest.param(
            ("adapter.chat_template=false", "adapter.system=hi"),
            "system = .hi. has no effect with chat_template = false",
            id="a system text without a template",
        ),
        pytest.param(
            ("target.template_options={tools=1}",),
            "template_options sets tools",
            id="an option that the chat sets",
        ),
        pytest.param(
            ("adapter.prompt_template=none.txt",),
            "adapter.prompt_template = 'none.txt': the file .* cannot be read",
            id="no such prompt template",
        ),
        pytest.param(
            ("adapter.prompt_template=run.toml",),
            "its text has no {problem}",
            id="a prompt template without the problem",
        ),
        pytest.param(
            ('adapter.chat_template=""',),
            "neither a file nor a template",
            id="an empty chat template",
        ),
        pytest.param(
            ("scorer.own_stops=false",),
            "own_stops = false without stop_tokens",
            id="no own stops and no others",
        ),
        pytest.param(('scorer.stop_texts=[""]',), "stop_texts", id="an empty stop"),
    ],
)
def test_keys_that_cannot_be_meant_are_refused(settings: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        run_of(*settings)
