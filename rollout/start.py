"""The loading of a rollout; imported after the broker's Welcome, since it is slow."""

import logging

from prefixrl.common.engines.make import make_engine
from prefixrl.common.host.start_line import start_line
from prefixrl.common.prompts.asking import log_warnings
from prefixrl.common.prompts.rendering import texts_of
from prefixrl.common.worker.join import WorkerSession
from prefixrl.rollout.loop import Rollout
from prefixrl.rollout.weights import Fetcher, WeightsSource

log = logging.getLogger(__name__)


def load(session: WorkerSession) -> Rollout:
    """Return a rollout at version 0 that has announced itself to the broker."""
    config = session.config
    engine = make_engine(config.rollout.engine, session.model, "rollout", config)
    renderer = texts_of(config, "rollout", session.model)
    log_warnings(config, "rollout", renderer)
    fetcher = Fetcher(WeightsSource.from_welcome(session.welcome, session.link.address))
    rollout = Rollout(config, session.link, engine, renderer, fetcher, session.model)
    log.info("loaded: %s", start_line(config.rollout.device, f"{engine.name} engine", engine.about))
    rollout.say_ready()
    return rollout
