"""`prefixrl show`: the exact tokens of a question. Wrong templates fail silently."""

from collections.abc import Iterator

import numpy as np

from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import ConfigError
from prefixrl.common.host.hub import model_folder
from prefixrl.common.prompts.asking import WARNING, differing, roles, shown, warnings
from prefixrl.common.prompts.rendering import Renderer, renderer_of


def show(config: RunConfig, question: str, prefix: str) -> Iterator[str]:
    """Yield prompt and prefix per model, as text and ids; raise ConfigError for a long question."""
    found: dict[str, Renderer] = {}
    for section, role in roles(config):
        model = config.asked(role).model
        renderer = found[section] = renderer_of(config, role, model_folder(model, needs_weights=False))
        try:
            ids = renderer.prompt(question)
        except ValueError as error:
            raise ConfigError(f"{section}: {error}") from None
        yield f"{section}: {model}"
        yield from _tokens(renderer, "prompt", ids.tolist())
        yield f"  ends with: {shown(renderer, renderer.stop_tokens)}"
        if prefix:
            yield from _tokens(renderer, "prefix", renderer.encode(prefix).tolist())
        yield from (f"  {WARNING}{each}" for each in warnings(config, role, renderer))
        yield ""
    yield from (WARNING + each for each in differing(found))


def _tokens(renderer: Renderer, what: str, ids: list[int]) -> Iterator[str]:
    """Yield the text of tokens, then each token in quotes, which make spaces visible."""
    yield f"  {what}, {len(ids)} tokens: {_text(renderer, ids)}"
    yield f"  {what}, token by token: {' '.join(f'{token}={_text(renderer, [token])}' for token in ids)}"


def _text(renderer: Renderer, ids: list[int]) -> str:
    return repr(renderer.decode_with_special(np.asarray(ids, dtype=np.int32)))
