"""What follows from a config before anything is started: batch arithmetic, how much is under way at once, memory."""

import json
import struct
from pathlib import Path

from prefixrl.common.config import RunConfig
from prefixrl.learner import problems
from prefixrl.learner.shard import steps_in_all

GIB = 2**30


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
    for role, lines_of_role in (
        ("adapter", _adapter_memory(config)),
        ("target", _target_memory(config)),
    ):
        lines.append(f"{role}: {lines_of_role}")
    return "\n".join(lines)


def parameters(folder: str) -> int | None:
    """Parameters of a local model, read from the headers of its safetensors files; None for a hub name."""
    total = 0
    for path in Path(folder).glob("*.safetensors"):
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size))
        for name, entry in header.items():
            if name != "__metadata__":
                count = 1
                for dimension in entry["shape"]:
                    count *= dimension
                total += count
    return total or None


def _adapter_memory(config: RunConfig) -> str:
    count = parameters(config.adapter.model)
    if count is None:
        return "a hub name: its size is known once it is downloaded"
    working = 2 if config.learner.dtype == "bfloat16" else 4
    # Actor and critic: working weights, fp32 weights where those are bf16, two Adam moments, gradients in fp32.
    trained = 2 * count * (working + (4 if working == 2 else 0) + 8 + 4)
    reference = count * working if config.algorithm.kl > 0 else 0
    return (
        f"{count / 1e6:.1f} M parameters; learner {(trained + reference) / GIB:.2f} GiB in all ranks without activations, "
        f"a rollout {count * working / GIB:.2f} GiB without its cache"
    )


def _target_memory(config: RunConfig) -> str:
    count = parameters(config.target.model)
    if count is None:
        return "a hub name: its size is known once it is downloaded"
    size = sum(path.stat().st_size for path in Path(config.target.model).glob("*.safetensors"))
    return f"{count / 1e6:.1f} M parameters; a scorer {size / GIB:.2f} GiB without its cache"
