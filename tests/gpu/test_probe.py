"""Learner against transformers engine on a GPU in bfloat16, with logits as large as a trained model's."""

import time
from pathlib import Path

import numpy as np
import pytest
from transformers import Qwen2Config

from gpu.on_device import probe, probe_figures, save_random, write_report
from support.models.tiny_model import DEEPSPEED_WARNINGS

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(580), *DEEPSPEED_WARNINGS]


def test_the_probe_tells_the_right_version_from_another_in_bfloat16(tmp_path: Path) -> None:
    started_s = time.monotonic()
    shape = Qwen2Config(
        vocab_size=32_000,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=24,
        num_attention_heads=16,
        num_key_value_heads=4,
    )
    adapter = save_random(tmp_path / "adapter", shape, "bfloat16")
    actual = probe("cuda", adapter, "bfloat16", 4.0, 1000)
    write_report("probe", probe_figures(actual, "bfloat16, logits of deviation 4"), started_s)
    assert np.median(actual["right version"]) < np.median(actual["weights 2 % off"])
