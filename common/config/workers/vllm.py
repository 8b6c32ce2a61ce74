"""The vLLM engine: its record, and the arguments of it that a run file names."""

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from prefixrl.common.config import section as bounds
from prefixrl.common.config.section import Positive, Section
from prefixrl.common.config.workers.engine_record import EngineMemory, EngineRecord, EngineSection
from prefixrl.common.wire.messages.fields import MOST_ROWS

if TYPE_CHECKING:
    from prefixrl.common.config.learner import LoraConfig

_OF_MODEL = {
    "generation_config",
    "model",
    "override_generation_config",
    "skip_tokenizer_init",
    "tokenizer",
}
OWN_OPTIONS = _OF_MODEL | {"logprobs_mode", "scheduling_policy", "seed", "weight_transfer_config"}
"""Arguments of vLLM that this software sets itself."""


MOST_MASKED = 1024
"""The most tokens that vLLM's kernel on the GPU leaves out of a draw."""


class VllmConfig(Section):
    """Arguments of the vLLM engine. Absent ones have vLLM's own default unless stated here."""

    tensor_parallel_size: Positive = 1
    """Number of GPUs over which one model is spread."""
    quantization: str | None = None
    """Quantisation of a target, for example "fp8"; rollouts refuse it. Absent: the model folder's own."""
    max_model_len: Positive | None = None
    """Most tokens of prompt and answer together. Absent: the longest row of this run, within the model's own limit."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto: for a rollout the dtype of the published weights, for a scorer that of the checkpoint."""
    gpu_memory_utilization: bounds.Share | None = None
    """Share of the device's memory for weights and KV cache; lower it where processes share a GPU."""
    kv_cache_memory_bytes: Positive | None = None
    """Size of the KV cache. Absent: on a GPU the rest of `gpu_memory_utilization`, on a CPU 256 MiB."""
    max_num_seqs: Annotated[int, Field(gt=0, le=MOST_ROWS)] | None = None
    """Rows decoded at once, the engine's seats. Absent: vLLM's own choice for the device, 1024 on an 80 GB GPU."""
    attention_backend: str | None = None
    """Attention backend, for example "FLASH_ATTN"."""
    seeded: bool = True
    """Draw every row by its own seed: a repeated task gives the same text. Slower on a CPU; may be off for scorers."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's AsyncEngineArgs, passed unchanged."""

    @property
    def gpus(self) -> int:
        """GPUs of one engine: tensor, pipeline and data parallel."""
        sizes = [self.options.get(f"{kind}_parallel_size", 1) for kind in ("pipeline", "data")]
        return math.prod([self.tensor_parallel_size, *sizes])

    def _check_sizes(self) -> None:
        for key in ("pipeline_parallel_size", "data_parallel_size"):
            size = self.options.get(key, 1)
            if type(size) is not int or size < 1:
                raise ValueError(f"options.{key} = {size!r}: must be a whole number of at least 1")

    def changes_of_distribution(self) -> list[str]:
        """List the keys, with their values, that make it another policy than the weights."""
        changes = [f"quantization = {self.quantization!r}"] if self.quantization is not None else []
        cache = self.options.get("kv_cache_dtype", "auto")
        changes += (
            [f"options.kv_cache_dtype = {cache!r}"] if cache not in ("auto", "bfloat16") else []
        )
        return changes

    def _check_options(self) -> None:
        section_keys = sorted(set(self.options) & (set(type(self).model_fields) - {"options"}))
        if section_keys:
            raise ValueError(
                f"options sets {', '.join(section_keys)}: these are keys of this section itself"
            )
        own_options = sorted(set(self.options) & OWN_OPTIONS)
        if own_options:
            raise ValueError(
                f"options sets {', '.join(own_options)}: this software sets them itself; leave them out"
            )


LOW_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM keeps room for."""
DEFAULT_SHARE = 0.92
"""vLLM's own default of `gpu_memory_utilization`."""
ROWS, ROWS_LARGE = 256, 1024
"""vLLM's own defaults of `max_num_seqs`; the second on large devices (not on an A100, whose name is not known here)."""
LARGE_BYTES = 70 * 2**30
"""Memory from which vLLM takes a device for a large one."""


def _lora_objection(lora: "LoraConfig") -> str:
    heads = [
        name
        for name in lora.target_modules
        if name.rpartition(".")[2] in ("lm_head", "embed_tokens")
    ]
    if lora.publish == "merged" or not (heads or lora.rank > LOW_RANKS[-1]):
        return ""
    setting = f"target_modules = {heads}" if heads else f"rank = {lora.rank}"
    return (
        f"learner.lora.{setting}: vLLM takes matrices of rank {LOW_RANKS[-1]} at most, and none on the head or the "
        f'embedding; change it, use rollout.engine = "transformers", or send whole weights with '
        f'learner.lora.publish = "merged"'
    )


def default_rows(device_bytes: int | None) -> int:
    """Return vLLM's own number of rows at once for a device of this memory."""
    return ROWS_LARGE if device_bytes is not None and device_bytes >= LARGE_BYTES else ROWS


def _with_share(section: EngineSection, share: float, cache_bytes: int | None) -> EngineSection:
    changes: dict[str, object] = {"gpu_memory_utilization": share}
    if cache_bytes:
        changes["kv_cache_memory_bytes"] = cache_bytes
    return section.model_copy(update={"vllm": section.vllm.model_copy(update=changes)})


def _batch_words(section: EngineSection, rows: int) -> str:
    source = "as declared" if section.vllm.max_num_seqs else "vLLM's own choice"
    tokens = section.vllm.options.get("max_num_batched_tokens", "vLLM's own number of")
    return (
        f"{rows} rows at once ({source}), {tokens} tokens per step; model runner, attention backend and "
        f"room for keys and values are logged at its start and shown by `prefixrl status`"
    )


def _remedy(section: EngineSection, role: str) -> str:
    return (
        f"raise {role}.vllm.gpu_memory_utilization, or spread it with "
        f"{role}.vllm.tensor_parallel_size = {2 * section.vllm.tensor_parallel_size}"
    )


VLLM = EngineRecord(
    make="prefixrl.common.engines.vllm.load:load_vllm",
    takes_options=False,
    step_model="prefixrl.scorer.process.vllm_model:VllmStepModel",
    package="vllm",
    check="prefixrl.common.engines.vllm.load:platform_words",
    is_automatic=True,
    needs_cuda=True,
    ends_watched_rows=True,
    most_masked_tokens=MOST_MASKED,
    gpus=lambda section: section.vllm.gpus,
    context_tokens=lambda section: section.vllm.max_model_len,
    lora_objection=_lora_objection,
    memory=EngineMemory(
        default_share=DEFAULT_SHARE,
        share=lambda section: section.vllm.gpu_memory_utilization,
        cache_bytes=lambda section: section.vllm.kv_cache_memory_bytes,
        with_share=_with_share,
        seats=lambda section, device_bytes: section.vllm.max_num_seqs or default_rows(device_bytes),
        batch_words=_batch_words,
        remedy=_remedy,
    ),
)
