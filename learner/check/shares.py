"""Shares of a GPU's memory where several models of a run are on it.

A learner takes what the forecast says. A rollout without a share of its own gets what its weights, 4 GiB of keys and
values and its work need; so does a scorer's process reward model on the first of its GPUs; targets without a share
divide what is left.
"""

import math
from dataclasses import dataclass

from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import ConfigError
from prefixrl.common.host.placement import LEARNER, Placement, neighbours
from prefixrl.learner.check import budget
from prefixrl.learner.check.footprint import CONTEXT_BYTES, GIB, EngineFootprint, learner_footprint
from prefixrl.learner.check.process_model import process_share

ROLLOUT_CACHE_BYTES = 4 * GIB
WORK_BYTES = GIB
"""An engine's activations and logits of a step."""


@dataclass(frozen=True)
class Demand:
    """Shares that a process takes of the memory of each of its GPUs."""

    least: float
    """With less it cannot run."""
    share: float | None
    """Given, or known; None: to be chosen here."""
    beside: float = 0.0
    """On the first of its GPUs a scorer's process reward model, besides its target."""


@dataclass(frozen=True)
class Shares:
    """Shares for engines that have none, by role, and what every GPU is asked for."""

    chosen: dict[str, float]
    lines: list[str]


def demands(config: RunConfig, limit_bytes: int, prompt_tokens: int) -> dict[str, Demand]:
    """Return the demands of a learner rank, a rollout and a scorer, as far as models are known."""
    found = {}
    plan = budget.rank_plan(config, prompt_tokens)
    if plan is not None:
        share = learner_footprint(plan).peak / limit_bytes
        found[LEARNER] = Demand(share, share)
    process = process_share(config, limit_bytes)
    for role in ("rollout", "scorer"):
        engine = budget.engine(config, role, prompt_tokens, limit_bytes)
        beside = process if role == "scorer" else 0.0
        if not isinstance(engine, EngineFootprint):
            if beside:
                found[role] = Demand(0.0, 0.0, beside)
            continue
        section = budget.section_of(config, role)
        cache = min(engine.rows * engine.row_cache, ROLLOUT_CACHE_BYTES) if role == "rollout" else engine.row_cache
        least = (engine.weights + cache + CONTEXT_BYTES + WORK_BYTES) / limit_bytes
        given = least if section.engine == "transformers" else section.vllm.gpu_memory_utilization
        found[role] = Demand(least, given, beside)
    return found


def divide(placed: Placement, demanded: dict[str, Demand]) -> Shares:
    """Divide each GPU among its processes: pure.

    Raises:
        ConfigError: a GPU is asked for more than it has.
    """
    chosen: dict[str, float] = {}
    besides = {gpu: _besides(gpu, names, placed, demanded) for gpu, names in neighbours(placed).items()}
    crowded = {
        gpu: [_role(name) for name in names]
        for gpu, names in neighbours(placed).items()
        if len(names) > 1 or besides[gpu]
    }
    for roles in crowded.values():
        if "rollout" in roles and (of := demanded.get("rollout")) and of.share is None:
            chosen["rollout"] = math.ceil(100 * of.least) / 100
    for gpu, roles in crowded.items():
        of = demanded.get("scorer")
        if "scorer" not in roles or of is None or of.share is not None:
            continue
        others = sum(_share(role, demanded, chosen) for role in roles if role != "scorer")
        left = math.floor(100 * (1.0 - budget.FREE - others - besides[gpu]) / roles.count("scorer")) / 100
        chosen["scorer"] = min(left, chosen.get("scorer", 1.0))
    lines = []
    for gpu, names in neighbours(placed).items():
        parts = [(name, _share(_role(name), demanded, chosen)) for name in names]
        text = ", ".join(f"{name} {share:.2f}" if share else name for name, share in parts)
        text += f", process reward model {besides[gpu]:.2f}" if besides[gpu] else ""
        lines.append(f"GPU {gpu}: {text}")
        is_starved = any(
            chosen.get(_role(name), 1.0) < demanded[_role(name)].least for name in names if _role(name) in demanded
        )
        if gpu in crowded and (sum(share for _, share in parts) + besides[gpu] > 1.0 or is_starved):
            raise ConfigError(_fault(gpu, names, demanded, chosen, besides[gpu]))
    return Shares(chosen, lines)


def with_shares(config: RunConfig, placed: Placement, prompt_tokens: int) -> tuple[RunConfig, list[str]]:
    """Return the run file with shares for engines on crowded GPUs, and a line per known GPU.

    Raises:
        ConfigError: a GPU is asked for more than it has.
    """
    limit = budget.device_bytes(config)
    if limit is None:
        return config, [f"GPU {gpu}: {', '.join(names)}" for gpu, names in neighbours(placed).items()]
    # Where nobody says who is where, a scorer's target and its process reward model share a GPU all the same.
    alone = {"scorer-0": tuple(range(config.gpus_of("scorer")))} if config.gpus_of("scorer") else {}
    shares = divide(placed or alone, demands(config, limit, prompt_tokens))
    for role, share in shares.chosen.items():
        section = budget.section_of(config, role)
        vllm = section.vllm.model_copy(update={"gpu_memory_utilization": share})
        config = config.model_copy(update={role: section.model_copy(update={"vllm": vllm})})
    return config, shares.lines if placed else []


def _besides(gpu: int, names: list[str], placed: Placement, demanded: dict[str, Demand]) -> float:
    """Return the share of the process reward models on a GPU: a scorer has its own on its first."""
    of = demanded.get("scorer")
    return 0.0 if of is None else of.beside * sum(_role(name) == "scorer" and placed[name][0] == gpu for name in names)


def _role(name: str) -> str:
    return name.rpartition("-")[0] or name


def _share(role: str, demanded: dict[str, Demand], chosen: dict[str, float]) -> float:
    if role in chosen:
        return chosen[role]
    of = demanded.get(role)
    if of is None:
        return 0.0
    return budget.VLLM_SHARE if of.share is None else of.share


def _fault(
    gpu: int, names: list[str], demanded: dict[str, Demand], chosen: dict[str, float], beside: float = 0.0
) -> str:
    parts = []
    for name in names:
        role = _role(name)
        least = role in chosen and role in demanded and chosen[role] < demanded[role].least
        share = demanded[role].least if least else _share(role, demanded, chosen)
        parts.append(f"{name} {'at least ' if least else ''}{share:.2f}")
    count = f"{len(names)} process{'es' if len(names) > 1 else ''}"
    parts += [f"process reward model {beside:.2f}"] if beside else []
    return (
        f"GPU {gpu} has not enough memory for {count}, as shares of it: {', '.join(parts)}; start fewer "
        f"([launch]), put some on other GPUs (launch.devices), give engines less (gpu_memory_utilization of "
        f"rollout.vllm, scorer.vllm and scorer.prm), or let the learner need less (`prefixrl-learner RUN_FILE --check`)"
    )
