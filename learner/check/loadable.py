"""Models of a run that are on this host: can they be loaded? By the headers of their files alone."""

import os
from collections.abc import Iterator
from typing import Literal

from prefixrl.common.config.run import RunConfig
from prefixrl.common.host.hub import cached_file
from prefixrl.common.models.headers import has_weights
from prefixrl.common.run.warm_start import check_warm_start


def check_weights(config: RunConfig) -> None:
    """Raise DataError for weights that are missing or cannot be loaded, ConfigError for another warm start's."""
    check_warm_start(config)
    # Late: seconds of imports.
    from prefixrl.common.models.loading import check_model

    for model, key, kind, is_trained in dict.fromkeys(_loaded(config)):
        path = cached_file(model, "config.json")
        folder = model if os.path.isdir(model) or path is None else str(path.parent)
        if os.path.isdir(model) or has_weights(folder):  # those of the hub may yet be fetched
            check_model(folder, f"{key} = {model!r}", kind, is_trained)


def _loaded(config: RunConfig) -> Iterator[tuple[str, str, Literal["causal", "backbone"], bool]]:
    """Yield model, key, what is loaded of it, and True if its weights are trained or compared with trained ones."""
    yield config.adapter.start, "adapter.model", "causal", True
    if config.target is not None and config.scorer.record.holds_weights:
        yield config.target.model, "target.model", "causal", False
    if (prm := config.scorer.prm) is not None:
        yield (
            prm.model,
            "scorer.prm.model",
            "causal" if prm.format == "step_tag" else "backbone",
            False,
        )
    if (settings := config.implicit_reward) is not None:
        for key in ("model", "reference_model"):
            if model := getattr(settings, key):
                yield model, f"implicit_reward.{key}", "causal", True
