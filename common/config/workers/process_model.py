"""The `[scorer.prm]` section: a process reward model that scores the steps of an answer."""

import json
from typing import Annotated, Literal

from pydantic import Field

from prefixrl.common.config.section import Fraction, OnlyWith, Positive, Section, Share
from prefixrl.common.config.workers.engines import EngineOfStepModels, engine_record
from prefixrl.common.wire.messages.groups import MOST_STEPS
from prefixrl.common.wire.verdicts import Aggregate

TAG, STEP = "{tag}", "{step}"
"""Places in `step_form`."""
_TAGS = {"step_tag": "ки", "two_class": "<extra_0>"}
_FORMS = {"step_tag": "{step} {tag}\n", "two_class": "{step}{tag}"}
_SEPARATORS = {"step_tag": "\n", "two_class": "\n\n"}
_SUM_ROUNDING = 1e-9
USUAL_SHARE = 0.3
"""vLLM's share of the device: the target has most of it."""

NotEmpty = Annotated[str, Field(min_length=1)]

_WITH_FORMAT: OnlyWith = {
    "good_token": (("step_tag",), "the head has classes, not tokens"),
    "bad_token": (("step_tag",), "the head has classes, not tokens"),
    "good_class": (("two_class",), "the score is that of good_token"),
    "system": (("two_class",), "the prompt is no conversation"),
}
_WITH_PLACEMENT: OnlyWith = {"aggregate": (("row",), "every score is a reward of its own")}


class ProcessModelConfig(Section):
    """A frozen model that scores every step of an answer, loaded by each scorer."""

    model: str
    """The process reward model: a Hugging Face folder or hub name, the same on all scorers."""
    format: Literal["step_tag", "two_class"]
    """step_tag: a causal model whose next token after the tag is good_token or bad_token (Math-Shepherd, OpenR).
    two_class: a model with a head of two classes at the tag, asked in its chat template (Qwen2.5-Math-PRM)."""
    step_tag: NotEmpty | None = None
    """Text behind each step, one token of the model. Absent: "ки" with step_tag, "<extra_0>" with two_class."""
    step_form: NotEmpty | None = None
    """A step as the model reads it, with the places {step} and {tag}. Absent: a space before the tag and a line break
    after it with step_tag, nothing with two_class."""
    good_token: int | NotEmpty = "+"
    """Token after the tag of a good step, as id or as text that is one token of the model."""
    bad_token: int | NotEmpty = "-"
    """Token after the tag of a bad step."""
    good_class: Literal[0, 1] = 1
    """Number of the head's class of good steps."""
    system: str | None = None
    """The system's turn. Absent: none, or what the chat template has itself."""
    separator: NotEmpty | None = None
    """Text between two steps of an answer. Absent: a line break with step_tag, an empty line with two_class."""
    most_steps: Annotated[int, Field(gt=0, le=MOST_STEPS)] = 256
    """Most steps of an answer; what follows belongs to the last one."""
    aggregate: Aggregate = "last"
    """One score from those of all steps; an answer without steps has 0."""
    placement: Literal["row", "step"] = "row"
    """row: that one score is a part of the row's reward. step: every score is a reward of the token that ends its step,
    with a baseline of its own; only in direct mode."""
    coefficient: Fraction = 1.0
    """Weight of that score, or of the scores of steps, beside the verdict."""
    outcome_coefficient: Fraction = 0.0
    """Weight of the verifier's verdict; both weights together are at most 1, as rewards are."""
    engine: EngineOfStepModels = "transformers"
    """Engine of this model; the target's is another one."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the transformers engine; auto is CUDA where there is one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of the weights; auto is that of the folder."""
    max_tokens: Positive = 4096
    """Longest question with its answer and tags; an answer beyond it gets no verdict, which is counted."""
    batch_tokens: Positive = 16384
    """Most tokens of one forward, padding included; a longer text is a forward of its own."""
    gpu_memory_utilization: Share | None = None
    """vLLM's share of the device for this model. Absent: 0.3."""

    @property
    def device_share(self) -> float | None:
        """Share of the device that the engine takes at its start; None for an engine that takes what it needs."""
        if engine_record(self.engine).memory is None:
            return None
        return self.gpu_memory_utilization or USUAL_SHARE

    @property
    def tag(self) -> str:
        """The text of the tag."""
        return self.step_tag or _TAGS[self.format]

    @property
    def form(self) -> str:
        """The text of a step, with its places."""
        return self.step_form or _FORMS[self.format]

    @property
    def between(self) -> str:
        """The text between two steps of an answer."""
        return self.separator or _SEPARATORS[self.format]

    def _check_scores(self) -> None:
        self.refuse_without_effect({"format": _WITH_FORMAT, "placement": _WITH_PLACEMENT})
        if self.gpu_memory_utilization is not None and self.device_share is None:
            condition = f'engine = "{self.engine}"'
            reason = "it takes no share of the device at its start"
            raise ValueError(
                self.no_effect("gpu_memory_utilization", condition, reason)
                + ', or use engine = "vllm"'
            )
        self.refuse_if(
            self.coefficient == 0,
            "coefficient",
            "the process reward model would be without effect; leave [scorer.prm] out",
        )
        self.refuse_if(
            self.coefficient + self.outcome_coefficient > 1 + _SUM_ROUNDING,
            "coefficient outcome_coefficient",
            "together they exceed 1, the largest reward; divide both by their sum",
        )
        has_both_once = self.form.count(TAG) == 1 and self.form.count(STEP) == 1
        self.refuse_if(
            not has_both_once or self.form.index(STEP) > self.form.index(TAG),
            "step_form",
            f"it needs {STEP} once and {TAG} once behind it, for example "
            f"{json.dumps(_FORMS[self.format])}",
        )
        self.refuse_if(
            self.format == "step_tag" and self.good_token == self.bad_token,
            "good_token bad_token",
            "every step would have the same score; name both tokens",
        )
