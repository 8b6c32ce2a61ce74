"""GPUs of one machine, and which process runs on which; all but `gpus_here` is pure.

With too few GPUs, rollouts of prefix mode run on those of the learner, which they burden little.
"""

import os
import re
import subprocess
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import ConfigError

Placement = dict[str, tuple[int, ...]]
LEARNER = "learner"
VARIABLE = "PREFIXRL_PLACEMENT"
"""Environment variable in which the launcher of a run tells the learner the placement."""

GPUS = Path("/proc/driver/nvidia/gpus")


def gpus_here() -> tuple[str, ...]:
    """Return this machine's GPUs as CUDA names them, as far as this process may see them."""
    visible_devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible_devices is not None:  # -1, and SLURM's NoDevFiles, are no GPU
        names = map(str.strip, visible_devices.split(","))
        return tuple(name for name in names if name not in ("", "-1", "NoDevFiles"))
    listing = ""
    with suppress(OSError, subprocess.TimeoutExpired):
        listing = subprocess.run(
            ["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=30
        ).stdout
    # The folder is absent in WSL, and in some containers it has GPUs that they may not open.
    count = len(re.findall(r"^GPU \d+:", listing, re.MULTILINE)) or len(list(GPUS.glob("*")))
    return tuple(map(str, range(count)))


@dataclass(frozen=True)
class Process:
    """A process of a run, and how many GPUs it needs."""

    name: str
    gpus: int
    chosen_gpus: tuple[int, ...] | None = None
    """Its GPUs by `launch.devices`."""
    is_guest: bool = False
    """True for a rollout that may run beside the learner."""


def processes_of(config: RunConfig, with_learner: bool = True) -> list[Process]:
    """Return the processes of a run on one machine, the learner's ranks as one."""
    launch = config.launch
    devices = launch.devices
    learner_gpus = launch.learner_ranks * config.gpus_of("learner")
    processes = []
    if with_learner:
        processes.append(Process(LEARNER, learner_gpus, devices.learner or None))
    for role, count, chosen in (
        ("rollout", launch.rollouts, devices.rollout),
        ("scorer", launch.scorers, devices.scorer),
    ):
        gpus = config.gpus_of(role)
        is_guest = with_learner and role == "rollout" and config.mode == "prefix" and gpus == 1
        processes += [
            Process(f"{role}-{index}", gpus, chosen[index] if chosen else None, is_guest)
            for index in range(count)
        ]
    return processes


def place(processes: Sequence[Process], gpu_count: int) -> Placement:
    """Give each process its GPUs, out of `gpu_count`; raises ConfigError."""
    if gpu_count == 0:
        return {}
    for process in processes:
        if process.gpus > gpu_count:
            raise ConfigError(
                f"{process.name} needs {process.gpus} GPUs and {gpu_count} are there (CUDA_VISIBLE_DEVICES); lower "
                f"launch.learner_ranks or the engine's tensor, pipeline or data parallel size"
            )
        if missing := [gpu for gpu in process.chosen_gpus or () if gpu >= gpu_count]:
            raise ConfigError(
                f"launch.devices gives {process.name} GPU {missing[0]}; there are {gpu_count}, counted from 0 "
                f"(CUDA_VISIBLE_DEVICES)"
            )
    is_enough = sum(process.gpus for process in processes) <= gpu_count
    # GPUs that the run file names are taken first, so that the others go around them.
    used = Counter(dict.fromkeys(range(gpu_count), 0))
    for process in processes:
        used.update(process.chosen_gpus or ())
    placed: Placement = {}
    guests = 0
    for process in processes:
        host = placed.get(LEARNER, ())
        chosen = process.chosen_gpus
        if chosen is None:
            # A guest shares a GPU of the learner only where there are too few for all.
            if process.is_guest and host and not is_enough:
                chosen = (host[guests % len(host)],)
                guests += 1
            else:
                least_used = sorted(used, key=lambda gpu: (used[gpu], gpu))
                chosen = tuple(sorted(least_used[: process.gpus]))
            used.update(chosen)
        placed[process.name] = chosen
    return placed


def neighbours(placed: Placement) -> dict[int, list[str]]:
    """Return the processes of each GPU that has any."""
    gpus = sorted(set().union(*placed.values()))
    return {gpu: [name for name, chosen in placed.items() if gpu in chosen] for gpu in gpus}


def described(placed: Placement) -> str:
    """Return one sentence for a person."""
    return "; ".join(f"GPU {gpu}: {', '.join(names)}" for gpu, names in neighbours(placed).items())


def visible(placed: Placement, gpus: Sequence[str], name: str) -> dict[str, str]:
    """Return the environment that shows a process its GPUs; the learner's has the placement, too."""
    if not gpus:
        return {}
    environment = {"CUDA_VISIBLE_DEVICES": ",".join(gpus[each] for each in placed.get(name, ()))}
    return environment | ({VARIABLE: written(placed)} if name == LEARNER else {})


def written(placed: Placement) -> str:
    """Return a placement as one argument of a command."""
    return ";".join(f"{name}={','.join(map(str, gpus))}" for name, gpus in placed.items())


def read(text: str) -> Placement:
    """Read what `written` returned; raise ConfigError."""
    try:
        pairs = [each.split("=") for each in text.split(";") if each]
        return {name: tuple(int(gpu) for gpu in gpus.split(",") if gpu) for name, gpus in pairs}
    except ValueError:
        raise ConfigError(
            f'placement {text!r}: must be "NAME=GPU,GPU;NAME=GPU ..." with GPUs as numbers'
        ) from None
