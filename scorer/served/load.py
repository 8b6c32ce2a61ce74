"""The engine of a served target, by the interface that its endpoint has."""

from prefixrl.common.config.run import RunConfig
from prefixrl.common.worker.permits import Permits
from prefixrl.scorer.served.chat_engine import ChatEngine
from prefixrl.scorer.served.engine import OpenAIEngine, RaiseIfHopeless, ServedEngine


def load_served(
    model: str,
    _role: str,
    config: RunConfig,
    raise_if_hopeless: RaiseIfHopeless = lambda: None,
    permits: Permits | None = None,
) -> ServedEngine:
    """Connect to the endpoint and try it out; raises UserError if it refuses, PeerLost if it is silent.

    Args:
        model: the folder with the target's tokenizer; for a chat endpoint its name there.
        raise_if_hopeless: may end the wait by an error.
        permits: requests that the broker lets it make; None where there is no broker.
    """
    kind = ChatEngine if config.scorer.is_chat else OpenAIEngine
    return kind(model, config, raise_if_hopeless, permits)
