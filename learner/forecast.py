"""What follows from a config before anything is started: batch arithmetic, how much is under way at once, memory."""

import json
import math
import re
import struct
from pathlib import Path

from prefixrl.common.config import RunConfig
from prefixrl.learner import problems
from prefixrl.learner.shard import steps_in_all

GIB = 2**30
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


def forecast(config: RunConfig) -> str:
    """Lines for a person; raises DataError when the training data cannot be read."""
    count = len(problems.load(config.data.train, config.data))
    algorithm = config.algorithm
    rows = algorithm.groups_per_iteration * algorithm.samples_per_prompt
    iterations = config.iterations_in_all(count)
    cap = algorithm.groups_per_iteration * (algorithm.max_staleness + 1)
    lines = [
        f"{count} training problems; {config.groups_in_all(count)} groups in {iterations} iterations",
        f"an iteration: {algorithm.groups_per_iteration} groups x {algorithm.samples_per_prompt} rows = {rows} rows, "
        f"{algorithm.ppo_epochs} x {min(algorithm.minibatches, rows)} optimiser steps; {steps_in_all(config, count)} in all",
        f"under way at once: at most {cap} groups = {cap * algorithm.samples_per_prompt} prefixes "
        f"(window of {algorithm.max_staleness} versions)",
    ]
    return "\n".join([*lines, *_adapter_memory(config), *_target_memory(config)])


def parameters(model: str) -> tuple[int, str] | None:
    """Parameters of a model and how they are known: from its files' headers, or from the size in a hub name (7B, 0.5B)."""
    total = sum(_tensor_sizes(path) for path in Path(model).glob("*.safetensors"))
    if total:
        return total, "from its files"
    named = re.search(r"(\d+(?:\.\d+)?)([BM])(?![a-zA-Z])", model.rsplit("/", 1)[-1])
    if named is None:
        return None
    return int(float(named.group(1)) * {"B": 1e9, "M": 1e6}[named.group(2)]), "from its name"


def _tensor_sizes(path: Path) -> int:
    with path.open("rb") as file:
        (size_bytes,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size_bytes))
    return sum(
        math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__"
    )


def _adapter_memory(config: RunConfig) -> list[str]:
    known = parameters(config.adapter.model)
    if known is None:
        return ["adapter: its size is not known before it is downloaded"]
    count, source = known
    working = _DTYPE_BYTES[config.learner.dtype]
    # Per trained parameter: working copy, fp32 master where that is not it, two Adam moments and a gradient in fp32.
    models = 2 if config.algorithm.has_critic else 1
    trained = models * count * (working + (4 if working == 2 else 0) + 8 + 4)
    reference = count * working if config.algorithm.kl > 0 else 0
    return [
        f"adapter: {count / 1e6:,.1f} M parameters ({source})",
        f"learner: {(trained + reference) / GIB:.2f} GiB over all ranks without activations ({models} trained "
        f"with optimiser{', reference' if reference else ''})",
        f"a rollout: {count * working / GIB:.2f} GiB of weights, without its cache",
    ]


def _target_memory(config: RunConfig) -> list[str]:
    known = parameters(config.target.model)
    if known is None:
        return ["target: its size is not known before it is downloaded"]
    count, source = known
    on_disk = sum(path.stat().st_size for path in Path(config.target.model).glob("*.safetensors"))
    size_bytes = on_disk or 2 * count
    return [
        f"target: {count / 1e6:,.1f} M parameters ({source})",
        f"a scorer: {size_bytes / GIB:.2f} GiB of weights, without its cache",
    ]
