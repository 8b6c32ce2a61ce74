"""vLLM on a GPU, where it schedules ahead and replays graphs: the learner's policy, also across an installation."""

import time
from pathlib import Path

import pytest
from transformers import Qwen2Config

from gpu.on_device import save_random, whole_run, write_report
from gpu.vllm_on_device import beside_the_learner
from support.models.tiny_model import DEEPSPEED_WARNINGS

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(580), *DEEPSPEED_WARNINGS]


def test_vllm_samples_the_learners_policy_before_and_after_an_installation(tmp_path: Path) -> None:
    started_s = time.monotonic()
    shape = Qwen2Config(
        vocab_size=32_000,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    adapter = save_random(tmp_path / "adapter", shape, "bfloat16")
    write_report("vllm", beside_the_learner("cuda", adapter, "bfloat16", 64, 384), started_s)


def test_the_example_trains_with_both_models_in_vllm_on_one_gpu(tmp_path: Path) -> None:
    started_s = time.monotonic()
    write_report("vllm_launch", whole_run("cuda", tmp_path / "run", 10, "vllm"), started_s)
