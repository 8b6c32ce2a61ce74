"""Shares of a GPU's memory where several processes of a run are on it.

A learner takes what the forecast says. A rollout without a share of its own gets what its weights, 4 GiB of keys and
values and its work need; scorers without one divide what is left.
"""

import math
from dataclasses import dataclass

from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import ConfigError
from prefixrl.common.run.placement import LEARNER, Placement, neighbours
from prefixrl.learner.run import budget
from prefixrl.learner.run.footprint import CONTEXT_BYTES, GIB, EngineFootprint, learner_footprint

ROLLOUT_CACHE_BYTES = 4 * GIB
WORK_BYTES = GIB
"""An engine's activations and logits of a step."""
FREE = 0.02
"""Share that is left free beside several processes."""


@dataclass(frozen=True)
class Demand:
    """Shares that a process takes of the memory of each of its GPUs."""

    least: float
    """With less it cannot run."""
    share: float | None
    """Given, or known; None: to be chosen here."""


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
    for role in ("rollout", "scorer"):
        engine = budget.engine(config, role, prompt_tokens, limit_bytes)
        if not isinstance(engine, EngineFootprint):
            continue
        section = budget.section_of(config, role)
        cache = min(engine.rows * engine.row_cache, ROLLOUT_CACHE_BYTES) if role == "rollout" else engine.row_cache
        least = (engine.weights + cache + CONTEXT_BYTES + WORK_BYTES) / limit_bytes
        given = least if section.engine == "transformers" else section.vllm.gpu_memory_utilization
        found[role] = Demand(least, given)
    return found


def divide(placed: Placement, demanded: dict[str, Demand]) -> Shares:
    """Divide each GPU among its processes: pure.

    Raises:
        ConfigError: a GPU is asked for more than it has.
    """
    chosen: dict[str, float] = {}
    crowded = {gpu: [_role(name) for name in names] for gpu, names in neighbours(placed).items() if len(names) > 1}
    for roles in crowded.values():
        if "rollout" in roles and (of := demanded.get("rollout")) and of.share is None:
            chosen["rollout"] = math.ceil(100 * of.least) / 100
    for roles in crowded.values():
        of = demanded.get("scorer")
        if "scorer" not in roles or of is None or of.share is not None:
            continue
        others = sum(_share(role, demanded, chosen) for role in roles if role != "scorer")
        left = math.floor(100 * (1.0 - FREE - others) / roles.count("scorer")) / 100
        chosen["scorer"] = min(left, chosen.get("scorer", 1.0))
    lines = []
    for gpu, names in neighbours(placed).items():
        parts = [(name, _share(_role(name), demanded, chosen)) for name in names]
        text = ", ".join(f"{name} {share:.2f}" if share else name for name, share in parts)
        lines.append(f"GPU {gpu}: {text}")
        is_starved = any(
            chosen.get(_role(name), 1.0) < demanded[_role(name)].least for name in names if _role(name) in demanded
        )
        if gpu in crowded and (sum(share for _, share in parts) > 1.0 or is_starved):
            raise ConfigError(_fault(gpu, names, demanded, chosen))
    return Shares(chosen, lines)


def with_shares(config: RunConfig, placed: Placement, prompt_tokens: int) -> tuple[RunConfig, list[str]]:
    """Return the run file with the shares that engines get on crowded GPUs, and a line per GPU.

    Raises:
        ConfigError: a GPU is asked for more than it has.
    """
    limit = budget.device_bytes(config)
    if limit is None:
        return config, [f"GPU {gpu}: {', '.join(names)}" for gpu, names in neighbours(placed).items()]
    shares = divide(placed, demands(config, limit, prompt_tokens))
    for role, share in shares.chosen.items():
        section = budget.section_of(config, role)
        vllm = section.vllm.model_copy(update={"gpu_memory_utilization": share})
        config = config.model_copy(update={role: section.model_copy(update={"vllm": vllm})})
    return config, shares.lines


def _role(name: str) -> str:
    return name.rpartition("-")[0] or name


def _share(role: str, demanded: dict[str, Demand], chosen: dict[str, float]) -> float:
    if role in chosen:
        return chosen[role]
    of = demanded.get(role)
    if of is None:
        return 0.0
    return budget.VLLM_SHARE if of.share is None else of.share


def _fault(gpu: int, names: list[str], demanded: dict[str, Demand], chosen: dict[str, float]) -> str:
    parts = []
    for name in names:
        role = _role(name)
        least = role in chosen and role in demanded and chosen[role] < demanded[role].least
        share = demanded[role].least if least else _share(role, demanded, chosen)
        parts.append(f"{name} {'at least ' if least else ''}{share:.2f}")
    return (
        f"GPU {gpu} has not enough memory for {len(names)} processes, as shares of it: {', '.join(parts)}; start fewer "
        f"([launch]), put some on other GPUs (launch.devices), give engines less (gpu_memory_utilization of "
        f"rollout.vllm and scorer.vllm), or let the learner need less (`prefixrl-learner RUN_FILE --check`)"
    )
