"""Lines that show how models are asked and where texts end; warnings about it."""

import logging
from collections.abc import Iterator

import numpy as np

from prefixrl.common.config.run import RunConfig
from prefixrl.common.engines.interface.base import TokenIds
from prefixrl.common.host.hub import cached_file
from prefixrl.common.prompts.rendering import Renderer, Role, Texts, renderer_of

log = logging.getLogger(__name__)

TAIL_CHARS = 160
ADVICE = "(the advice of the adapter)"
"""Stand-in for advice in a prompt that is only shown."""
DRAFT = "(the draft of the target)"
"""Stand-in for a draft in a prompt that is only shown."""
WARNING = "warning: "


def renderers_here(config: RunConfig) -> dict[str, Renderer]:
    """Return the renderer of each section whose tokenizer is on this host, and is used."""
    renderers = {}
    for section, role in roles(config):
        model = config.model_section(role).model
        tokenizer = cached_file(model, "tokenizer.json") or cached_file(
            model, "tokenizer_config.json"
        )
        if tokenizer is not None:
            renderers[section] = renderer_of(config, role, str(tokenizer.parent))
    return renderers


def asking_lines(config: RunConfig, here: dict[str, Renderer], question: str) -> list[str]:
    """Return lines per model, then warnings; models that are not on this host stay unread."""
    lines = list[str]()
    doubts = list[str]()
    for section, role in roles(config):
        if section in here:
            lines += _lines(config, section, here[section], question)
            doubts += warnings(config, role, here[section])
        else:
            model = config.model_section(role).model
            lines.append(
                f"{section}: how it is asked is not known before it is on this host ({model})"
            )
    # Advice is a text for every tokenizer.
    families = () if config.has_advice else differing(here)
    return lines + [WARNING + each for each in (*doubts, *families)]


def roles(config: RunConfig) -> list[tuple[str, Role]]:
    """Return the section of each model that is asked, and the role that asks it by a tokenizer."""
    sections: list[tuple[str, Role]] = (
        [("adapter", "rollout")] if config.rollout.has_tokenizer else []
    )
    has_target = config.target is not None and config.scorer.has_tokenizer
    return [*sections, ("target", "scorer")] if has_target else sections


def shown_prompts(
    config: RunConfig, section: str, renderer: Renderer, question: str, advice: str = ""
) -> Iterator[tuple[str, TokenIds]]:
    """Yield the prompts of a model by their names, with stand-ins for the other model's text; raise ValueError."""
    name, draft = "prompt", ""
    if section == "adapter" and config.adapter.sees_draft:
        name, draft = "prompt with a draft", DRAFT
    elif section == "target" and config.has_advice:
        yield "prompt with advice", renderer.prompt(question, advice=advice or ADVICE)
        name = "prompt without advice"
    yield name, renderer.prompt(question, draft=draft)


def token_words(renderer: Renderer, tokens: frozenset[int]) -> str:
    """Return tokens with their text, in order."""
    texts = (
        (token, renderer.decode_with_special(np.asarray([token], dtype=np.int32)))
        for token in sorted(tokens)
    )
    return ", ".join(f"{token} {text!r}" for token, text in texts)


def _lines(config: RunConfig, section: str, renderer: Renderer, question: str) -> Iterator[str]:
    form = "chat template" if renderer.has_chat_template else "no chat template"
    try:
        for name, ids in shown_prompts(config, section, renderer, question):
            text = renderer.decode_with_special(ids)
            cut = "…" if len(text) > TAIL_CHARS else ""
            yield f"{section}: {form}, a {name} ends with {cut}{text[-TAIL_CHARS:]!r}"
    except ValueError as error:
        yield f"{section}: {error}"
        return
    yield f"{section}: a text ends at {token_words(renderer, renderer.stop_tokens)}"
    masked = renderer.never_drawn(config.rollout.control_tokens)
    control = len(masked & renderer.control_tokens)
    drawn = (
        f"; never drawn: {len(masked) - control} ids that are no token, {control} control tokens"
    )
    size = f"{section}: {len(renderer.tokens):,} tokens, {renderer.rows:,} rows of the embedding"
    yield size + (drawn if section == "adapter" else "")


def warnings(config: RunConfig, role: Role, renderer: Renderer) -> Iterator[str]:
    """Yield what looks wrong about how one model is asked."""
    model = config.model_section(role)
    section = "target" if model is config.target else "adapter"
    if (text := renderer.misread_text()) is not None:
        yield (
            f"{section}: transformers reads {text!r} as other tokens than tokenizer.json of {model.model}; if that "
            f"file is right, set tokenizer_class in its tokenizer_config.json to PreTrainedTokenizerFast"
        )
    if lost := len(renderer.vocabulary) - len(renderer.tokens):
        yield f"{section}: {lost} tokens have no row in the embedding: a question with one is a bad row"
    most_masked = config.rollout.record.most_masked_tokens
    masked = len(renderer.never_drawn(config.rollout.control_tokens))
    if section == "adapter" and most_masked is not None and masked > most_masked:
        yield (
            f"{section}: {config.rollout.record.package} leaves out {most_masked:,} tokens at most, {masked:,} are "
            f'never drawn: use rollout.engine = "transformers"'
        )
    if not renderer.has_chat_template and model.chat_template is None:
        yield (
            f"{section}: {model.model} has no chat template, so that the question itself is the prompt; if that is "
            f"meant, say {section}.chat_template = false, else give a Jinja file"
        )
    # The other warnings are about the end of a turn.
    if not renderer.has_chat_template:
        return
    if renderer.closer is None:
        yield (
            f"{section}: no token closes an assistant's turn in its chat template, so that texts may go on with an "
            f"invented turn; name what ends them as {role}.stop_tokens or scorer.stop_texts"
        )
    elif renderer.closer not in renderer.eos_tokens:
        closer = token_words(renderer, frozenset({renderer.closer}))
        ends = (
            "texts end there too"
            if renderer.closer in renderer.stop_tokens
            else "texts do not end there"
        )
        yield (
            f"{section}: {closer} closes a turn of its chat template and is no eos of {model.model} "
            f"({token_words(renderer, renderer.eos_tokens) or 'none'}), as in base models, which were not trained on "
            f"this template; {ends}. A base model is asked as it was trained with {section}.chat_template = false and "
            f"{section}.prompt_template"
        )


def log_warnings(config: RunConfig, role: Role, renderer: Texts) -> None:
    """Log what looks wrong about how one model is asked."""
    for warning in warnings(config, role, renderer) if isinstance(renderer, Renderer) else ():
        log.warning("%s", warning)


def differing(renderers: dict[str, Renderer]) -> Iterator[str]:
    """Yield a warning where the models' tokenizers are of different families."""
    if len(renderers) == 2 and renderers["adapter"].vocabulary != renderers["target"].vocabulary:
        yield (
            "adapter and target have tokenizers of different families: prefixes reach the target as text where it "
            "reads other tokens (docs/data.md), and accuracy is known to suffer"
        )
