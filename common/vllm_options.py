"""The `[rollout.vllm]` and `[scorer.vllm]` sections of a run file: what the vLLM engine is started with."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from prefixrl.common.section import Positive, Section

OWN_OPTIONS = frozenset(
    {
        "generation_config",
        "logprobs_mode",
        "model",
        "override_generation_config",
        "scheduling_policy",
        "seed",
        "skip_tokenizer_init",
        "speculative_config",
        "tokenizer",
        "weight_transfer_config",
    }
)
"""Arguments of vLLM that the engine decides itself."""


class VllmConfig(Section):
    """Anything absent is vLLM's own default unless its text says otherwise."""

    tensor_parallel_size: Positive = 1
    """GPUs one model is spread over."""
    quantization: str | None = None
    """For example "fp8"; absent: as the model folder declares."""
    max_model_len: Positive | None = None
    """Most tokens of prompt and answer together; absent: what this run's longest row needs, within the model's own limit."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto: for a rollout what the learner publishes, for a scorer the checkpoint's own."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of the device's memory for weights and KV cache; lower it where processes share a GPU."""
    kv_cache_memory_bytes: Positive | None = None
    """Absent: the rest of `gpu_memory_utilization` on a GPU, 256 MiB on a CPU (vLLM would take most of the memory there)."""
    max_num_seqs: Positive = 256
    """Rows decoded at once; how many tasks a worker runs at once follows from it."""
    attention_backend: str | None = None
    """For example "FLASH_ATTN"."""
    seeded: bool = True
    """Draw every row with its own seed: a repeated task says the same, up to rounding. Slower; scorers may do without."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's AsyncEngineArgs, as they stand."""

    @model_validator(mode="after")
    def _options_are_free(self) -> "VllmConfig":
        named = sorted(set(self.options) & (set(type(self).model_fields) - {"options"}))
        if named:
            raise ValueError(
                f"options sets {', '.join(named)}: these are keys of this section itself"
            )
        taken = sorted(set(self.options) & OWN_OPTIONS)
        if taken:
            raise ValueError(
                f"options sets {', '.join(taken)}: exact logprobs and the installation of weights rest on these; leave them out"
            )
        return self
