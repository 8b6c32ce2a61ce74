"""The `[rollout.vllm]` and `[scorer.vllm]` sections: arguments of the vLLM engine."""

import math
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from prefixrl.common.config.section import Positive, Section
from prefixrl.common.wire.messages import MOST_ROWS

_OF_MODEL = {"generation_config", "model", "override_generation_config", "skip_tokenizer_init", "tokenizer"}
OWN_OPTIONS = _OF_MODEL | {"logprobs_mode", "scheduling_policy", "seed", "weight_transfer_config"}
"""Arguments of vLLM that this software sets itself."""


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
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
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

    @model_validator(mode="after")
    def _sizes_are_counts(self) -> "VllmConfig":
        for key in ("pipeline_parallel_size", "data_parallel_size"):
            size = self.options.get(key, 1)
            if type(size) is not int or size < 1:
                raise ValueError(f"options.{key} = {size!r}: must be a whole number of at least 1")
        return self

    def changes_of_distribution(self) -> list[str]:
        """List the keys, with their values, that make it another policy than the weights."""
        found = [f"quantization = {self.quantization!r}"] if self.quantization is not None else []
        cache = self.options.get("kv_cache_dtype", "auto")
        found += [f"options.kv_cache_dtype = {cache!r}"] if cache not in ("auto", "bfloat16") else []
        return found

    @model_validator(mode="after")
    def _options_are_free(self) -> "VllmConfig":
        named = sorted(set(self.options) & (set(type(self).model_fields) - {"options"}))
        if named:
            raise ValueError(f"options sets {', '.join(named)}: these are keys of this section itself")
        taken = sorted(set(self.options) & OWN_OPTIONS)
        if taken:
            raise ValueError(f"options sets {', '.join(taken)}: this software sets them itself; leave them out")
        return self
