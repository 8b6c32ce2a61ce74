"""The `[learner]` section: optimisers, precision, memory and deadlines (docs/training.md)."""

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, field_validator

from prefixrl.common.config.foreign.plugins import plugins
from prefixrl.common.config.section import (
    Fraction,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Section,
    Several,
)


class BuiltInTracker(NamedTuple):
    """Facts of a tracker that this software has."""

    record: str
    """`module:attribute` of its record."""
    package: str
    """Package that must be installed; "" for none."""


TRACKERS = {
    "tensorboard": BuiltInTracker("prefixrl.deploy.track.tensorboard:TENSORBOARD", "tensorboard"),
    "wandb": BuiltInTracker("prefixrl.deploy.track.wandb:WANDB", "wandb"),
    "trackio": BuiltInTracker("prefixrl.deploy.track.wandb:TRACKIO", "trackio"),
    "mlflow": BuiltInTracker("prefixrl.deploy.track.mlflow:MLFLOW", "mlflow"),
}
"""Built-in trackers by name, which is a key of [log]."""


class LoraConfig(Section):
    """Low-rank matrices instead of full weights (Hu et al. 2021); exported merged."""

    rank: Positive = 16
    """Rank of the matrices."""
    alpha: Positive = 32
    """Scale: the product of the two matrices is multiplied by alpha / rank."""
    target_modules: Several[str] = ("all-linear",)
    """Name endings of the linear layers that get matrices; all-linear: every one but the output head."""
    publish: Literal["matrices", "merged"] = "matrices"
    """matrices: rollouts get the matrices of a version and apply them as the learner does. merged: they get whole
    models, which are larger, and rounded once more in bfloat16. vLLM's CPU build copies the matrices for every token,
    nine tenths of its time: take merged there."""


class LearnerConfig(Section):
    """Training of adapter and critic: optimiser, memory, devices."""

    actor_lr: PositiveFloat = 5e-7
    """Peak of the adapter's learning rate."""
    critic_lr: PositiveFloat = 9e-6
    """Peak of the critic's learning rate."""
    warmup_ratio: Fraction = 0.03
    """Share of the run's optimiser steps in which the rate rises from 0."""
    min_lr_ratio: Fraction = 0.1
    """End of the cosine schedule, as a share of the peak."""
    adam_betas: Annotated[tuple[Fraction, Fraction], Field(strict=False)] = (0.9, 0.95)
    """Decays of AdamW's two moments."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay of AdamW."""
    grad_clip: PositiveFloat = 1.0
    """Largest norm of a gradient; a larger one is scaled down to it."""
    micro_batch_tokens: Positive = 16384
    """Padded tokens of one forward."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of the weights in forward and backward; masters and moments are float32."""
    head_dtype: Literal["float32", "model"] = "float32"
    """Type of the logits, in learner and transformers rollouts: float32 from weights of any type, or the weights' own.
    Rounded to bfloat16, a logprob is off by up to 0.1 nat, in each engine by another amount."""
    weight_deltas: bool = True
    """Publish each version also as the difference to the one before; false: where the network moves a snapshot sooner
    than it is written in the background (docs/weights.md)."""
    lora: LoraConfig | None = None
    """Given: train only low-rank matrices of actor and critic. The reference, the bare actor, then takes no memory."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay of a moving average of the actor's weights, exported with checkpoints as `hf_ema`. Absent: none."""
    gradient_checkpointing: bool = False
    """Compute each layer's activations again in the backward pass instead of keeping them."""
    attn_implementation: Literal["auto", "sdpa", "eager", "varlen", "flash_attention_2"] = "auto"
    """auto: sdpa where prompts are shared; else, on CUDA and in bfloat16, varlen, torch's kernel for packed rows."""
    packed: bool | None = None
    """Run the rows of a micro-batch as one long row, without padding. Absent: true with varlen and flash-attn."""
    shared_prompts: bool | None = None
    """Compute the prompt of a group once for all its rows, which see it and themselves. Absent: true, unless rows are
    packed or flash-attn is used, which takes no mask (docs/training.md)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of actor and critic; auto is CUDA where there is one."""
    device_memory_gib: PositiveFloat | None = None
    """Memory of each device that learner, rollouts and scorers run on; `--check` refuses what cannot fit. Absent: that
    of this host's first CUDA device, if there is one."""
    threads: Positive = 1
    """Threads of each learner rank on the CPU."""
    batch_timeout_s: PositiveFloat = 3600.0
    """Longest wait for one batch; then the learner ends and names what it waited for. A worker that holds a training
    task for half of it without a result counts as dead, whatever progress it reports."""
    collective_timeout_s: PositiveFloat = 1800.0
    """Longest wait of a rank inside a collective. No rank enters one before the batch is there for all."""
    deepspeed: dict[str, Any] = Field(default_factory=lambda: {"zero_optimization": {"stage": 0}})
    """DeepSpeed's own configuration, passed unchanged. Absent: ZeRO stage 0."""

    def _check_sharing(self) -> None:
        takes_no_mask = self.attn_implementation in ("varlen", "flash_attention_2")
        self.refuse_if(
            self.shared_prompts and (self.packed or takes_no_mask),
            "shared_prompts " + ("packed" if self.packed else "attn_implementation"),
            "packed rows carry their own prompts, and varlen and flash-attn take no mask that "
            "lets rows share one; leave one of the two out",
        )
        self.refuse_if(
            self.packed is False and self.attn_implementation == "varlen",
            "packed attn_implementation",
            "varlen takes packed rows alone; use sdpa",
        )


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

    dashboard: bool = False
    """`prefixrl launch` starts `prefixrl dashboard` of the run, prints its address, and ends it with the run."""
    tensorboard: bool = False
    """Write event files into the folder `tensorboard` of the run directory."""
    prometheus_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port at which the learner serves its numbers to Prometheus; rollout-N does so at this port + 1 + N, scorer-N at
    this port + 101 + N, each on its own host. 0: none of them."""
    prometheus_host: str = "127.0.0.1"
    """Address at which they listen. Whoever reaches it reads the numbers: 0.0.0.0 lets every host."""
    wandb: WandbConfig | None = None
    """Given: send the metrics to Weights & Biases."""
    trackio: str | None = None
    """Project of trackio that the metrics go to. Its variables (TRACKIO_SPACE_ID) may name another place than its own
    folder."""
    mlflow: str | None = None
    """Experiment of MLflow that the metrics go to, on the server that MLFLOW_TRACKING_URI names."""

    trackers: dict[str, Any] = Field(default_factory=dict)
    """Trackers that installed packages add, by name, each with the options that it takes (docs/tracking.md)."""

    @field_validator("trackers")
    @classmethod
    def _are_installed(cls, trackers: dict[str, Any]) -> dict[str, Any]:
        for name in trackers.keys() - plugins("trackers").keys():
            installed = ", ".join(plugins("trackers")) or "none"
            raise ValueError(
                f"no installed package adds the tracker {name!r} (installed: {installed}); "
                f"install its package, or leave it out; {', '.join(TRACKERS)} are keys of [log] itself"
            )
        return trackers

    @property
    def chosen_trackers(self) -> dict[str, Any]:
        """The options of every tracker that is asked for, by the tracker's name."""
        built_in = {name: getattr(self, name) for name in TRACKERS}
        return {name: options for name, options in built_in.items() if options} | self.trackers


def missing(tracker: str) -> str:
    """Return the refusal of a tracker whose package is not installed."""
    return f"log.{tracker} needs {tracker}: pip install 'prefixrl[trackers]', or leave the key out"
