"""`prefixrl show`: the exact tokens of a question. Wrong templates fail silently."""

from collections.abc import Iterator

import numpy as np

from prefixrl.common.config.run import RunConfig
from prefixrl.common.engines.rendering import Renderer
from prefixrl.common.errors import ConfigError
from prefixrl.common.hub import model_folder


def show(config: RunConfig, question: str, prefix: str) -> Iterator[str]:
    """Yield prompt and prefix per model, as text and ids; raise ConfigError for a long question."""
    models = [("adapter", config.adapter.model, config.rollout.max_prompt_tokens)]
    if config.target is not None:
        models.append(("target", config.target.model, config.scorer.max_prompt_tokens))
    for role, model, limit in models:
        renderer = Renderer(model_folder(model, needs_weights=False), limit)
        try:
            ids = renderer.prompt(question)
        except ValueError as error:
            raise ConfigError(f"{role}: {error}") from None
        yield f"{role}: {model}"
        yield from _tokens(renderer, "prompt", ids.tolist())
        stops = ", ".join(f"{stop} {_piece(renderer, stop)}" for stop in sorted(renderer.stop_tokens))
        yield f"  ends with: {stops}"
        if prefix:
            yield from _tokens(renderer, "prefix", renderer.encode(prefix).tolist())
        yield ""


def _tokens(renderer: Renderer, what: str, ids: list[int]) -> Iterator[str]:
    """Yield the text of tokens, then each token in quotes, which make spaces visible."""
    yield f"  {what}, {len(ids)} tokens: {_text(renderer, ids)}"
    yield f"  {what}, token by token: {' '.join(f'{token}={_piece(renderer, token)}' for token in ids)}"


def _text(renderer: Renderer, ids: list[int]) -> str:
    return repr(renderer.decode_with_special(np.asarray(ids, dtype=np.int32)))


def _piece(renderer: Renderer, token: int) -> str:
    return _text(renderer, [token])
