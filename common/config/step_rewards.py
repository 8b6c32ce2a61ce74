"""The `[scorer.prm]` section: a process reward model that scores the steps of an answer."""

import json
from typing import Annotated, Literal

from pydantic import Field

from prefixrl.common.config.section import (
    Fraction,
    NonNegativeFloat,
    OnlyWith,
    Positive,
    PositiveFloat,
    Section,
    Share,
)
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
_WITH_ENGINE: OnlyWith = {
    "gpu_memory_utilization": (
        ("vllm",),
        "only vLLM takes a share of the device at its start",
    ),
}


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
    engine: Literal["transformers", "vllm"] = "transformers"
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
    def device_share(self) -> float:
        """Share of the device in vLLM."""
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
        if self.gpu_memory_utilization is not None:
            self.refuse_without_effect({"engine": _WITH_ENGINE})
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


class ImplicitRewardConfig(Section):
    """Rewards of tokens by a causal model that learns the outcomes of rows (PRIME)."""

    model: str | None = None
    """The reward model at the beginning, with the adapter's tokenizer. Absent: the adapter's own folder."""
    reference: Literal["freeze", "policy"] = "freeze"
    """freeze: its log ratio is to a frozen model; policy: to the adapter as it enters the iteration."""
    reference_model: str | None = None
    """The frozen reference. Absent: the reward model as it was at the beginning."""
    beta: PositiveFloat = 0.05
    """Scale of the log ratio in reward and loss."""
    update: Literal["after", "before", "none"] = "after"
    """after: rows are scored, then learned; before: learned, then scored with one forward more; none: only scored."""
    granularity: Literal["token", "whole"] = "token"
    """whole: a row's sum at its last token."""
    norm: Literal["batch_norm", "none"] = "batch_norm"
    """batch_norm: divided by the largest return of the iteration, over all ranks."""
    coefficient: NonNegativeFloat = 1.0
    """Weight of process rewards in the advantage."""
    outcome_coefficient: NonNegativeFloat = 1.0
    """Weight of the outcome."""
    gamma: Fraction = 1.0
    """Discount of process rewards, where the objective has no critic."""
    outcome_gamma: Fraction = 1.0
    """Discount of the outcome back from the last token, where the objective has no critic."""
    baseline: Literal["paper", "code"] = "paper"
    """With leave-one-out: less the mean of the others' mean rewards, or as PRIME's program has it."""
    lr: PositiveFloat = 1e-6
    """Learning rate, constant."""
    grad_clip: Annotated[float, Field(gt=0)] = 10.0
    """Largest gradient norm of a step."""

    def _check_effect(self) -> None:
        self.refuse_if(
            self.coefficient == 0 and self.outcome_coefficient == 0,
            "coefficient outcome_coefficient",
            "no row would have an advantage",
        )
        self.refuse_if(
            self.reference == "policy" and self.reference_model is not None,
            "reference_model reference",
            "the adapter itself is the reference; leave reference_model out, or use "
            'reference = "freeze"',
        )
        is_own_reference = self.reference == "freeze" and self.model == self.reference_model
        self.refuse_if(
            self.update == "none" and is_own_reference,
            "update model reference_model",
            "every reward would be 0; name a trained reward model in `model` and its own "
            'beginning in `reference_model`, or use update = "after"',
        )
