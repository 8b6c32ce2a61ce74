"""The attention that a config asks for: shared prompts or rows alone, and what computes it."""

from prefixrl.common.config.learner import LearnerConfig

PACKED = ("varlen", "flash_attention_2")
"""Kernels for packed rows. They take no mask, so that rows cannot share a prompt."""


def shares_prompts(config: LearnerConfig, device_type: str, is_direct: bool) -> bool:
    """Return True if the config asks for shared prompts, as far as the model takes them."""
    if config.shared_prompts is not None:
        return config.shared_prompts
    is_other = config.packed is True or config.attn_implementation in PACKED
    # In direct mode rows are long beside prompts: packed rows gain more there.
    return not is_other and not (
        is_direct and config.attn_implementation == "auto" and _has_kernel(config, device_type)
    )


def attn_implementation(config: LearnerConfig, device_type: str, is_direct: bool) -> str:
    """Return the implementation of attention: the configured one, or the best that serves."""
    if config.attn_implementation != "auto":
        return config.attn_implementation
    is_padded = config.packed is False or shares_prompts(config, device_type, is_direct)
    return "varlen" if _has_kernel(config, device_type) and not is_padded else "sdpa"


def _has_kernel(config: LearnerConfig, device_type: str) -> bool:
    return device_type == "cuda" and config.dtype == "bfloat16"
