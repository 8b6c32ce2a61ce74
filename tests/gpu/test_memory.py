"""The recipe's shape on a GPU: peak beside the forecast, speed, and the shipped settings under the limit of 80 GB."""

import time
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config

from gpu.on_device import memory_and_speed, save_random, with_settings, write_report
from prefixrl.learner.check.footprint import GIB
from support.models.tiny_model import DEEPSPEED_WARNINGS, run_config

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(580), *DEEPSPEED_WARNINGS]

LIMIT_GIB = 79
PROMPT, SAMPLED = 200, 32


def test_the_recipes_shape_takes_what_the_forecast_says_and_fits_80_gb(tmp_path: Path) -> None:
    started_s = time.monotonic()
    shape = Qwen2Config(
        vocab_size=151_936,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    adapter = save_random(tmp_path / "adapter", shape, "bfloat16")
    zero = {"zero_optimization": {"stage": 2}}
    config = run_config(
        adapter,
        rollout={"temperature": 0.7, "prefix_tokens": SAMPLED},
        algorithm={"groups_per_iteration": 32, "samples_per_prompt": 8, "minibatches": 2},
        learner={
            "device": "cuda",
            "dtype": "bfloat16",
            "micro_batch_tokens": 4096,
            "deepspeed": zero,
        },
    )
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, LIMIT_GIB * GIB / total))
    figures = memory_and_speed(config, PROMPT, "4,096 tokens")
    write_report("memory", figures, started_s)  # now, in case the next one fails
    checkpointed = with_settings(config, gradient_checkpointing=True, micro_batch_tokens=16_384)
    figures += memory_and_speed(checkpointed, PROMPT, "16,384 tokens, checkpointed")
    write_report("memory", figures, started_s)
    peaks = [each for each in figures if each.name.endswith("peak memory")]
    assert all(each.ratio is not None and abs(each.ratio - 1) < 0.1 for each in peaks), peaks
