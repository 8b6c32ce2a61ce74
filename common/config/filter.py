"""The `[filter]` section: the groups that are trained, and over-sampling (docs/window.md)."""

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, model_validator

from prefixrl.common.config.section import Fraction, OnlyWith, Positive, Section

ROUNDING = 1e-9

_NO_FILTER = ([0.01, 0.99],), "without a filter every group is trained and none has to be replaced"
_ONLY_WITH_FILTER: OnlyWith = dict.fromkeys(("over_sampling", "fill", "limit_batches", "min_pass_rate"), _NO_FILTER)
_ONLY_RESAMPLED: OnlyWith = dict.fromkeys(
    ("limit_batches", "min_pass_rate"),
    (("resample",), "groups that fail fill an iteration, so that none waits for ever"),
)


def is_within(mean: float, low: float, high: float) -> bool:
    """Return True if a group's mean reward lies in the band, ends included up to rounding."""
    return low - ROUNDING <= mean <= high + ROUNDING


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

    @model_validator(mode="after")
    def _band(self, info: ValidationInfo) -> "FilterConfig":
        if not self.is_on and (useless := self.without_effect(_ONLY_WITH_FILTER, "accuracy", None, info)):
            raise ValueError("\n    ".join(useless))
        if self.fill == "prioritise" and self.over_sampling == 1:
            raise ValueError(
                "fill = 'prioritise' with over_sampling = 1: groups that fail would be trained as without a filter; "
                "raise over_sampling, or use fill = 'resample'"
            )
        useless = self.without_effect(_ONLY_RESAMPLED, "fill", self.fill, info)
        if useless:
            raise ValueError("\n    ".join(useless))
        if self.accuracy is None:
            return self
        low, high = self.accuracy
        if low > high:
            raise ValueError(f"accuracy = [{low:g}, {high:g}]: the low end is above the high end")
        if (low, high) == (0.0, 1.0):
            raise ValueError(
                "accuracy = [0, 1] lets every group pass; leave it out, or narrow it: [0.01, 0.99] keeps groups that "
                "are neither all right nor all wrong"
            )
        return self

    def check_reachable(self, samples_per_prompt: int, continuations: int = 1) -> None:
        """Raise ValueError if no group of this size, each text right or wrong, can be in the band."""
        if self.accuracy is None:
            return
        (low, high), texts = self.accuracy, samples_per_prompt * continuations
        means = [right / texts for right in range(texts + 1)]
        if not any(is_within(mean, low, high) for mean in means):
            near = sorted(means, key=lambda mean: max(low - mean, mean - high))[:2]
            nearest = " and ".join(f"{mean:.3g}" for mean in sorted(near))
            times = f" and scorer.continuations = {continuations}" if continuations > 1 else ""
            raise ValueError(
                f"filter.accuracy = [{low:g}, {high:g}] with algorithm.samples_per_prompt = {samples_per_prompt}"
                f"{times}: no group can pass, its mean reward is one of 0/{texts} ... {texts}/{texts}; the nearest are "
                f"{nearest}; widen the band or sample more per prompt"
            )
