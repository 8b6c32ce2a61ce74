"""DeepSpeed's process group, with or without a launcher, and the learner's own collectives."""

import logging
import os
import warnings
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from prefixrl.common.errors import ConfigError
from prefixrl.common.host.cuda import has_cuda
from prefixrl.common.wire.address import is_loopback
from prefixrl.common.wire.interfaces import towards

log = logging.getLogger(__name__)


def start(
    device: Literal["auto", "cpu", "cuda"], rank: int, world_size: int, timeout_s: float = 1800.0
) -> torch.device:
    """Join the process group and return this rank's device; ConfigError for a wrong environment.

    A single rank opens no port: its store is in its own memory. Several need MASTER_ADDR and MASTER_PORT of a launcher.
    """
    kind = "cuda" if has_cuda(device, "learner") else "cpu"
    local_rank = int(os.environ.setdefault("LOCAL_RANK", str(rank if world_size > 1 else 0)))
    if kind == "cuda":
        local_rank = device_index(local_rank, torch.cuda.device_count())
        os.environ["LOCAL_RANK"] = str(local_rank)  # DeepSpeed takes its device from it
        torch.cuda.set_device(local_rank)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    if not dist.is_initialized():
        _meet("nccl" if kind == "cuda" else "gloo", rank, world_size, timedelta(seconds=timeout_s))
    _start_deepspeed(kind)
    return torch.device(kind, local_rank) if kind == "cuda" else torch.device("cpu")


def device_index(local_rank: int, devices: int) -> int:
    """Return the device of a rank: the only visible device, else the device of its number on the host; ConfigError."""
    if devices == 1:  # `srun --gpus-per-task=1`: each task sees its own GPU, as number 0
        return 0
    if local_rank >= devices:
        raise ConfigError(
            f"LOCAL_RANK = {local_rank}, but this process sees {devices} CUDA devices: allowed are 0 to {devices - 1}; "
            f"start at most {devices} learner ranks on this host"
        )
    return local_rank


def stop() -> None:
    """Leave the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """All-reduce in place by summing; returns the tensor."""
    if dist.get_world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def gather_over_ranks(values: Tensor) -> Tensor:
    """Return the 1-d values of all ranks in their order. A collective; the numbers may differ."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sizes = torch.zeros(ranks, dtype=torch.int64, device=values.device)
    sizes[rank] = len(values)
    ends = sum_over_ranks(sizes).cumsum(dim=0).tolist()
    whole = values.new_zeros(ends[-1])
    whole[ends[rank] - len(values) : ends[rank]] = values
    return sum_over_ranks(whole)


def _meet(backend: str, rank: int, world_size: int, timeout: timedelta) -> None:
    address = os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    # Gloo would listen on the address of the host's name, which may be public, a loopback one, or not resolve at all.
    interface = "lo" if world_size == 1 or is_loopback(address) else towards(address)
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if world_size == 1:
        os.environ.setdefault("MASTER_PORT", "0")
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        return
    if "MASTER_PORT" not in os.environ:
        raise ConfigError(
            f"{world_size} learner ranks need MASTER_ADDR and MASTER_PORT in the environment; start them with "
            "`torchrun` or `deepspeed`, which set both"
        )
    if not is_loopback(address):
        way = f"gloo on {os.environ.get('GLOO_SOCKET_IFNAME')}" if backend == "gloo" else backend
        log.info(
            "rank %d of %d meets the others at %s; %s encrypts nothing",
            rank,
            world_size,
            address,
            way,
        )
    dist.init_process_group(
        backend, init_method="env://", rank=rank, world_size=world_size, timeout=timeout
    )


def _start_deepspeed(kind: str) -> None:
    os.environ.setdefault("DS_ACCELERATOR", kind)
    # torch renamed collectives that DeepSpeed still calls by the old name, several times a step.
    warnings.filterwarnings("ignore", r"`torch\.distributed\..*` is deprecated", FutureWarning)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    import deepspeed

    if kind == "cpu":
        # DeepSpeed would compile a shared-memory all-reduce for half a minute, with ninja, at its first start on a CPU.
        # Only its inference kernels use it. An op that is not listed as compatible is neither probed for nor built.
        deepspeed.ops.__compatible_ops__ = {}
    deepspeed.init_distributed(
        dist_backend="nccl" if kind == "cuda" else "gloo", auto_mpi_discovery=False, verbose=False
    )
