"""The `[learner]` section: optimisers, precision, memory and deadlines (docs/training.md)."""

from typing import Annotated, Any, Literal

from pydantic import Field

from prefixrl.common.section import Fraction, NonNegativeFloat, Positive, PositiveFloat, Section


class LoraConfig(Section):
    """Low-rank matrices instead of full weights (Hu et al. 2021); merged into the weights that are published and exported."""

    rank: Positive = 16
    alpha: Positive = 32
    """The product of the two matrices counts alpha / rank times."""
    target_modules: Annotated[tuple[str, ...], Field(strict=False)] = ("all-linear",)
    """Ends of the names of the linear layers that get them; all-linear: every one but the output head."""


class LearnerConfig(Section):
    actor_lr: PositiveFloat = 5e-7
    critic_lr: PositiveFloat = 9e-6
    warmup_ratio: Fraction = 0.03
    min_lr_ratio: Fraction = 0.1
    """The cosine ends at this share of the peak."""
    adam_betas: Annotated[tuple[Fraction, Fraction], Field(strict=False)] = (0.9, 0.95)
    weight_decay: NonNegativeFloat = 0.0
    grad_clip: PositiveFloat = 1.0
    micro_batch_tokens: Positive = 16384
    """Padded tokens of one forward."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    weight_deltas: bool = True
    """Publish each version also as the difference to the one before, which is all that most rollouts then pull. It is written
    in the background; false where the network moves a whole snapshot sooner (docs/weights.md)."""
    lora: LoraConfig | None = None
    """Train low-rank matrices of actor and critic only; the section's presence turns it on. The reference is then the actor
    without them and takes no memory."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Keep an exponential moving average of the actor's weights, exported with every checkpoint as `hf_ema`; absent: none."""
    gradient_checkpointing: bool = False
    """Compute each layer's activations again in the backward pass instead of keeping them."""
    attn_implementation: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    """auto: flash-attn where it is installed, the device is CUDA and the dtype bfloat16; else sdpa."""
    packed: bool | None = None
    """Run the rows of a micro-batch end to end as one, without padding; as flash-attn is used or not when absent."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: Positive = 1
    batch_timeout_s: PositiveFloat = 3600.0
    """Longest wait for one batch before the learner ends with the name of what it waited for."""
    collective_timeout_s: PositiveFloat = 1800.0
    """Longest a rank waits inside a collective. No rank enters one before all hold their shard."""
    deepspeed: dict[str, Any] = Field(default_factory=lambda: {"zero_optimization": {"stage": 0}})
    """Passed to DeepSpeed as it stands."""
