"""The SmolLM2 example with adapter and target in vLLM on one GPU: its table, within eight minutes."""

import time
from pathlib import Path

import pytest

from benchmarks.real_model import by_subject, figures_of, markdown
from benchmarks.real_model_runs import EXAMPLE, trained_seed
from gpu.on_device import results_folder, write_report

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(580)]

ON_ONE_GPU = (
    "learner.device=cuda",
    "learner.dtype=bfloat16",
    "learner.lora.publish=merged",
    "rollout.device=cuda",
    "rollout.engine=vllm",
    "rollout.vllm.kv_cache_memory_bytes=4294967296",
    "scorer.device=cuda",
    "scorer.engine=vllm",
    "scorer.vllm.dtype=bfloat16",
    "scorer.vllm.kv_cache_memory_bytes=4294967296",
    "launch.rollouts=1",
    "launch.scorers=1",
)
"""Settings beside those of the example; several processes share the GPU, so each cache has a size in bytes."""


def test_the_real_models_table_is_made_on_one_gpu(tmp_path: Path) -> None:
    if not (EXAMPLE / "model").is_dir():
        pytest.fail(f"{EXAMPLE / 'model'} is missing; `python {EXAMPLE / 'build.py'}` makes it")
    started_s = time.monotonic()
    seeds = by_subject([trained_seed("prefixes", 1, tmp_path, ON_ONE_GPU)])
    write_report("real_model", list(figures_of(seeds)), started_s)
    (results_folder() / "gpu_real_model.md").write_text(markdown(seeds), encoding="utf-8")
