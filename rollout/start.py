"""Loads what a rollout needs and says what was loaded; imported after the broker's Welcome, since it is slow."""

from prefixrl.common.digests import model_digests
from prefixrl.common.engine import make_engine
from prefixrl.common.messages import Ready
from prefixrl.common.rendering import ByteRenderer, Renderer
from prefixrl.common.weights import describe
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
    rollout = Rollout(
        config, joined.link, engine, renderer, Fetcher(joined.welcome.weights_endpoint)
    )
    rollout.weights_digest = describe(
        0, {name: tensor.cpu() for name, tensor in engine.weights().items()}
    ).digest
    joined.link.send(
        Ready(engine.slots, model_digests(joined.model), 0, rollout.weights_digest, engine.name)
    )
    return rollout
