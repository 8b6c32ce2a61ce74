"""The `[algorithm]` section: which objective, its options, and which of them go together (docs/objectives.md)."""

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, model_validator

from prefixrl.common.section import (
    Fraction,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Section,
)

Name = Literal["gae", "tppo", "appo", "grpo", "dr_grpo", "rloo", "reinforce_baseline"]
Band = Annotated[tuple[NonNegativeFloat, PositiveFloat], Field(strict=False)]

WITH_CRITIC: tuple[Name, ...] = ("gae", "tppo", "appo")

ONLY_FOR: dict[str, tuple[tuple[Name, ...], str]] = {
    "gamma": (("gae",), "elsewhere the prefix is one action and nothing is discounted inside it"),
    "gae_lambda": (("gae", "tppo"), "the others have no value per token"),
    "value_clip": (WITH_CRITIC, "the others have no critic"),
    "critic_warmup_steps": (WITH_CRITIC, "the others have no critic"),
    "length_normalised": (("appo",), "the others do not multiply ratios over a prefix"),
    "zscore": (("grpo",), "the others divide by no deviation of rewards"),
    "aggregation": (
        ("gae", "tppo", "grpo", "rloo", "reinforce_baseline"),
        "appo counts prefixes, and dr_grpo divides by rows x the most tokens of one",
    ),
    "whiten": (("gae", "tppo", "appo", "rloo"), "the name of the others says whether they whiten"),
    "advantage_function": (
        ("grpo", "dr_grpo", "rloo", "reinforce_baseline"),
        "with a critic, advantages come from its values, not from a function of the rewards",
    ),
}  # fmt: skip
"""Keys that mean something under some names only, and why."""


class AlgorithmConfig(Section):
    name: Name = "gae"
    """The objective; docs/objectives.md says what each name stands for."""
    groups_per_iteration: Positive = 512
    samples_per_prompt: Positive = 8
    iterations: Positive | None = None
    """Stop after this many iterations; exclusive with `data.epochs`."""
    max_staleness: NonNegative = 2
    """S: no sample is trained more than S versions after the one that wrote it. 0 is synchronous PPO."""
    correction: Literal["decoupled", "behaviour", "none"] = "decoupled"
    importance_cap: PositiveFloat = 2.0
    mask_token_band: Band | None = None
    """[low, high] on p/mu of a token: tokens outside count in no policy loss."""
    mask_sequence_band: Band | None = None
    """[low, high] on the geometric mean of p/mu over a prefix: prefixes outside count in no policy loss."""
    minibatches: Positive = 8
    """Optimiser steps per PPO epoch."""
    ppo_epochs: Positive = 1
    kl_limit: PositiveFloat | None = None
    """Once KL(p||theta) of an optimiser step exceeds this, the iteration's remaining steps are left out."""
    gamma: Fraction = 1.0
    gae_lambda: Fraction = 0.95
    clip: PositiveFloat = 0.2
    clip_high: PositiveFloat | None = None
    """The ratio is clipped to [1 - clip, 1 + clip_high]; as `clip` when absent."""
    dual_clip: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = None
    """Bound on what a token of negative advantage can add, as a multiple of that advantage; off when absent."""
    value_clip: PositiveFloat = 0.2
    critic_warmup_steps: NonNegative = 0
    """Optimiser steps at the start of the run in which only the critic learns."""
    length_normalised: bool = False
    """appo: the ratio is the geometric mean over the prefix's tokens instead of their product."""
    zscore: Literal["group", "buffer"] = "group"
    """grpo: whose mean and deviation standardise a reward, those of its group or of the whole iteration."""
    kl: NonNegativeFloat = 1e-3
    """Coefficient of the KL to the initial adapter; 0 drops the reference model."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    kl_placement: Literal["reward", "loss"] = "reward"
    entropy: Annotated[float, Field(allow_inf_nan=False)] = 1e-3
    """Entropy bonus, added to the objective: positive keeps the policy random."""
    whiten: bool | None = None
    """Whether advantages are whitened once per iteration; as the name says when absent."""
    whiten_floor: PositiveFloat = 1e-4
    aggregation: Literal["token", "sequence"] = "token"
    advantage_function: str | None = None
    """`file.py:name` of a function (rewards, groups) -> advantages of all rows of an iteration, called instead of the
    baseline that the name stands for."""

    @property
    def has_critic(self) -> bool:
        """Whether the objective learns values; the others load no critic."""
        return self.name in WITH_CRITIC

    @property
    def is_whitened(self) -> bool:
        """Whether advantages are whitened, as the name or the key says."""
        if self.whiten is not None:
            return self.whiten
        return self.has_critic or self.name == "reinforce_baseline"

    @model_validator(mode="after")
    def _kl_pair(self) -> "AlgorithmConfig":
        allowed = {"reward": ("k1",), "loss": ("k2", "k3")}[self.kl_placement]
        if self.kl_estimator not in allowed:
            raise ValueError(
                f"kl_estimator = {self.kl_estimator!r} with kl_placement = {self.kl_placement!r}: k1 in a loss has a zero "
                f"expected gradient and k2/k3 in a reward are biased; with {self.kl_placement!r} use {' or '.join(allowed)}"
            )
        return self

    @model_validator(mode="after")
    def _keys_with_effect(self, info: ValidationInfo) -> "AlgorithmConfig":
        useless = [
            f"{key} = {getattr(self, key)!r} has no effect with name = {self.name!r}: {reason}; leave {key} out, or use "
            f"name = {' or '.join(names)}"
            for key, (names, reason) in ONLY_FOR.items()
            if self.name not in names and self.is_given(key, bool(info.context))
        ]
        if not self.is_whitened and self.is_given("whiten_floor", bool(info.context)):
            useless.append(
                f"whiten_floor = {self.whiten_floor!r} has no effect with name = {self.name!r}"
                f"{' and whiten = false' if self.whiten is False else ''}: advantages are not whitened; leave it out"
            )
        if useless:
            raise ValueError("\n    ".join(useless))
        return self

    @model_validator(mode="after")
    def _pairs(self) -> "AlgorithmConfig":
        for key in ("mask_token_band", "mask_sequence_band"):
            band = getattr(self, key)
            if band is not None and not band[0] < 1.0 < band[1]:
                raise ValueError(
                    f"{key} = [{band[0]:g}, {band[1]:g}] must hold 1 between its ends: p/mu is 1 where nothing is stale"
                )
        if self.kl_limit is not None and self.minibatches * self.ppo_epochs == 1:
            raise ValueError(
                f"kl_limit = {self.kl_limit:g} with minibatches = 1 and ppo_epochs = 1: it leaves out the steps after the "
                "one that passes it, and there is only one; raise minibatches or ppo_epochs, or leave kl_limit out"
            )
        if self.advantage_function is not None and self.zscore == "buffer":
            raise ValueError(
                f"zscore = 'buffer' with advantage_function = {self.advantage_function!r}: the function decides what rewards "
                "are compared with; leave one of them out"
            )
        is_compared = not self.has_critic and self.advantage_function is None
        if self.samples_per_prompt == 1 and is_compared and self.zscore == "group":
            raise ValueError(
                f"samples_per_prompt = 1 with name = {self.name!r}: the baseline is the group's other rewards, so every "
                "advantage would be 0; sample at least 2 per prompt, or use a name with a critic"
            )
        return self
