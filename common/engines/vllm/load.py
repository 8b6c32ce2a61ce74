"""Loading the vLLM engine, and what `prefixrl doctor` says of it."""

from prefixrl.common.config.run import RunConfig
from prefixrl.common.engines.interface.base import AdapterEngine
from prefixrl.common.engines.vllm.engine import VllmEngine
from prefixrl.common.engines.vllm.setup import platform_of, resolve


def load_vllm(model: str, role: str, config: RunConfig) -> AdapterEngine:
    """Load `model` for a worker of `role`; raises UserError, DataError."""
    return VllmEngine(resolve(model, role, config))


def platform_words() -> str:
    """Return the platform of the installed vLLM in words; UserError where it cannot be used."""
    return f"imports, for {platform_of('auto')}"
