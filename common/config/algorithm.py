"""The `[algorithm]` section: objective, options and their conflicts (docs/objectives.md)."""

import math
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, model_validator

from prefixrl.common.config import section as bounds

Name = Literal["gae", "tppo", "appo", "grpo", "dr_grpo", "rloo", "reinforce_baseline", "prime"]
Correction = Literal["decoupled", "behaviour", "none", "topr"]
Ratio = Literal["token", "prefix", "prefix_mean"]
AdmissionRule = Literal["just_in_time", "as_early_as_allowed"]
Band = Annotated[tuple[bounds.NonNegativeFloat, bounds.PositiveFloat], Field(strict=False)]

WITH_CRITIC: tuple[Name, ...] = ("gae", "tppo", "appo")

OF_THE_SURROGATE = (
    "correction", "ratio", "clip", "clip_high", "dual_clip", "importance_cap", "importance_above_cap",
    "importance_ratio", "bound_ratio", "bound_probability", "bound_negatives", "bound_second_moment",
)  # fmt: skip
"""Keys that have no effect with a loss function of the user's own."""

BOUND_TOKENS = 32
"""Longest row on which `bound_ratio` is the bound itself; every row that it was measured on is shorter."""

PRIME: dict[str, object] = {"kl": 0.0, "entropy": 0.0}
"""Defaults of "prime" that differ from those of the others."""


