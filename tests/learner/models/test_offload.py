"""Optimiser states and weights kept in the host's memory by DeepSpeed: the same steps, and a resume from them."""

from pathlib import Path
from typing import Any

import pytest

from prefixrl.learner.models.model import Models
from prefixrl.learner.training import checkpoint
from prefixrl.learner.training.checkpoint import TrainerState
from prefixrl.learner.training.iteration import train_iteration
from support.models.tiny_model import DEEPSPEED_WARNINGS, random_iteration, run_config, save_model

pytestmark = DEEPSPEED_WARNINGS

CPU = {"device": "cpu"}
NEAR = {"float32": 1e-5, "bfloat16": 1e-3}
"""Gradients kept in bf16 are added up in another order."""
OFFLOADED = {
    "optimizer, stage 2": {"stage": 2, "offload_optimizer": CPU},
    "optimizer and weights, stage 3": {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU},
}


def load(adapter: Path, zero: dict[str, Any], dtype: str) -> tuple[Models, Any]:
    config = run_config(adapter, learner={"deepspeed": {"zero_optimization": zero}, "dtype": dtype})
    return Models.load(config, 0, 1, config.adapter.model), config


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.nightly)])
@pytest.mark.nightly
@pytest.mark.parametrize("zero", OFFLOADED.values(), ids=OFFLOADED)
def test_offloading_changes_no_step_and_resumes_bitwise(
    zero: dict[str, Any], dtype: str, tmp_path: Path
) -> None:
    adapter = save_model(tmp_path / "adapter", is_tied=True)
    plain, config = load(adapter, {"stage": 0}, dtype)
    offloaded, _ = load(adapter, zero, dtype)
    for iteration in range(2):
        data = random_iteration(iteration)
        expected = train_iteration(plain, data, config, 20).steps
        steps = train_iteration(offloaded, data, config, 20).steps
        for mine, theirs in zip(steps, expected, strict=True):
            assert mine == pytest.approx(theirs, abs=1e-5, rel=NEAR[dtype])
    state = TrainerState(2, offloaded.optimizer_steps, 1)
    checkpoint.save(tmp_path / "checkpoints", offloaded, state)
    resumed, _ = load(adapter, zero, dtype)
    checkpoint.load(tmp_path / "checkpoints", resumed)
    data = random_iteration(2)
    went_on = train_iteration(offloaded, data, config, 20).steps
    assert train_iteration(resumed, data, config, 20).steps == went_on
