"""AdamW by torch, or by DeepSpeed for moments in the host's memory: the same steps but for rounding."""

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from prefixrl.common.config.learner import LearnerConfig

log = logging.getLogger(__name__)


def make_adam(
    parameters: Iterable[nn.Parameter], config: LearnerConfig, lr: float, device: torch.device
) -> torch.optim.Optimizer:
    """Return the AdamW that is fastest where its moments lie."""
    trained = [each for each in parameters if each.requires_grad]
    options: dict[str, Any] = {
        "lr": lr,
        "betas": config.adam_betas,
        "weight_decay": config.weight_decay,
    }
    offload = config.deepspeed.get("zero_optimization", {}).get("offload_optimizer") or {}
    is_offloaded = offload.get("device", "none") != "none"
    # On a CPU nothing is offloaded, and nothing compiled for it.
    if is_offloaded and device.type == "cuda" and (cpu := make_cpu_adam(trained, options)):
        return cpu
    # Fused, a step reads each tensor once and has no temporaries.
    return torch.optim.AdamW(trained, **options, fused=True)


def make_cpu_adam(
    trained: list[nn.Parameter], options: dict[str, Any]
) -> torch.optim.Optimizer | None:
    """Return DeepSpeed's AdamW for the CPU, compiled at its first use; None where that fails."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    try:
        optimizer: torch.optim.Optimizer = DeepSpeedCPUAdam(trained, **options, adamw_mode=True)
    # A missing or failing compiler raises many types of errors.
    except Exception as error:  # noqa: BLE001
        log.warning(
            "DeepSpeed's Adam for the CPU cannot be compiled here (%s: %.200s): torch's is several times slower",
            type(error).__name__,
            error,
        )
        return None
    return optimizer


def saved_state(state: dict[str, Any]) -> dict[str, Tensor]:
    """Return one parameter's state as tensors; DeepSpeed's Adam counts its steps in a number."""
    return {
        name: each if isinstance(each, Tensor) else torch.tensor(float(each))
        for name, each in state.items()
    }


def restored(
    name: str, saved: Tensor, optimizer: torch.optim.Optimizer, device: torch.device
) -> Tensor | int:
    """Return one part of a parameter's state as this optimiser wants it."""
    is_number = name == "step" and not isinstance(optimizer, torch.optim.AdamW)
    return int(saved.item()) if is_number else saved.to(device)