class AlgorithmConfig(bounds.Section):
    """The objective, the window of versions, and the steps of an iteration."""

    name: Name = "gae"
    """The objective; docs/objectives.md explains each name."""
    groups_per_iteration: bounds.Positive = 512
    """Problems of an iteration; each has a group of samples."""
    samples_per_prompt: bounds.Positive = 8
    """Samples of a group."""
    iterations: bounds.Positive | None = None
    """Iterations of the run; exclusive with `data.epochs`."""
    max_staleness: bounds.NonNegative = 2
    """S: no sample is trained more than S versions after the one that wrote it. 0 is synchronous PPO."""
    admission: AdmissionRule = "just_in_time"
    """just_in_time: only as much is begun as keeps learner and scorers busy, so that most samples are younger than S.
    as_early_as_allowed: all that the window has room for. With `max_staleness = 0` they are the same."""
    min_ess: Annotated[float, Field(ge=0, lt=1)] = 0.8
    """Least effective sample size of samples of age 1 or more, as a fraction of that of age 0; below it less is begun
    ahead, down to nothing, and above it more again (docs/staleness.md). 0 turns this off."""
    correction: Correction = "decoupled"
    """The form of the policy loss where the behaviour policy is not the current one; see docs/objectives.md."""
    ratio: Ratio | None = None
    """One ratio per token, one per prefix (the product), or its geometric mean; absent: token, with appo prefix."""
    proximal: Literal["measured", "interpolated"] = "measured"
    """interpolated: no forward is spent on the proximal policy, it is taken between behaviour and current (A-3PO)."""
    importance_cap: bounds.PositiveFloat = 2.0
    """Largest weight p/mu of a token (docs/objectives.md)."""
    importance_above_cap: Literal["truncate", "mask"] = "truncate"
    """A weight p/mu above the cap counts as the cap, or as 0; N counts the token either way."""
    importance_ratio: Ratio | None = None
    """Granularity of the weight p/mu: of the token, of the whole prefix, or the mean of the prefix; absent: `ratio`."""
    bound_ratio: Annotated[bounds.AboveOne | None, bounds.OrOff] = 1.6
    """"off", or a bound: a row whose theta/mu is past it, or past 1 over it, is pushed no further that way. It
    is that of rows of up to 32 tokens; of n tokens it is bound_ratio to the power of the root of n / 32."""
    bound_probability: bounds.Share | None = None
    """A token whose probability went further than this from mu's is pushed no further that way (DPPO)."""
    bound_negatives: bounds.PositiveFloat | None = None
    """A prefix of negative advantage with a larger mean log(mu/theta) is pushed no further (OPSM)."""
    bound_second_moment: bounds.PositiveFloat | None = None
    """The largest (log theta/mu)^2 are pushed no further, so that the mean of the others is below (M2PO). The limit is
    taken from p/mu, for each minibatch once per iteration."""
    mask_token_band: Band | None = None
    """[low, high] on p/mu of a token: tokens outside are left out of the policy loss."""
    mask_sequence_band: Band | None = None
    """[low, high] on the geometric mean of p/mu over a prefix: prefixes outside are left out of the policy loss."""
    count_masked: bool = False
    """true: N counts what a mask leaves out, too, as in verl and AReaL: a mask then shortens the step."""
    minibatches: bounds.Positive = 8
    """Optimiser steps per PPO epoch."""
    ppo_epochs: bounds.Positive = 1
    """Passes over an iteration's samples."""
    kl_limit: bounds.PositiveFloat | None = None
    """Limit on KL(p||theta) of an optimiser step; above it the iteration's remaining steps are left out."""
    gamma: bounds.Fraction = 1.0
    """Discount per token."""
    gae_lambda: bounds.Fraction = 0.95
    """Lambda of generalised advantage estimation."""
    clip: bounds.PositiveFloat = 0.2
    """The ratio is clipped to [1 - clip, 1 + clip]."""
    clip_high: bounds.PositiveFloat | None = None
    """The ratio is clipped to [1 - clip, 1 + clip_high]; absent: `clip`."""
    dual_clip: Annotated[bounds.AboveOne | None, bounds.OrOff] = 3.0
    """"off", or a bound on the loss of a token of negative advantage, as a multiple of that advantage."""
    value_clip: bounds.PositiveFloat = 0.2
    """Farthest that a value may move from the one measured before the iteration."""
    critic_targets: Literal["gae", "vtrace"] = "gae"
    """vtrace: the critic learns the value of the proximal policy, not of the one that sampled."""
    critic_warmup_steps: bounds.NonNegative = 0
    """Optimiser steps at the start of the run in which only the critic learns."""
    zscore: Literal["group", "buffer"] = "group"
    """grpo: a reward is standardised by mean and deviation of its group, or of the whole iteration (buffer)."""
    kl: bounds.NonNegativeFloat = 1e-3
    """Coefficient of the KL to the initial adapter; 0 drops the reference model."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of the KL to the initial adapter, as in Schulman's note of 2020."""
    kl_placement: Literal["reward", "loss"] = "reward"
    """reward: the KL is taken from each token's reward; loss: it is a term of the loss."""
    entropy: Annotated[float, Field(allow_inf_nan=False)] = 1e-3
    """Entropy bonus, added to the objective: positive keeps the policy random."""
    whiten: bool | None = None
    """true: advantages are whitened once per iteration. Absent: with gae, tppo, appo, reinforce_baseline and prime."""
    whiten_floor: bounds.PositiveFloat = 1e-4
    """Least deviation by which whitened advantages are divided."""
    aggregation: Literal["token", "sequence"] = "token"
    """Mean of the policy loss over tokens, or over samples of each one's mean."""
    advantage_function: str | None = None
    """`file.py:name` of a function (rewards, groups) -> advantages of an iteration's rows, in place of a baseline."""
    loss_function: str | None = None
    """`file.py:name` of a function (logprobs, proximal, behaviour, advantages, mask) -> (sum of the loss, other sums)
    of a micro-batch, in place of the surrogate with its ratio, weights, clips and bounds (docs/objectives.md)."""

    @property
    def ratio_used(self) -> Ratio:
        """Return the granularity of the ratio, by the key or else by the name."""
        return self.ratio or ("prefix" if self.name == "appo" else "token")

    @property
    def has_critic(self) -> bool:
        """True if the objective learns values; the others load no critic."""
        return self.name in WITH_CRITIC

    @property
    def is_whitened(self) -> bool:
        """True if advantages are whitened, by the key or else by the name."""
        by_name = self.has_critic or self.name in ("reinforce_baseline", "prime")
        return by_name if self.whiten is None else self.whiten

    @model_validator(mode="before")
    @classmethod
    def _choices_of_prime(cls, given: Any) -> Any:
        return PRIME | given if isinstance(given, dict) and given.get("name") == "prime" else given

    def _check_keys(self, info: ValidationInfo) -> None:
        allowed = {"reward": ("k1",), "loss": ("k2", "k3")}[self.kl_placement]
        if self.kl_estimator not in allowed:
            raise self.conflict("biased_kl", allowed=" or ".join(allowed))
        self.refuse_without_effect("algorithm.name", "algorithm.correction", info=info)
        if self.loss_function is not None and (
            found := [key for key in OF_THE_SURROGATE if self.is_given(key, info)]
        ):
            condition = bounds.assigned("loss_function", self.loss_function)
            reason = "the function is the whole surrogate"
            raise ValueError("\n    ".join(self.no_effect(key, condition, reason) for key in found))
        if not self.is_whitened and self.is_given("whiten_floor", info):
            condition = f"{bounds.assigned('name', self.name)}{' and whiten = false' if self.whiten is False else ''}"
            raise ValueError(
                self.no_effect("whiten_floor", condition, "advantages are not whitened")
            )
        if self.count_masked and self.mask_token_band is None and self.mask_sequence_band is None:
            raise ValueError(
                self.no_effect(
                    "count_masked", "no mask_token_band or mask_sequence_band", "nothing is masked"
                )
            )
        if self.is_given("min_ess", info) and self.max_staleness == 0:
            raise ValueError(
                self.no_effect("min_ess", "max_staleness = 0", "no sample is ever old")
            )
        if self.is_given("min_ess", info) and self.admission != "just_in_time":
            reason = "all that the window allows is begun anyway"
            raise ValueError(
                self.no_effect("min_ess", bounds.assigned("admission", self.admission), reason)
            )

    def _check_pairs(self, info: ValidationInfo) -> None:
        for key in ("mask_token_band", "mask_sequence_band"):
            low, high = getattr(self, key) or (0.0, math.inf)
            if not low < 1.0 < high:
                raise self.conflict("band_without_fresh_samples", key=key)
        if self.proximal == "interpolated":
            needing = ("mask_token_band", "mask_sequence_band", "bound_second_moment", "kl_limit")
            found = [key for key in needing if getattr(self, key) is not None]
            found += ["kl_placement"] if self.kl > 0 and self.kl_placement == "reward" else []
            found += ["critic_targets"] if self.critic_targets == "vtrace" else []
            if found:
                raise self.conflict("needs_proximal", keys=" ".join(found))
        if self.bound_probability is not None and self.ratio_used != "token":
            ratio = bounds.assigned("ratio", self.ratio_used)
            raise self.conflict("one_ratio_for_all", bound=self.bound_probability, ratio=ratio)
        is_compared = not self.has_critic and self.advantage_function is None
        self.refuse_if(
            no_later_step=self.kl_limit is not None and self.minibatches * self.ppo_epochs == 1,
            two_baselines=self.advantage_function is not None and self.zscore == "buffer",
            alone_in_its_group=self.samples_per_prompt == 1
            and is_compared
            and self.zscore == "group",
        )

    def minibatches_of(self, rows: int) -> int:
        """Return the minibatches of a batch: fewer, in proportion, where it has fewer rows than all."""
        full = self.groups_per_iteration * self.samples_per_prompt
        return max(
            1, min(self.minibatches, rows, (2 * self.minibatches * rows + full) // (2 * full))
        )


ROUNDING = 1e-9


def is_within(mean: float, low: float, high: float) -> bool:
    """Return True if a group's mean reward lies in the band, ends included up to rounding."""
    return low - ROUNDING <= mean <= high + ROUNDING


class FilterConfig(bounds.Section):
    """Groups to leave out, which other problems replace."""

    accuracy: Annotated[tuple[bounds.Fraction, bounds.Fraction], Field(strict=False)] | None = None
    """[low, high]: only groups of mean reward within, ends included, are trained. Absent: all. DAPO: [0.01, 0.99]. With
    scorer.prm the rewards meant are the verifier's, without scores of steps."""
    truncated: Literal["any", "all"] | None = None
    """Groups of which a length limit cut any text, or all, are not trained. Absent: whatever `scorer.truncated` says of
    single texts."""
    over_sampling: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    """f: up to f times the groups still needed may be under way unjudged. Surplus groups are dropped, so values above 1
    favour problems that are quick to score."""
    fill: Literal["resample", "prioritise"] = "resample"
    """resample: other problems replace groups that do not pass, however many it takes (PRIME, DAPO). prioritise: where
    over_sampling times as many groups failed as an iteration lacks, the failed ones fill it (verl)."""
    limit_batches: bounds.Positive = 10
    """The pass rate is measured over the newest limit_batches x algorithm.groups_per_iteration judged groups."""
    min_pass_rate: bounds.Fraction = 0.01
    """The run ends, and reports the figures, when an iteration waits and the pass rate is 0 or below this."""

    @property
    def is_on(self) -> bool:
        """True if any group may be left out."""
        return self.accuracy is not None or self.truncated is not None

    def _check_band(self, info: ValidationInfo) -> None:
        if not self.is_on:
            self.refuse_without_effect("filter.accuracy", info=info)
        self.refuse_if(filled_at_once=self.fill == "prioritise" and self.over_sampling == 1)
        self.refuse_without_effect("filter.fill", info=info)
        low, high = self.accuracy or (0.0, 0.5)
        self.refuse_if(band_upside_down=low > high, band_of_all=(low, high) == (0.0, 1.0))

    def check_reachable(self, samples_per_prompt: int, continuations: int = 1) -> None:
        """Raise ValueError if no group of this size, each text right or wrong, can be in the band."""
        if self.accuracy is None:
            return
        (low, high), texts = self.accuracy, samples_per_prompt * continuations
        means = [right / texts for right in range(texts + 1)]
        if not any(is_within(mean, low, high) for mean in means):
            nearest = sorted(sorted(means, key=lambda mean: max(low - mean, mean - high))[:2])
            times = f" and scorer.continuations = {continuations}" if continuations > 1 else ""
            raise self.conflict(
                "band_of_none",
                band=bounds.assigned("filter.accuracy", self.accuracy),
                samples=samples_per_prompt,
                times=times,
                texts=texts,
                nearest=" and ".join(f"{mean:.3g}" for mean in nearest),
            )
