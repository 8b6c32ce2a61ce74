"""The trial of a served target's endpoint, before any model is loaded."""

import threading
import time

from prefixrl.common.config.run import RunConfig
from prefixrl.common.config.workers.served import OPENAI
from prefixrl.common.engines.make import loading_function
from prefixrl.common.host.hub import model_folder

TRIAL_S = 10.0


class _Unanswered(Exception):
    """The endpoint is silent, or a stop is asked for."""


def try_endpoint(config: RunConfig, stop: threading.Event) -> None:
    """Send a trial to the endpoint as a scorer will; UserError if it refuses this run.

    A silent endpoint is left to the scorers, which wait for it. So is one whose scorers this host does not start.
    """
    if config.target is None or config.scorer.record is not OPENAI or not config.launch.scorers:
        return
    waits: list[float] = []

    def raise_if_over() -> None:
        waits.append(time.monotonic())
        if stop.is_set() or waits[-1] > waits[0] + TRIAL_S:
            raise _Unanswered

    name = config.target.model
    if config.scorer.has_tokenizer:
        name = model_folder(name, needs_weights=False)
    load = loading_function(OPENAI.make, f'scorer.engine = "{config.scorer.engine}"')
    try:
        load(name, "scorer", config, raise_if_over).close()
    except _Unanswered:
        return
