"""Loads what a rollout needs; imported after the broker's Welcome, since it is slow."""

from prefixrl.common.engine import make_engine
from prefixrl.common.rendering import ByteRenderer, Renderer
from prefixrl.common.worker import Joined
from prefixrl.rollout.loop import Rollout
from prefixrl.rollout.weights import Fetcher


def load(joined: Joined) -> Rollout:
    """A rollout at version 0, known to the broker."""
    config = joined.config
    engine = make_engine(config.rollout.engine, joined.model, "rollout", config)
    simulated = engine.name == "simulated"
    renderer = (
        ByteRenderer() if simulated else Renderer(joined.model, config.rollout.max_prompt_tokens)
    )
    fetcher = Fetcher(joined.welcome.weights_endpoint)
    rollout = Rollout(config, joined.link, engine, renderer, fetcher, joined.model)
    rollout.say_ready()
    return rollout
