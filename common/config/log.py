"""`[log]`: where a run's metrics and samples are shown besides its own files."""

from typing import Annotated, Literal

from pydantic import Field

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
    prometheus_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port at which the learner serves its numbers to Prometheus; rollout-N does so at this port + 1 + N, scorer-N at
    this port + 101 + N, each on its own host. 0: none of them."""
    prometheus_host: str = "127.0.0.1"
    """Address at which they listen. Whoever reaches it reads the numbers: 0.0.0.0 lets every host."""
    wandb: WandbConfig | None = None
    """Given: send the metrics to Weights & Biases."""
