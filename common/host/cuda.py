"""CUDA or the CPU: the device of a process that loads a model."""

import logging
from pathlib import Path
from typing import Literal

import torch

from prefixrl.common.errors import ConfigError
from prefixrl.common.host.placement import gpus_here

log = logging.getLogger(__name__)

DRIVER = Path("/proc/driver/nvidia/version")


def has_cuda(device: Literal["auto", "cpu", "cuda"], section: str) -> bool:
    """Return True if a process of this section computes on CUDA; ConfigError where torch cannot open the GPUs there.

    A run that takes the CPU in silence on a host with GPUs costs days, and its figures look as usual.
    """
    if device == "cpu" or torch.cuda.is_available():
        return device != "cpu"
    gpus = ", ".join(gpus_here())
    build = torch.version.cuda and f"CUDA {torch.version.cuda}"
    if device == "cuda" or (gpus and build):
        raise ConfigError(
            f'{section}.device = "{device}", but torch {torch.__version__} ({build or "a build for the CPU"}) opens no '
            f"CUDA device. GPUs that this host shows: {gpus or 'none'}; driver: {driver()}. CUDA 13 needs driver 580 "
            f'or newer. Update the driver, install torch for its CUDA, or set {section}.device = "cpu"'
        )
    if gpus:
        log.warning(
            "this host shows the GPUs %s, but torch is a build for the CPU: %s.device is cpu",
            gpus,
            section,
        )
    return False


def driver() -> str:
    """Return the first line that the driver tells of itself."""
    return (
        DRIVER.read_text(encoding="utf-8").partition("\n")[0]
        if DRIVER.is_file()
        else "none is loaded"
    )
