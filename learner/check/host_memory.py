"""Memory of the host that processes of a run take, which a batch system must know before.

`python -m prefixrl.learner.check.host_memory` reads resolved configs, one a line, and prints the GiB of each as JSON.
"""

import json
import math
import sys

from prefixrl.common.config.load import from_json
from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import ConfigError
from prefixrl.common.host.exit_codes import exit_codes
from prefixrl.learner.check import budget
from prefixrl.learner.check.footprint import GIB, EngineFootprint, learner_footprint
from prefixrl.learner.check.model_shapes import parameters, unknown_size

CUDA_GIB, PLAIN_GIB, CHILD_GIB = 16, 4, 1
"""Beside weights: of a process with a GPU, for libraries and buffers; of one without; of a verifier's child."""


def host_gib(config: RunConfig, role: str) -> int:
    """Return the GiB of a process; raise ConfigError for a model of unknown size.

    Weights are there twice while they are loaded, and all that is on the device where that is the CPU.
    """
    model = config.model_of("scorer" if role == "scorer" else "rollout")
    tokens = config.rollout.max_prompt_tokens
    prm = config.scorer.prm if role == "scorer" else None
    section = config.engine_section(role)
    models = [model] if role == "learner" or config.loads_model(role) else []
    if prm:
        models.append(prm.model)
    for folder in models:
        if parameters(folder) is None:
            number = "20 and twice the GiB of its weights, or 0 for what the site gives"
            raise ConfigError(
                f"slurm.{role}.memory_gib is absent, and of {folder}, {unknown_size(folder)}; write {number}"
            )
    size = 0
    if role == "scorer":
        size = config.scorer.cache_bytes + CHILD_GIB * GIB * config.verifier_children()
    if role == "learner" and (plan := budget.rank_plan(config, tokens)):
        rank = learner_footprint(plan)
        weights = plan.dtype_bytes * plan.parameters
        # torch rounds each pinned buffer up to a power of two.
        size = (
            2 * (weights + plan.dtype_bytes * plan.reward_parameters)
            + 2 * budget.SETS * weights
            + rank.host
        )
        size += rank.peak if config.learner.device == "cpu" else 0
    elif isinstance(engine := budget.engine(config, role, tokens, None), EngineFootprint):
        size += 2 * engine.weights * section.record.gpus(section)
        size += engine.weights + engine.rows * engine.row_cache if section.device == "cpu" else 0
    if prm and (process := budget.process_footprint(config)):
        size += 2 * process.weights + (process.needed if prm.device == "cpu" else 0)
    return math.ceil(size / GIB) + (CUDA_GIB if config.gpus_of(role) else PLAIN_GIB)


if __name__ == "__main__":
    with exit_codes():
        needed: list[dict[str, int]] = []
        for line in sys.stdin:
            config = from_json(line, "the config")
            needed.append({})
            for role in ("learner", "rollout", "scorer"):
                gib = getattr(config.slurm, role).memory_gib
                needed[-1][role] = host_gib(config, role) if gib is None else gib
        sys.stdout.write(json.dumps(needed))
