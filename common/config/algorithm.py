"""The `[algorithm]` section: objective, options and their conflicts (docs/objectives.md)."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, WithJsonSchema, model_validator

from prefixrl.common.config.objectives import (
    KEY_RULES,
    OBJECTIVES,
    ObjectiveRecord,
    checked_objective,
    names_with,
    objective_record,
)
from prefixrl.common.config.section import (
    AboveOne,
    Fraction,
    NonNegative,
    NonNegativeFloat,
    OnlyWith,
    OrOff,
    Positive,
    PositiveFloat,
    Section,
    assigned,
)
from prefixrl.common.errors import ConfigError

Correction = Literal["decoupled", "behaviour", "none"]
Ratio = Literal["token", "prefix", "prefix_mean"]
AdmissionRule = Literal["just_in_time", "as_early_as_allowed"]

OF_THE_SURROGATE = (
    "correction",
    "ratio",
    "clip",
    "clip_high",
    "dual_clip",
    "importance_cap",
    "importance_above_cap",
    "importance_ratio",
    "bound_ratio",
)
"""Keys that have no effect with a loss function of the user's own."""

WITH_CORRECTION: OnlyWith = dict.fromkeys(
    ("importance_cap", "importance_above_cap", "importance_ratio"),
    (("decoupled",), "the others have no weight p/mu"),
)

BOUND_TOKENS = 32
"""Longest row on which `bound_ratio` is the bound itself; all rows that it was measured on are
shorter."""


Name = Annotated[
    str,
    AfterValidator(checked_objective),
    WithJsonSchema({"anyOf": [{"enum": list(OBJECTIVES)}, {"type": "string"}]}),
]


