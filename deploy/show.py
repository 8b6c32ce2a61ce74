"""`prefixrl show`: the exact tokens that adapter and target see of a question. Most silent failures are templates."""

from collections.abc import Iterator

import numpy as np

from prefixrl.common.config import RunConfig
from prefixrl.common.errors import ConfigError
from prefixrl.common.hub import model_folder
from prefixrl.common.rendering import Renderer


def show(config: RunConfig, question: str, prefix: str) -> Iterator[str]:
    """Lines for a person: per model its prompt as text, special tokens written out, then as ids; then the prefix.

    Raises:
        ConfigError: the question is longer than a model's `max_prompt_tokens`.
    """
    models = [("adapter", config.adapter.model, config.rollout.max_prompt_tokens)]
    if config.target is not None:
        models.append(("target", config.target.model, config.scorer.max_prompt_tokens))
    for role, model, limit in models:
        folder = model_folder(model, needs_weights=False)
        renderer = Renderer(folder, limit)
        try:
            ids = renderer.prompt(question)
        except ValueError as error:
            raise ConfigError(f"{role}: {error}") from None
        yield f"{role}: {model}"
        yield from _tokens(renderer, "prompt", ids.tolist())
        stops = ", ".join(
            f"{stop} {_piece(renderer, stop)}" for stop in sorted(renderer.stop_tokens)
        )
        yield f"  ends with: {stops}"
        if prefix:
            yield from _tokens(renderer, "prefix", renderer.encode(prefix).tolist())
        yield ""


def _tokens(renderer: Renderer, what: str, ids: list[int]) -> Iterator[str]:
    """What they say, then one by one, a space made visible by its quotes."""
    yield f"  {what}, {len(ids)} tokens: {_said(renderer, ids)}"
    yield f"  {what}, token by token: {' '.join(f'{token}={_piece(renderer, token)}' for token in ids)}"


def _said(renderer: Renderer, ids: list[int]) -> str:
    return repr(renderer.raw(np.asarray(ids, dtype=np.int32)))


def _piece(renderer: Renderer, token: int) -> str:
    return _said(renderer, [token])
