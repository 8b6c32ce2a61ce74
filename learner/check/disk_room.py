"""Room that checkpoints and versions of the weights take on a run's disk.

What else a run writes (journal, metrics, logs) is small beside these, and grows with the run.
"""

from pathlib import Path

from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import ConfigError
from prefixrl.common.run.disk import free_bytes, held_bytes, in_mib
from prefixrl.learner.check.budget import rank_plan
from prefixrl.learner.check.footprint import ADAM, FP32, RankPlan
from prefixrl.learner.run.retention import milestones

VERSIONS = 4
"""Two that stay, one that is written, and the deltas between them."""
UNKNOWN_ITERATIONS = 1000
"""Iterations whose geometric steps are counted where epochs end the run."""
FOLDERS = ("checkpoints", "weights")


def checkpoint_bytes(plan: RankPlan) -> int:
    """Return the size of a checkpoint: weights and moments in float32, and exported models."""
    has_average = int(plan.has_average)
    actor, *other_models = plan.trained
    reward = other_models[-1:] if plan.is_reward_trained else []
    states = sum(plan.trained) * (FP32 + ADAM) + FP32 * has_average * (actor + sum(reward))
    exported = plan.parameters + (plan.reward_parameters or plan.parameters) * len(reward)
    return states + exported * plan.dtype_bytes * (1 + has_average)


def most_bytes(plan: RankPlan, checkpoints: int) -> int:
    """Return the most that checkpoints and versions take, one checkpoint being written."""
    versions = VERSIONS * plan.parameters * plan.dtype_bytes
    return (checkpoints + 1) * checkpoint_bytes(plan) + versions


def most_kept(config: RunConfig) -> int:
    """Return the most checkpoints that stay; how far epochs reach is not known before the data."""
    last = config.algorithm.iterations or UNKNOWN_ITERATIONS
    section = config.checkpointing
    best = section.keep_best or 0
    # The version that is judged, and the one that is uploaded, stay so long.
    awaited = int(best > 0) + int(bool(section.upload))
    way_back = int(config.algorithm.on_collapse == "go_back")
    return section.keep + best + awaited + way_back + len(milestones(last, section.growth))


def room_lines(config: RunConfig, plan: RankPlan) -> list[str]:
    """Return the line of the disk, and a warning where this host's has too little room."""
    directory = Path(config.directory)
    fault = room_fault(config, plan)
    return [
        f"disk of {directory}: {_needed(config, plan)} beside journal and logs; "
        f"{in_mib(free_bytes(directory))} are free",
        *([f"warning: on this host the run would be refused: {fault}"] if fault else []),
    ]


def room_fault(config: RunConfig, plan: RankPlan) -> str:
    """Return the refusal of a run that cannot fit the disk; what it holds counts as room."""
    directory = Path(config.directory)
    present_bytes = sum(held_bytes(directory / name) for name in FOLDERS)
    free = free_bytes(directory)
    if most_bytes(plan, most_kept(config)) <= free + present_bytes:
        return ""
    return (
        f"the disk of {directory} has no room for the run: it takes {_needed(config, plan)}, {in_mib(free)} are free "
        f"and {in_mib(present_bytes)} are its own already; make room, choose another directory, "
        f"or lower checkpoint.keep"
    )


def _needed(config: RunConfig, plan: RankPlan) -> str:
    checkpoints = most_kept(config)
    sizes = f"{checkpoints} + 1 checkpoints of {in_mib(checkpoint_bytes(plan))}, {VERSIONS} versions of the weights"
    return f"up to {in_mib(most_bytes(plan, checkpoints))} ({sizes})"


def check_room(config: RunConfig) -> None:
    """Raise ConfigError where the run cannot fit the disk."""
    # To count low-rank matrices takes seconds of imports, for which no user should wait; they are small.
    plan = None if config.learner.lora else rank_plan(config, 1)
    if plan is not None and (fault := room_fault(config, plan)):
        raise ConfigError(fault)
