"""Choose and load the engine of a worker."""

import torch

from prefixrl.common.config.run import RunConfig
from prefixrl.common.engines.base import AdapterEngine
from prefixrl.common.engines.vllm_setup import is_vllm_installed, low_rank_of


def make_engine(kind: str, model: str, role: str, config: RunConfig) -> AdapterEngine:
    """Load `model` for a worker of `role`; `auto` takes the best engine that is installed here.

    UserError: vLLM was asked for and cannot be used as asked. DataError: the model cannot be loaded.
    """
    if kind == "simulated":
        from prefixrl.common.engines.simulated import SimulatedEngine

        return SimulatedEngine(role, config.simulated, config.rows_per_job(role))
    section = config.rollout if role == "rollout" else config.scorer
    device = section.device
    has_cuda = device != "cpu" and torch.cuda.is_available()
    if kind == "vllm" or (kind == "auto" and has_cuda and is_vllm_installed()):
        from prefixrl.common.engines.vllm import VllmEngine
        from prefixrl.common.engines.vllm_setup import resolve

        return VllmEngine(resolve(model, role, config))
    from prefixrl.common.engines.hf import TransformersEngine

    if device == "auto":
        device = "cuda" if has_cuda else "cpu"
    seats = config.rows_per_job(role)
    if role == "rollout":
        learner, low_rank = config.learner, low_rank_of(config)
        return TransformersEngine(model, device, learner.dtype, section.threads, learner.head_dtype, low_rank, seats)
    return TransformersEngine(model, device, "auto", section.threads, seats=seats)
