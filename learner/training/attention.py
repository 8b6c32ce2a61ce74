"""The attention that a config asks for: shared prompts or rows alone, and what computes it."""

import importlib.util

from prefixrl.common.config.learner import LearnerConfig


def shares_prompts(config: LearnerConfig, device_type: str, is_direct: bool) -> bool:
    """Return True if the config asks for shared prompts, as far as the model takes them."""
    if config.shared_prompts is not None:
        return config.shared_prompts
    is_other = config.packed is True or config.attn_implementation == "flash_attention_2"
    # In direct mode rows are long beside prompts: packed rows gain more there.
    return not is_other and not (is_direct and config.attn_implementation == "auto" and _has_flash(config, device_type))


def attn_implementation(config: LearnerConfig, device_type: str, is_direct: bool) -> str:
    """Return the implementation of attention: the configured one, or the best that serves.

    flash-attn takes no mask, so it serves where prompts are not shared.
    """
    if config.attn_implementation != "auto":
        return config.attn_implementation
    is_served = _has_flash(config, device_type) and not shares_prompts(config, device_type, is_direct)
    return "flash_attention_2" if is_served else "sdpa"


def _has_flash(config: LearnerConfig, device_type: str) -> bool:
    is_installed = importlib.util.find_spec("flash_attn") is not None
    return is_installed and device_type == "cuda" and config.dtype == "bfloat16"
