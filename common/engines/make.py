"""Choose and load the engine of a worker."""

from prefixrl.common.config.run import RunConfig
from prefixrl.common.engines.interface.base import AdapterEngine
from prefixrl.common.host.process import without_gc


def make_engine(kind: str, model: str, role: str, config: RunConfig) -> AdapterEngine:
    """Load `model` for a worker of `role`; raises UserError, DataError."""
    if kind == "simulated":
        from prefixrl.common.engines.simulated import SimulatedEngine

        return SimulatedEngine(role, config.simulated, config.rows_per_job(role))
    # Late: a simulated engine needs none of it.
    with without_gc():
        from prefixrl.common.engines.vllm.setup import is_vllm_installed, low_rank_of
        from prefixrl.common.host.cuda import has_cuda

    section = config.rollout if role == "rollout" else config.scorer
    device = section.device
    is_cuda = has_cuda(device, role)
    if kind == "vllm" or (
        kind == "auto" and is_cuda and not config.bitwise and is_vllm_installed()
    ):
        from prefixrl.common.engines.vllm.engine import VllmEngine
        from prefixrl.common.engines.vllm.setup import resolve

        return VllmEngine(resolve(model, role, config))
    with without_gc():
        from prefixrl.common.engines.embedded.continuous import TransformersEngine, objection
        from prefixrl.common.engines.embedded.fixed_rows import FIXED, FixedRowsEngine
        from prefixrl.common.models.loading import Dtype

    if device == "auto":
        device = "cuda" if is_cuda else "cpu"
    dtype: Dtype = "auto"
    head_dtype, low_rank = "model", None
    if role == "rollout":
        dtype, head_dtype, low_rank = (
            config.learner.dtype,
            config.learner.head_dtype,
            low_rank_of(config),
        )
    if reason := "bitwise" if config.bitwise else objection(model):
        rows, threads = config.rows_per_job(role), section.threads
        held = FixedRowsEngine(model, device, dtype, threads, head_dtype, low_rank, rows)
        held.about = f"{FIXED.format(reason)}; {held.attention} attention"
        return held
    seats = config.embedded_seats(role)
    engine = TransformersEngine(model, device, dtype, section.threads, head_dtype, low_rank, seats)
    engine.about += f"; {engine.attention} attention"
    return engine
