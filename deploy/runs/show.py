"""`prefixrl show`: the exact text and tokens that adapter and target see of a question."""

from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np

from prefixrl.common.config.load import load
from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import ConfigError
from prefixrl.common.host.hub import model_folder
from prefixrl.common.prompts.asking import (
    WARNING,
    differing,
    roles,
    shown_prompts,
    token_words,
    warnings,
)
from prefixrl.common.prompts.rendering import Renderer, renderer_of
from prefixrl.common.worker.command import PATH, settings_option


@click.command("show")
@click.argument("run_file", type=PATH)
@click.argument("question")
@click.option("--prefix", default="", help="Text to show as the prefix, or as the advice, too.")
@settings_option
def show_command(run_file: Path, question: str, prefix: str, settings: tuple[str, ...]) -> None:
    """Show the exact text and tokens that adapter and target of RUN_FILE see of QUESTION."""
    for line in prompt_lines(load(run_file, settings), question, prefix):
        click.echo(line)


def prompt_lines(config: RunConfig, question: str, prefix: str) -> Iterator[str]:
    """Yield prompt and prefix per model, as text and ids; raise ConfigError for a long question."""
    renderers: dict[str, Renderer] = {}
    for section, role in roles(config):
        model = config.model_section(role).model
        folder = model_folder(model, needs_weights=False)
        renderer = renderers[section] = renderer_of(config, role, folder)
        yield f"{section}: {model}"
        try:
            for name, ids in shown_prompts(config, section, renderer, question, prefix):
                yield from _tokens(renderer, name, ids.tolist())
        except ValueError as error:
            raise ConfigError(f"{section}: {error}") from None
        yield f"  ends with: {token_words(renderer, renderer.stop_tokens)}"
        if prefix and not (config.has_advice and section == "target"):
            yield from _tokens(renderer, "prefix", renderer.encode(prefix).tolist())
        yield from (f"  {WARNING}{each}" for each in warnings(config, role, renderer))
        yield ""
    yield from (WARNING + each for each in differing(renderers))


def _tokens(renderer: Renderer, what: str, ids: list[int]) -> Iterator[str]:
    """Yield the text of tokens, then each token in quotes, which make spaces visible."""
    yield f"  {what}, {len(ids)} tokens: {_text(renderer, ids)}"
    yield f"  {what}, token by token: {' '.join(f'{token}={_text(renderer, [token])}' for token in ids)}"


def _text(renderer: Renderer, ids: list[int]) -> str:
    return repr(renderer.decode_with_special(np.asarray(ids, dtype=np.int32)))
