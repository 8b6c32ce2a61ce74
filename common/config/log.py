"""`[log]`: where a run's metrics and samples are shown besides its own files."""

from typing import Literal

from prefixrl.common.config.section import Section


class WandbConfig(Section):
    """A run of Weights & Biases, whose key is in the environment (WANDB_API_KEY)."""

    project: str = "prefixrl"
    """Project that the run belongs to."""
    entity: str | None = None
    """User or team. Absent: the key's own."""
    name: str | None = None
    """Name of the run. Absent: that of the run directory."""
    mode: Literal["online", "offline"] = "online"
    """offline: all is written into the run directory, for `wandb sync`."""


class LogConfig(Section):
    """Trackers that show `metrics.jsonl` and samples elsewhere."""

    tensorboard: bool = False
    """Write event files into the folder `tensorboard` of the run directory."""
    wandb: WandbConfig | None = None
    """Given: send the metrics to Weights & Biases."""
