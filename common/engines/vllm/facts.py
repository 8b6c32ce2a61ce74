"""The settings that vLLM derives from its arguments and the device it finds, and its count of rows."""

import contextlib
import time
from typing import Any

from prefixrl.common.errors import UserError


class RowCounts:
    """Rows that vLLM decodes, as its scheduler counts them after every step."""

    def __init__(self) -> None:
        self._running: dict[int, int] = {}
        """By engine core: there are several with data parallelism."""
        self._row_s = 0.0
        self._counted_s = time.monotonic()

    @property
    def running(self) -> int:
        """Number of rows being decoded."""
        return sum(self._running.values())

    @property
    def busy_row_s(self) -> float:
        """Row-seconds decoding so far."""
        return self._row_s + self.running * (time.monotonic() - self._counted_s)

    def note_running(self, engine_index: int, running: int) -> None:
        """Note how many rows an engine core decodes from now on."""
        self._row_s = self.busy_row_s
        self._counted_s = time.monotonic()
        self._running[engine_index] = running

    def note_idle(self) -> None:
        """Note that no row is left: vLLM counts in a step, and dropped rows are followed by none."""
        for engine_index, running in list(self._running.items()):
            if running:
                self.note_running(engine_index, 0)

    def of_engine(self, config: Any, engine_index: int = 0) -> Any:
        """Return vLLM's logger of one engine core, which notes its counts here."""
        from vllm.v1.metrics.loggers import StatLoggerBase

        counts = self

        class Logger(StatLoggerBase):  # type: ignore[misc]
            def __init__(self) -> None:
                pass

            def record(self, scheduler_stats: Any, *_: Any, **__: Any) -> None:
                if scheduler_stats is not None:
                    counts.note_running(engine_index, scheduler_stats.num_running_reqs)

            def log_engine_initialized(self) -> None:
                pass

        return Logger()


def engine_config(arguments: dict[str, Any]) -> Any:
    """Return vLLM's whole config; UserError where it refuses an argument."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    try:
        # The context of large batches: without one, vLLM takes the smallest batch of any device.
        return AsyncEngineArgs(**arguments).create_engine_config(UsageContext.LLM_CLASS)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise UserError(f"vLLM refuses its settings for {arguments['model']}: {error}") from error


def seats_of(config: Any) -> int:
    """Return the rows that vLLM decodes at once."""
    return int(config.scheduler_config.max_num_seqs * config.parallel_config.data_parallel_size)


def about(config: Any) -> str:
    """Return vLLM's own choices in one line."""
    scheduler = config.scheduler_config
    cache = config.cache_config
    tokens = (cache.num_gpu_blocks or 0) * cache.block_size
    quantization = config.model_config.quantization
    draft = config.speculative_config
    facts = [
        f"model runner {'V2' if config.use_v2_model_runner else 'V1'}",
        f"attention {_attention(config)}",
        f"max_num_seqs {scheduler.max_num_seqs}",
        f"max_num_batched_tokens {scheduler.max_num_batched_tokens}",
        f"room for keys and values of {tokens} tokens"
        if tokens
        else "room for keys and values known at the start",
        f"cudagraph {getattr(config.compilation_config.cudagraph_mode, 'name', 'NONE')}",
    ]
    facts += [f"quantization {quantization}"] if quantization else []
    facts += [f"kv_cache_dtype {cache.cache_dtype}"] if cache.cache_dtype != "auto" else []
    facts += (
        [f"speculative {draft.method} of {draft.num_speculative_tokens} tokens"] if draft else []
    )
    return ", ".join(facts)


def _attention(config: Any) -> str:
    if config.attention_config.backend is not None:
        return str(config.attention_config.backend.name)
    with contextlib.suppress(
        Exception
    ):  # its selection needs a device, and changes from release to release
        from vllm.config import set_current_vllm_config
        from vllm.v1.attention.selector import get_attn_backend

        model = config.model_config
        with set_current_vllm_config(config):
            backend = get_attn_backend(
                model.get_head_size(), model.dtype, config.cache_config.cache_dtype
            )
        return str(backend.get_name())
    return "of vLLM's choice"
