"""Loads what a scorer needs; imported after the broker's Welcome, since it is slow."""

from prefixrl.common.engine import make_engine
from prefixrl.common.rendering import ByteRenderer, Renderer
from prefixrl.common.worker import Joined
from prefixrl.scorer.loop import Scorer
from prefixrl.scorer.verifier_pool import VerifierPool


def load(joined: Joined) -> Scorer:
    """A scorer known to the broker."""
    config = joined.config
    engine = make_engine(config.scorer.engine, joined.model, "scorer", config)
    simulated = engine.name == "simulated"
    renderer = (
        ByteRenderer() if simulated else Renderer(joined.model, config.scorer.max_prompt_tokens)
    )
    verifier = VerifierPool(config.scorer.verifier_children, config.scorer.verify_timeout_s)
    scorer = Scorer(config, joined.link, engine, renderer, verifier, joined.model)
    scorer.say_ready()
    return scorer
