"""What every engine of a rollout must hold: the probe, and the matrices of a LoRA run."""

from prefixrl.common.config.run import RunConfig
from prefixrl.common.weights.low_rank import LowRank

PROBE_ROOM_TOKENS = 128
"""Least context of a rollout: a probe must fit, however short the prompts are."""


def low_rank_of(config: RunConfig) -> LowRank | None:
    """Return the shape of the matrices that rollouts get; None where they get whole weights."""
    lora = config.learner.lora
    if lora is None or lora.publish == "merged":
        return None
    return LowRank(lora.rank, lora.alpha, lora.target_modules)
