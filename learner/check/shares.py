"""Shares of a GPU's memory where several models of a run are on it: the given share, else what a model needs.

Targets in vLLM without a share divide what is left; a model that is alone keeps vLLM's own share. A rollout is told its
keys and values in bytes: vLLM would take what its neighbours load meanwhile for its own work, and find too little room.
"""

import math
from dataclasses import dataclass

from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import ConfigError
from prefixrl.common.host.placement import LEARNER, Placement, neighbours
from prefixrl.learner.check import budget
from prefixrl.learner.check.footprint import CONTEXT_BYTES, GIB, EngineFootprint, learner_footprint

MOST_CACHE_BYTES = 4 * GIB
WORK_BYTES = 2 * GIB
"""An engine's activations and logits of a step: 1,024 rows of a large vocabulary in float32 among them."""


@dataclass(frozen=True)
class Demand:
    """Shares that a process takes of the memory of each of its GPUs."""

    least: float
    """With less it cannot run."""
    share: float | None
    """Given, or known; None: to be chosen here."""
    beside: float = 0.0
    """On the first of its GPUs a scorer's process reward model, besides its target."""
    cache_bytes: int | None = None
    """Keys and values of a rollout that has chosen neither them nor a share."""


NOTHING = Demand(0.0, 0.0)


@dataclass(frozen=True)
class Shares:
    """Shares for engines without one, by role, and a line per GPU."""

    chosen: dict[str, float]
    lines: list[str]


def demands(config: RunConfig, limit_bytes: int, prompt_tokens: int) -> dict[str, Demand]:
    """Return the demands of a learner rank, a rollout and a scorer, as far as models are known."""
    demanded = {}
    if (plan := budget.rank_plan(config, prompt_tokens)) is not None:
        share = learner_footprint(plan).peak / limit_bytes
        demanded[LEARNER] = Demand(share, share)
    for role in ("rollout", "scorer"):
        # A rollout takes its longest row, too.
        tokens = config.rollout.max_prompt_tokens if role == "rollout" else prompt_tokens
        engine = budget.engine(config, role, tokens, limit_bytes)
        beside = budget.process_share(config, limit_bytes) if role == "scorer" else 0.0
        if not isinstance(engine, EngineFootprint):
            demanded[role] = Demand(0.0, 0.0, beside)
            continue
        section = config.engine_section(role)
        memory = section.record.memory
        cache = engine.row_cache
        declared_bytes = memory.cache_bytes(section) if memory else None
        if role == "rollout":
            cache = declared_bytes or min(
                max(engine.rows * cache, GIB // 4) if cache else MOST_CACHE_BYTES, MOST_CACHE_BYTES
            )
        least = (engine.weights + cache + CONTEXT_BYTES + WORK_BYTES) / limit_bytes
        declared_share = memory.share(section) if memory else least
        demanded[role] = Demand(
            least,
            declared_share,
            beside,
            cache if role == "rollout" and not declared_bytes else None,
        )
    return demanded


def divide(placed: Placement, demanded: dict[str, Demand]) -> Shares:
    """Divide each GPU among its processes; raise ConfigError for one asked for too much. Pure."""
    rollout, scorer = (demanded.get(role, NOTHING) for role in ("rollout", "scorer"))
    here = neighbours(placed)
    roles = {gpu: [_role(name) for name in names] for gpu, names in here.items()}
    # A scorer has its process reward model on its first GPU.
    beside = {
        gpu: scorer.beside
        * sum(_role(name) == "scorer" and placed[name][0] == gpu for name in names)
        for gpu, names in here.items()
    }
    crowded = [gpu for gpu in here if len(here[gpu]) > 1 or beside[gpu]]
    shares = {
        role: budget.WHOLE if each.share is None else each.share for role, each in demanded.items()
    }
    chosen = {}
    # Beside other processes a rollout gets what it needs, rounded up to a per cent.
    if rollout.share is None and any("rollout" in roles[gpu] for gpu in crowded):
        shares["rollout"] = chosen["rollout"] = math.ceil(100 * rollout.least) / 100
    # All scorers have one setting, so the fullest of their GPUs decides.
    scorers = {gpu: roles[gpu].count("scorer") for gpu in crowded if "scorer" in roles[gpu]}
    if scorer.share is None and scorers:
        free_shares = [1.0]
        for gpu, count in scorers.items():
            other_shares = sum(shares.get(role, 0.0) for role in roles[gpu] if role != "scorer")
            free = 1.0 - budget.FREE - (other_shares + beside[gpu])
            free_shares.append(math.floor(100 * free / count) / 100)
        shares["scorer"] = chosen["scorer"] = min(free_shares)
    # Shares that the user gave, and least needs, may exceed a GPU: each shared one is checked last.
    for gpu in crowded:
        needs = (demanded.get(role, NOTHING).least > chosen.get(role, 1.0) for role in roles[gpu])
        sum_of_shares = sum(shares.get(role, 0.0) for role in roles[gpu]) + beside[gpu]
        if any(needs) or sum_of_shares > 1.0 - budget.FREE:
            raise ConfigError(_fault(gpu, here[gpu], shares, demanded, beside[gpu]))
    return Shares(chosen, [_line(gpu, names, shares, beside[gpu]) for gpu, names in here.items()])


def with_shares(
    config: RunConfig, placed: Placement, prompt_tokens: int
) -> tuple[RunConfig, list[str]]:
    """Return the config with shares for crowded GPUs, and a line per GPU; raise as `divide`."""
    limit = budget.device_bytes(config)
    if limit is None:
        return config, [_line(gpu, names, {}, 0.0) for gpu, names in neighbours(placed).items()]
    # Without a placement too, a scorer's target and its process reward model share a GPU.
    alone = {"scorer-0": tuple(range(config.gpus_of("scorer")))} if config.gpus_of("scorer") else {}
    demanded = demands(config, limit, prompt_tokens)
    shares = divide(placed or alone, demanded)
    for role, share in shares.chosen.items():
        section = config.engine_section(role)
        memory = section.record.memory
        assert memory is not None, "only such an engine has a share that is not known"
        changed = memory.with_share(section, share, demanded[role].cache_bytes)
        config = config.model_copy(update={role: changed})
    return config, shares.lines if placed else []


def _role(name: str) -> str:
    return name.rpartition("-")[0] or name


def _line(gpu: int, names: list[str], shares: dict[str, float], beside: float) -> str:
    parts = [
        f"{name} {share:.2f}" if (share := shares.get(_role(name))) else name for name in names
    ]
    return f"GPU {gpu}: {', '.join(parts + [f'process reward model {beside:.2f}'] * (beside > 0))}"


def _fault(
    gpu: int, names: list[str], shares: dict[str, float], demanded: dict[str, Demand], beside: float
) -> str:
    parts = []
    for name in names:
        share = shares.get(_role(name), 0.0)
        least = demanded.get(_role(name), NOTHING).least
        parts.append(f"{name} at least {least:.2f}" if share < least else f"{name} {share:.2f}")
    parts += [f"process reward model {beside:.2f}"] * (beside > 0)
    count = f"{len(names)} process{'es' if len(names) > 1 else ''} and {budget.FREE:g} left free"
    return (
        f"GPU {gpu} has not enough memory for {count}, as shares of it: {', '.join(parts)}; start fewer "
        f"([launch]), put some on other GPUs (launch.devices), give engines less (gpu_memory_utilization of "
        f"rollout.vllm, scorer.vllm and scorer.prm), or let the learner need less (`prefixrl-learner RUN_FILE --check`)"
    )
