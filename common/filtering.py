"""The `[filter]` section: which groups are worth training, and how many more to sample for it (docs/window.md)."""

from typing import Annotated

from pydantic import Field, ValidationInfo, model_validator

from prefixrl.common.section import Fraction, Positive, Section

ROUNDING = 1e-9


def is_within(mean: float, low: float, high: float) -> bool:
    """Whether a group's mean reward lies in the band, both ends included; a sum of rounded rewards may miss an end."""
    return low - ROUNDING <= mean <= high + ROUNDING


class FilterConfig(Section):
    accuracy: Annotated[tuple[Fraction, Fraction], Field(strict=False)] | None = None
    """[low, high]: only groups whose mean reward lies within, both ends included, are trained; no filter when absent.
    DAPO's "neither all right nor all wrong" is [0.01, 0.99]."""
    over_sampling: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    """f: so many times the groups still needed may be under way unjudged. Those that come too late for it are given up, so that
    above 1 problems that are quick to score are favoured."""
    limit_batches: Positive = 10
    """The pass rate is taken over the newest limit_batches x algorithm.groups_per_iteration judged groups."""
    min_pass_rate: Fraction = 0.01
    """The run ends, with the figures, when an iteration waits and the pass rate is 0 or below this."""

    @model_validator(mode="after")
    def _band(self) -> "FilterConfig":
        if self.accuracy is None:
            return self
        low, high = self.accuracy
        if low > high:
            raise ValueError(f"accuracy = [{low:g}, {high:g}]: the low end is above the high end")
        if (low, high) == (0.0, 1.0):
            raise ValueError(
                "accuracy = [0, 1] lets every group pass; leave it out, or narrow it: [0.01, 0.99] keeps groups that are "
                "neither all right nor all wrong"
            )
        return self

    @model_validator(mode="after")
    def _keys_with_effect(self, info: ValidationInfo) -> "FilterConfig":
        if self.accuracy is not None:
            return self
        for key in ("over_sampling", "limit_batches", "min_pass_rate"):
            if self.is_given(key, bool(info.context)):
                raise ValueError(
                    f"{key} = {getattr(self, key):g} with accuracy absent: without a filter every group is trained and nothing "
                    f"needs making good; leave {key} out, or give filter.accuracy, for example [0.01, 0.99]"
                )
        return self

    def check_reachable(self, samples_per_prompt: int, continuations: int = 1) -> None:
        """Raise ValueError when no group of so many rows and texts per row, each right or wrong, has a mean in the band."""
        if self.accuracy is None:
            return
        low, high = self.accuracy
        texts = samples_per_prompt * continuations
        means = [right / texts for right in range(texts + 1)]
        if not any(is_within(mean, low, high) for mean in means):
            near = sorted(means, key=lambda mean: max(low - mean, mean - high))[:2]
            nearest = " and ".join(f"{mean:.3g}" for mean in sorted(near))
            times = f" and scorer.continuations = {continuations}" if continuations > 1 else ""
            raise ValueError(
                f"filter.accuracy = [{low:g}, {high:g}] with algorithm.samples_per_prompt = {samples_per_prompt}{times}: no "
                f"group can pass, its mean reward is one of 0/{texts} ... {texts}/{texts}; the nearest are {nearest}; widen "
                "the band or sample more per prompt"
            )
