"""Texts around a question: reading template files, their places in braces, the form without advice."""

import os
import re
from pathlib import Path
from typing import TypeVar

from prefixrl.common.config.prompting import (
    ADVICE,
    ADVICE_TEMPLATE,
    DRAFT,
    PROBLEM,
    AdapterConfig,
    ModelConfig,
    TargetConfig,
)
from prefixrl.common.errors import ConfigError

_BRACE = "{"
"""In the text of every template, and not in the name of a file."""
_NAME = re.compile(r"(?<![\\{}^_$\w])\{([a-z][a-z_]+)\}")
r"""A place: a name in braces, in no formula: `\boxed{answer}` and `x^{ab}` have none."""
ADVISER_TEMPLATE = (
    "Somebody else will answer this question:\n\n"
    f"{PROBLEM}\n\n"
    "Write short advice that helps them to answer it. Do not write the answer itself."
)
"""The adapter's prompt template with advice, where the run file has none."""
REVIEWER_TEMPLATE = (
    "Somebody else was asked this question:\n\n"
    f"{PROBLEM}\n\n"
    "This is their draft of an answer, which may be wrong:\n\n"
    f"{DRAFT}\n\n"
    "Write short advice that helps them to improve it. Do not write the answer itself."
)
"""The adapter's prompt template where it reads the target's draft, and the run file has none."""
AnyModel = TypeVar("AnyModel", bound=ModelConfig)


def with_texts(model: AnyModel, section: str, base: Path) -> AnyModel:
    """Return the section with its template files read; raises ConfigError."""
    chat = model.chat_template
    texts: dict[str, object] = {
        "chat_template": _text(f"{section}.chat_template", chat, base) if chat else chat,
        "prompt_template": _question_text(
            f"{section}.prompt_template", model.prompt_template, base
        ),
    }
    if isinstance(model, TargetConfig):
        bare = _question_text(f"{section}.bare_template", model.bare_template, base)
        texts["bare_template"] = bare
        if (
            model.has_advice
            and model.prompt_template is None
            and ADVICE not in (model.system or "")
        ):
            texts["prompt_template"] = ADVICE_TEMPLATE
    changed = model.model_copy(update=texts)
    _check_places(changed, section)
    return changed


def adviser(adapter: AdapterConfig, target: TargetConfig | None) -> AdapterConfig:
    """Return the adapter with the prompt that asks for advice, where it has no prompt of its own."""
    if target is None or not target.has_advice or adapter.prompt_template is not None:
        return adapter
    template = REVIEWER_TEMPLATE if adapter.sees_draft else ADVISER_TEMPLATE
    return adapter.model_copy(update={"prompt_template": template})


def without_advice(text: str) -> str:
    """Return a template without the lines that have the place of the advice, and the empty lines at its end."""
    lines = [line for line in text.split("\n") if ADVICE not in line]
    return "\n".join(lines).rstrip("\n")


def _question_text(key: str, template: str | None, base: Path) -> str | None:
    """Return the text of a template; raises ConfigError if a question has no place in it."""
    if template is None:
        return None
    text = _text(key, template, base).replace("{question}", PROBLEM)
    if PROBLEM not in text:
        raise ConfigError(
            f"{key} = {template!r}: its text has no {PROBLEM}, the place of the question; put it in"
        )
    return text


def _check_places(model: ModelConfig, section: str) -> None:
    """Raise ConfigError for a place that nothing fills, or where the place of the advice is missing."""
    takes_advice = isinstance(model, TargetConfig) and model.has_advice
    sees_draft = isinstance(model, AdapterConfig) and model.sees_draft
    keys = {
        "prompt_template": {PROBLEM, *[ADVICE] * takes_advice, *[DRAFT] * sees_draft},
        "system": {ADVICE} if takes_advice else set[str](),
        "bare_template": {PROBLEM},
    }
    for key, places in keys.items():
        for name in _NAME.findall(getattr(model, key, None) or ""):
            if f"{{{name}}}" not in places:
                raise ConfigError(_unknown_place(f"{section}.{key}", f"{{{name}}}", places))
    if sees_draft and model.prompt_template and DRAFT not in model.prompt_template:
        raise ConfigError(
            f'{section}.sees = "draft": {section}.prompt_template has no {DRAFT}, the place of the target\'s draft; '
            f"put it in, or leave the template out"
        )
    if not isinstance(model, TargetConfig) or not model.has_advice:
        return
    texts = {"prompt_template": model.prompt_template or "", "system": model.system or ""}
    if not any(ADVICE in text for text in texts.values()):
        raise ConfigError(
            f'{section}.placement = "advice": neither {section}.prompt_template nor {section}.system has {ADVICE}, '
            f"the place of the advice; put it in"
        )
    if PROBLEM not in (model.bare_template or without_advice(texts["prompt_template"] or PROBLEM)):
        raise ConfigError(
            f"{section}.prompt_template: {PROBLEM} and {ADVICE} are on one line, so that the form without advice is "
            f"not known; put them on lines of their own, or give {section}.bare_template"
        )


def _unknown_place(key: str, place: str, places: set[str]) -> str:
    allowed = ", ".join(sorted(places)) or "none"
    if place == ADVICE and key.startswith("target."):
        return (
            f"{key} has {ADVICE}, which is filled in only with target.placement = "
            f'"advice"; use that, or leave {ADVICE} out: the target continues the prefix'
        )
    if place == DRAFT and key == "adapter.prompt_template":
        return f'{key} has {DRAFT}, which is filled in only with adapter.sees = "draft"; use that, or leave {DRAFT} out'
    return (
        f"{key} has {place}, which nothing fills in; allowed are: {allowed}. Text that is to stand in braces has "
        f"spaces within them: {{ {place[1:-1]} }}"
    )


def _text(key: str, text: str, base: Path) -> str:
    if _BRACE in text:
        return text
    path = base / os.path.expanduser(text)
    try:
        return path.read_text(encoding="utf-8").removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{key} = {text!r}: the file {path} cannot be read ({reason}), and a template itself would have a brace "
            f"({_BRACE!r}); give one of them"
        ) from None
