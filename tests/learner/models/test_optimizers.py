"""AdamW in its implementations: the same steps, and states that a checkpoint carries from one start to the next."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from prefixrl.common.config.learner import LearnerConfig
from prefixrl.learner.models import distributed, optimizers
from prefixrl.learner.models.model import Models
from prefixrl.learner.models.optimizers import make_adam, make_cpu_adam, restored, saved_state
from prefixrl.learner.training import checkpoint
from prefixrl.learner.training.checkpoint import TrainerState
from prefixrl.learner.training.iteration import train_iteration
from support.models.tiny_model import DEEPSPEED_WARNINGS, random_iteration, run_config, save_model

OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.01}


def weights() -> nn.Parameter:
    return nn.Parameter(torch.randn(1003, generator=torch.Generator().manual_seed(1)))


def distance(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> float:
    """The largest difference after five steps with the same gradients."""
    (own,), (theirs,) = one.param_groups[0]["params"], other.param_groups[0]["params"]
    for step in range(5):
        gradient = torch.randn(1003, generator=torch.Generator().manual_seed(step))
        own.grad, theirs.grad = gradient.clone(), gradient.clone()
        one.step()
        other.step()
    return float((own - theirs).detach().abs().max())


def test_the_fused_form_takes_the_same_steps() -> None:
    fused = torch.optim.AdamW([weights()], **OPTIONS, fused=True)
    assert distance(fused, torch.optim.AdamW([weights()], **OPTIONS)) < 1e-6


def test_a_cpu_gets_torchs_own_and_frozen_parameters_none() -> None:
    frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
    for zero in ({"stage": 0}, {"stage": 2, "offload_optimizer": {"device": "cpu"}}):
        config = LearnerConfig.model_validate({"deepspeed": {"zero_optimization": zero}})
        made = make_adam([weights(), frozen], config, 1e-3, torch.device("cpu"))
        assert type(made) is torch.optim.AdamW and made.defaults["fused"]
        assert [len(group["params"]) for group in made.param_groups] == [1]


def test_steps_are_counted_where_each_form_wants_them() -> None:
    meta = torch.device("meta")
    fused = torch.optim.AdamW([weights()], **OPTIONS, fused=True)
    assert restored("step", torch.tensor(3.0), fused, meta).device.type == "meta"  # type: ignore[union-attr]
    assert restored("step", torch.tensor(3.0), torch.optim.SGD([weights()]), meta) == 3
    assert saved_state({"step": 3})["step"].item() == 3.0


def test_a_compiler_that_fails_is_named_and_torchs_adam_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from deepspeed.ops import adam

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no ninja")

    monkeypatch.setattr(adam, "DeepSpeedCPUAdam", fail)
    assert make_cpu_adam([weights()], OPTIONS) is None
    assert "cannot be compiled here (RuntimeError: no ninja)" in caplog.text


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's Adam, compiled for about a minute where it never was; taken on this CPU too."""
    distributed.start("cpu", 0, 1)
    assert make_cpu_adam([weights()], OPTIONS) is not None
    monkeypatch.setattr(
        optimizers,
        "make_adam",
        lambda parameters, config, lr, device: make_cpu_adam(
            [each for each in parameters if each.requires_grad],
            {"lr": lr, "betas": config.adam_betas, "weight_decay": config.weight_decay},
        ),
    )
    monkeypatch.setattr("prefixrl.learner.models.trained_model.make_adam", optimizers.make_adam)


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("warned", [pytest.param(0, marks=DEEPSPEED_WARNINGS)])
def test_deepspeeds_adam_takes_the_same_steps_and_resumes(
    tmp_path: Path, compiled: None, warned: int
) -> None:
    one = make_cpu_adam([weights()], OPTIONS)
    assert one is not None and distance(one, torch.optim.AdamW([weights()], **OPTIONS)) < 1e-6
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    adapter = save_model(tmp_path / "adapter")
    config = run_config(adapter, learner={"deepspeed": {"zero_optimization": zero}})
    models = Models.load(config, 0, 1, config.adapter.model)
    train_iteration(models, random_iteration(0), config, 20)
    checkpoint.save(tmp_path / "saved", models, TrainerState(1, models.optimizer_steps, 1))
    resumed = Models.load(config, 0, 1, config.adapter.model)
    checkpoint.load(tmp_path / "saved", resumed)
    went_on, again = (
        train_iteration(each, random_iteration(1), config, 20).steps for each in (models, resumed)
    )
    assert went_on == again
