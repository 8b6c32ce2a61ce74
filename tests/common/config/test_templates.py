"""Templates around a question: their places, the form without advice, defaults of a run with advice."""

from pathlib import Path

import pytest

from prefixrl.common.config.foreign.templates import (
    ADVISER_TEMPLATE,
    REVIEWER_TEMPLATE,
    without_advice,
)
from prefixrl.common.config.load import load
from prefixrl.common.config.prompting import ADVICE_TEMPLATE
from prefixrl.common.errors import ConfigError
from support.paths import EXAMPLE

ADVISED = 'target.placement="advice"'


def test_a_run_with_advice_has_a_template_for_both_models() -> None:
    config = load(EXAMPLE / "run.toml", (ADVISED,))
    assert config.target is not None and config.target.prompt_template == ADVICE_TEMPLATE
    assert config.adapter.prompt_template == ADVISER_TEMPLATE
    assert config.has_advice


def test_templates_of_the_run_file_stay_as_they_are() -> None:
    settings = (
        ADVISED,
        'adapter.prompt_template="Advise: {problem}"',
        'target.system="Heed this: {prefix}"',
    )
    config = load(EXAMPLE / "run.toml", settings)
    assert config.adapter.prompt_template == "Advise: {problem}"
    assert config.target is not None and config.target.prompt_template is None


def test_an_adapter_that_reads_drafts_is_asked_to_improve_them() -> None:
    config = load(EXAMPLE / "run.toml", (ADVISED, "adapter.sees=draft"))
    assert config.adapter.prompt_template == REVIEWER_TEMPLATE
    assert {"{problem}", "{draft}"} <= set(REVIEWER_TEMPLATE.split())


def test_a_run_without_advice_has_the_templates_that_it_had() -> None:
    config = load(EXAMPLE / "run.toml")
    assert config.target is not None and not config.has_advice
    assert config.target.prompt_template is config.adapter.prompt_template is None


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        pytest.param(
            ['target.prompt_template="{problem} {prefix}"'],
            r"target.prompt_template has \{prefix\}, which is filled in only with target.placement",
            id="a place of advice without advice",
        ),
        pytest.param(
            ['target.system="{prefix}"'], r"target.system has \{prefix\}", id="in the system turn"
        ),
        pytest.param(
            ['adapter.prompt_template="{problem} {prefix}"'],
            r"adapter.prompt_template has \{prefix\}, which nothing fills in; allowed are: \{problem\}",
            id="in the adapter's template",
        ),
        pytest.param(
            ['target.prompt_template="{problem} {gold}"'],
            r"target.prompt_template has \{gold\}",
            id="another name",
        ),
        pytest.param(
            ['adapter.system="Hello {user_name}"'], r"adapter.system has \{user_name\}", id="system"
        ),
        pytest.param(
            [ADVISED, 'target.prompt_template="Solve: {problem}"'],
            r"neither target.prompt_template nor target.system has \{prefix\}",
            id="advice without a place",
        ),
        pytest.param(
            [ADVISED, 'target.prompt_template="{problem} Advice: {prefix}"'],
            r"\{problem\} and \{prefix\} are on one line.* target.bare_template",
            id="no form without advice",
        ),
        pytest.param(
            [ADVISED, 'target.bare_template="{problem} {prefix}"'],
            r"target.bare_template has \{prefix\}",
            id="advice in the form without it",
        ),
        pytest.param(
            ['target.bare_template="{problem}"'],
            'bare_template = "{problem}" has no effect with placement = "answer"',
            id="a form without advice where there is none",
        ),
        pytest.param(
            ["adapter.sees=draft"],
            'adapter.sees = .draft. with target.placement = .answer.: .*use target.placement = "advice"',
            id="a draft without advice",
        ),
        pytest.param(
            [ADVISED, "adapter.sees=draft", 'adapter.prompt_template="{problem}"'],
            r'adapter.sees = "draft": adapter.prompt_template has no \{draft\}',
            id="a draft without a place",
        ),
        pytest.param(
            [ADVISED, 'adapter.prompt_template="{problem} {draft}"'],
            r'has \{draft\}, which is filled in only with adapter.sees = "draft"',
            id="a place of a draft without one",
        ),
        pytest.param(
            [ADVISED, 'target.prompt_template="{problem}\n{prefix}\n{draft}"'],
            r"target.prompt_template has \{draft\}, which nothing fills in",
            id="a draft for the target",
        ),
    ],
)
def test_places_that_nothing_fills_are_refused(settings: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load(EXAMPLE / "run.toml", tuple(settings))


@pytest.mark.parametrize(
    "text",
    [
        r"{problem} in \\boxed{answer}",
        "{problem} as $x_{ij}$, $2^{th}$",
        "{problem} with \\\\frac{ab}{cd}",
        '{problem} as { "answer": 3 }, {x}, {}',
        "{problem} like { name }",
    ],
)
def test_braces_of_formulas_and_code_are_no_places(text: str) -> None:
    load(EXAMPLE / "run.toml", (f'target.prompt_template="""{text}"""',))


def test_a_template_file_is_read_with_its_places(tmp_path: Path) -> None:
    file = tmp_path / "advised.txt"
    file.write_text("{question}\n\nAdvice: {prefix}\n\nAnswer in a box.\n", encoding="utf-8")
    config = load(EXAMPLE / "run.toml", (ADVISED, f'target.prompt_template="{file}"'))
    assert config.target is not None
    assert config.target.prompt_template == "{problem}\n\nAdvice: {prefix}\n\nAnswer in a box."


def test_the_form_without_advice_leaves_out_the_lines_of_the_advice() -> None:
    assert without_advice("{problem}\n\nAdvice: {prefix}") == "{problem}"
    assert without_advice("A {prefix}\n{problem}\nBox it.") == "{problem}\nBox it."
