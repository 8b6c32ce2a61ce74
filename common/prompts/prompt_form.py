"""The text of a prompt from a question, and the token that closes an assistant's turn."""

import re
from collections.abc import Sequence
from typing import Any

from prefixrl.common.config.foreign.templates import without_advice
from prefixrl.common.config.prompting import ADVICE, DRAFT, PROBLEM, ModelConfig, TargetConfig
from prefixrl.common.errors import ConfigError
from prefixrl.common.wire.messages.groups import Turn

_ANSWER, _NEXT = "prefixrlanswer", "prefixrlnext"
"""Contents of turns in a trial conversation, which no template changes."""


def conversation(
    model: ModelConfig,
    question: str,
    system: str = "",
    earlier: Sequence[Turn] = (),
    advice: str = "",
    draft: str = "",
) -> list[Turn]:
    """Return role and text of each turn that asks a question; the last one is the user's.

    Args:
        system: the row's own system turn, which that of the run file replaces.
        earlier: turns before the question.
        advice: with it the templates have it in its place; without it they are those of a question
            without advice.
        draft: the target's answer without advice, where the adapter reads it.
    """
    template, run_system = model.prompt_template, model.system
    if isinstance(model, TargetConfig) and model.has_advice and not advice:
        template = model.bare_template or (template and without_advice(template))
        run_system = (run_system and without_advice(run_system)) or None
    content = question
    if template is not None:
        content = _filled(template, {PROBLEM: question, ADVICE: advice, DRAFT: draft})
    first = [("system", system)] if system else []
    if run_system is not None:  # also an empty one, which is none for some chat templates
        first = [("system", _filled(run_system, {ADVICE: advice}))]
    return [*first, *earlier, ("user", content)]


class PromptForm:
    """Form in which a model is asked: `[adapter]` or `[target]`, with its tokenizer."""

    def __init__(self, tokenizer: Any, model: ModelConfig, section: str) -> None:
        """Try the chat template out; ConfigError if it fails, or nothing reads an option."""
        self._tokenizer = tokenizer
        self._asked = model
        self._section = section
        template = model.chat_template
        self.template: str | None = None
        """The chat template; None where the prompt is no conversation."""
        if template is None and tokenizer.chat_template:
            self.template = tokenizer.get_chat_template()
        elif template:
            self.template = template
        self._check()

    def prompt(self, turns: list[Turn]) -> str:
        """Return the text of a conversation, up to the opened turn of the assistant."""
        if self.template is None:
            return "\n\n".join(filter(None, (said for _, said in turns)))
        return self._rendered(turns, is_opened=True)

    def closer(self) -> int | None:
        """Return the first added token behind an answer, which closes the turn, or None."""
        if self.template is None:
            return None
        for after in ([], [("user", _NEXT)]):
            try:
                turns = [*conversation(self._asked, "?"), ("assistant", _ANSWER), *after]
                text = self._rendered(turns, is_opened=False)
            except ConfigError:
                continue  # a template for prompts only
            behind = text.rpartition(_ANSWER)[2].partition(_NEXT)[0]
            ids = self._tokenizer.encode(behind, add_special_tokens=False)
            added = self._tokenizer.added_tokens_decoder
            closing = [
                int(token)
                for token in ids
                if token in added and token != self._tokenizer.unk_token_id
            ]
            if text.count(_ANSWER) and closing:
                return closing[0]
        return None

    def _check(self) -> None:
        model = self._asked
        section = self._section
        if self.template is None:
            if model.system is not None or model.template_options:
                key = "system" if model.system is not None else "template_options"
                raise ConfigError(
                    f"{section}.{key} has no effect: {model.model} has no chat template; give one as "
                    f"{section}.chat_template, or leave {section}.{key} out"
                )
            return
        for option in model.template_options:
            if not re.search(rf"\b{re.escape(option)}\b", self.template):
                raise ConfigError(
                    f"{section}.template_options.{option}: the chat template of {model.model} has no such variable; "
                    f"leave it out"
                )
        self.prompt(conversation(model, "?"))

    def _rendered(self, turns: list[Turn], is_opened: bool) -> str:
        messages = [{"role": role, "content": content} for role, content in turns]
        try:
            text = self._tokenizer.apply_chat_template(
                messages,
                chat_template=self.template,
                add_generation_prompt=is_opened,
                tokenize=False,
                **self._asked.template_options,
            )
        except Exception as error:  # a template may raise anything
            raise ConfigError(
                f"{self._section}.chat_template: the template of {self._asked.model} cannot render "
                f"{' and '.join(turn['role'] for turn in messages)}: {error}"
            ) from error
        return str(text)


def _filled(template: str, texts: dict[str, str]) -> str:
    """Return a template with texts in the places that they name; a text's own braces are left as they are."""
    pattern = "|".join(map(re.escape, texts))
    return re.sub(pattern, lambda place: texts[place[0]], template)
