"""Loading an embedded engine: rows of a task in one forward with `bitwise`, else batched continuously."""

from prefixrl.common.config.run import RunConfig
from prefixrl.common.engines.embedded.continuous import TransformersEngine, objection
from prefixrl.common.engines.embedded.fixed_rows import FIXED, FixedRowsEngine
from prefixrl.common.engines.embedded.held_model import EmbeddedEngine
from prefixrl.common.engines.interface.adapter import low_rank_of
from prefixrl.common.engines.interface.base import AdapterEngine
from prefixrl.common.host.cuda import has_cuda
from prefixrl.common.models.loading import Dtype


def load_embedded(model: str, role: str, config: RunConfig) -> AdapterEngine:
    """Load `model` for a worker of `role`; raises UserError, DataError."""
    section = config.engine_section(role)
    device = "cuda" if has_cuda(section.device, role) else "cpu"
    dtype: Dtype = "auto"
    head_dtype = "model"
    low_rank = None
    if role == "rollout":
        dtype = config.learner.dtype
        head_dtype = config.learner.head_dtype
        low_rank = low_rank_of(config)
    reason = "bitwise" if config.bitwise else objection(model)
    kind: type[EmbeddedEngine] = FixedRowsEngine if reason else TransformersEngine
    seats = config.rows_per_job(role) if reason else config.embedded_seats(role)
    engine = kind(model, device, dtype, section.threads, head_dtype, low_rank, seats)
    if reason:
        engine.about = FIXED.format(reason)
    engine.about += f"; {engine.attention} attention"
    return engine