class AlgorithmConfig(Section):
    """The objective, the window of versions, and the steps of an iteration."""

    name: Name = "gae"
    """The objective: a built-in one (docs/objectives.md), or that of an installed package."""
    groups_per_iteration: Positive = 512
    """Problems of an iteration; each has a group of samples."""
    samples_per_prompt: Positive = 8
    """Samples of a group."""
    iterations: Positive | None = None
    """Iterations of the run; exclusive with `data.epochs`."""
    max_staleness: NonNegative = 2
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
    importance_cap: PositiveFloat = 2.0
    """Largest weight p/mu of a token (docs/objectives.md)."""
    importance_above_cap: Literal["truncate", "mask"] = "truncate"
    """A weight p/mu above the cap counts as the cap, or as 0; N counts the token either way."""
    importance_ratio: Ratio | None = None
    """Granularity of the weight p/mu: of the token, of the whole prefix, or the mean of the prefix; absent: `ratio`."""
    bound_ratio: Annotated[AboveOne | None, OrOff] = 1.6
    """"off", or a bound: a row whose theta/mu is past it, or past 1 over it, is pushed no further that way. It
    is that of rows of up to 32 tokens; of n tokens it is bound_ratio to the power of the root of n / 32."""
    minibatches: Positive = 8
    """Optimiser steps per PPO epoch."""
    ppo_epochs: Positive = 1
    """Passes over an iteration's samples."""
    kl_limit: PositiveFloat | None = None
    """Limit on KL(p||theta) of an optimiser step; above it the iteration's remaining steps are left out."""
    gamma: Fraction = 1.0
    """Discount per token."""
    gae_lambda: Fraction = 0.95
    """Lambda of generalised advantage estimation."""
    clip: PositiveFloat = 0.2
    """The ratio is clipped to [1 - clip, 1 + clip]."""
    clip_high: PositiveFloat | None = None
    """The ratio is clipped to [1 - clip, 1 + clip_high]; absent: `clip`."""
    dual_clip: Annotated[AboveOne | None, OrOff] = 3.0
    """"off", or a bound on the loss of a token of negative advantage, as a multiple of that advantage."""
    value_clip: PositiveFloat = 0.2
    """Farthest that a value may move from the one measured before the iteration."""
    critic_warmup_steps: NonNegative = 0
    """Optimiser steps at the start of the run in which only the critic learns."""
    zscore: Literal["group", "buffer", "parts"] = "group"
    """grpo: a reward is standardised by mean and deviation of its group, or of the whole iteration (buffer). parts:
    each part with a weight in reward.weights by those of its group, then their weighted sum by those of the iteration
    (GDPO)."""
    kl: NonNegativeFloat = 1e-3
    """Coefficient of the KL to the initial adapter; 0 drops the reference model."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of the KL to the initial adapter, as in Schulman's note of 2020."""
    kl_placement: Literal["reward", "loss"] = "reward"
    """reward: the KL is taken from each token's reward; loss: it is a term of the loss."""
    entropy: Annotated[float, Field(allow_inf_nan=False)] = 1e-3
    """Entropy bonus, added to the objective: positive keeps the policy random."""
    on_collapse: Literal["warn", "raise_entropy", "go_back"] = "warn"
    """Answer to a policy that writes one text, or has lost entropy and reward, before the task is learned, at most
    twice in a run: only an alarm, a four times larger entropy bonus from then on, or the weights of the checkpoint
    before it with half the learning rates. An answer is a line of `changes.jsonl`."""
    whiten: bool | None = None
    """true: advantages are whitened once per iteration. Absent: with gae, tppo, appo, reinforce_baseline and prime."""
    whiten_floor: PositiveFloat = 1e-4
    """Least deviation by which whitened advantages are divided."""
    aggregation: Literal["token", "sequence"] = "token"
    """Mean of the policy loss over tokens, or over samples of each one's mean."""
    advantage_function: str | None = None
    """`file.py:name` of a function (rewards, groups) -> advantages of an iteration's rows, in place of a baseline."""
    loss_function: str | None = None
    """`file.py:name` of a function (logprobs, proximal, behaviour, advantages, mask) -> (sum of the loss, other sums)
    of a micro-batch, in place of the surrogate with its ratio, weights, clips and bounds (docs/objectives.md)."""

    @property
    def record(self) -> ObjectiveRecord:
        """The facts of the objective."""
        record = objective_record(self.name)
        assert record is not None, "a name without a record is refused"
        return record

    @property
    def ratio_used(self) -> Ratio:
        """Return the granularity of the ratio, by the key or else by the objective."""
        return self.ratio or ("prefix" if self.record.is_one_action else "token")

    @property
    def has_critic(self) -> bool:
        """True if the objective learns values; the others load no critic."""
        return self.record.has_critic

    @property
    def is_whitened(self) -> bool:
        """True if advantages are whitened, by the key or else by the objective."""
        return self.record.is_whitened if self.whiten is None else self.whiten

    @property
    def has_function(self) -> bool:
        """True if a function gives the advantages: the user's own, or the objective's."""
        return self.advantage_function is not None or self.record.function is not None

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_objective(cls, document: Any) -> Any:
        """Add the objective's own defaults below the keys that are there."""
        name = document.get("name") if isinstance(document, dict) else None
        record = objective_record(name) if isinstance(name, str) else None
        if record is None:
            return document
        unknown = sorted(record.defaults.keys() - cls.model_fields.keys())
        if unknown:
            raise ConfigError(
                f"the record of the objective {name!r} has defaults of keys that [algorithm] does "
                f"not have: {', '.join(unknown)}; update or uninstall the package that adds it"
            )
        return {**record.defaults, **document}

    def _check_keys(self) -> None:
        allowed = {"reward": ("k1",), "loss": ("k2", "k3")}[self.kl_placement]
        self.refuse_if(
            self.kl_estimator not in allowed,
            "kl_estimator kl_placement",
            "k1 in a loss has no expected gradient, k2 and k3 in a reward are biased; use "
            + " or ".join(allowed),
        )
        by_name: OnlyWith = {
            key: (names_with(key), rule.reason)
            for key, rule in KEY_RULES.items()
            if not rule.has_effect(self.record)
        }
        self.refuse_without_effect({"name": by_name, "correction": WITH_CORRECTION})

    def _check_loss_function(self) -> None:
        if self.loss_function is None:
            return
        condition = assigned("loss_function", self.loss_function)
        sentences = [
            self.no_effect(key, condition, "the function is the whole surrogate")
            for key in OF_THE_SURROGATE
            if self.is_given(key)
        ]
        if sentences:
            raise ValueError("\n    ".join(sentences))

    def _check_conditions(self) -> None:
        if not self.is_whitened:
            condition = assigned("name", self.name)
            condition += " and whiten = false" if self.whiten is False else ""
            self.refuse_given(["whiten_floor"], condition, "advantages are not whitened")
        if self.max_staleness == 0:
            self.refuse_given(["min_ess"], "max_staleness = 0", "no sample is ever old")
        if self.admission != "just_in_time":
            reason = "all that the window allows is begun anyway"
            self.refuse_given(["min_ess"], assigned("admission", self.admission), reason)

    def _check_pairs(self) -> None:
        self.refuse_if(
            self.kl_limit is not None and self.minibatches * self.ppo_epochs == 1,
            "kl_limit minibatches ppo_epochs",
            "an iteration has no later step to leave out; raise minibatches or ppo_epochs, or "
            "leave kl_limit out",
        )
        self.refuse_if(
            self.advantage_function is not None and self.zscore != "group",
            "zscore advantage_function",
            "leave out one of them",
        )
        is_compared = not self.has_critic and not self.has_function and self.zscore != "buffer"
        self.refuse_if(
            self.samples_per_prompt == 1 and is_compared,
            "samples_per_prompt name",
            "the baseline is the group's other rewards, so every advantage would be 0; sample at "
            "least 2 per prompt, or use a name with a critic",
        )

    @property
    def full_rows(self) -> int:
        """Rows of an iteration that has all of its groups."""
        return self.groups_per_iteration * self.samples_per_prompt

    def minibatches_of(self, rows: int) -> int:
        """Return the minibatches of a batch: fewer, in proportion, where it has fewer rows than all."""
        full = self.full_rows
        return max(
            1, min(self.minibatches, rows, (2 * self.minibatches * rows + full) // (2 * full))
        )


ROUNDING = 1e-9


def is_within(mean: float, low: float, high: float) -> bool:
    """Return True if a group's mean reward lies in the band, ends included up to rounding."""
    return low - ROUNDING <= mean <= high + ROUNDING


_WITH_ACCURACY: OnlyWith = dict.fromkeys(
    ("over_sampling", "fill", "limit_batches", "min_pass_rate"),
    (([0.01, 0.99],), "without a filter every group is trained and none has to be replaced"),
)
_WITH_FILL: OnlyWith = dict.fromkeys(
    ("limit_batches", "min_pass_rate"),
    (("resample",), "groups that fail fill an iteration, so that none waits for ever"),
)


class FilterConfig(Section):
    """Groups to leave out, which other problems replace."""

    accuracy: Annotated[tuple[Fraction, Fraction], Field(strict=False)] | None = None
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
    limit_batches: Positive = 10
    """The pass rate is measured over the newest limit_batches x algorithm.groups_per_iteration judged groups."""
    min_pass_rate: Fraction = 0.01
    """The run ends, and reports the figures, when an iteration waits and the pass rate is 0 or below this."""

    @property
    def is_on(self) -> bool:
        """True if any group may be left out."""
        return self.accuracy is not None or self.truncated is not None

    def _check_band(self) -> None:
        if not self.is_on:
            self.refuse_without_effect({"accuracy": _WITH_ACCURACY})
        self.refuse_if(
            self.fill == "prioritise" and self.over_sampling == 1,
            "fill over_sampling",
            "groups that fail would be trained as without a filter; raise over_sampling, or use "
            'fill = "resample"',
        )
        self.refuse_without_effect({"fill": _WITH_FILL})
        low, high = self.accuracy or (0.0, 0.5)
        self.refuse_if(low > high, "accuracy", "the low end is above the high end")
        self.refuse_if(
            (low, high) == (0.0, 1.0),
            "accuracy",
            "every group passes; leave it out, or narrow it: [0.01, 0.99] keeps groups that are "
            "neither all right nor all wrong",
        )

    def check_reachable(self, samples_per_prompt: int, continuations: int = 1) -> None:
        """Raise ValueError if no group of this size, each text right or wrong, can be in the band."""
        if self.accuracy is None:
            return
        low, high = self.accuracy
        texts = samples_per_prompt * continuations
        means = [right / texts for right in range(texts + 1)]
        if any(is_within(mean, low, high) for mean in means):
            return
        nearest = sorted(sorted(means, key=lambda mean: max(low - mean, mean - high))[:2])
        times = f" and scorer.continuations = {continuations}" if continuations > 1 else ""
        raise ValueError(
            f"{assigned('filter.accuracy', self.accuracy)} with algorithm.samples_per_prompt"
            f" = {samples_per_prompt}{times}: no group can pass, its mean reward is one of "
            f"0/{texts} ... {texts}/{texts}; the nearest are "
            f"{' and '.join(f'{mean:.3g}' for mean in nearest)}; widen the band or sample more "
            f"per prompt"
        )
