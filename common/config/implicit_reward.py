"""The `[implicit_reward]` section: rewards of tokens by a model that learns the outcomes."""

from typing import Annotated, Literal

from pydantic import Field

from prefixrl.common.config.section import Fraction, NonNegativeFloat, PositiveFloat, Section


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

    def check_discounts(self, objective: str, has_critic: bool, leaves_one_out: bool) -> None:
        """Raise ValueError for keys that the objective has no use for."""
        condition = f'algorithm.name = "{objective}"'
        reasons: dict[str, str] = {}
        if has_critic:
            reason = "the critic's returns are discounted by algorithm.gamma"
            reasons |= {"gamma": reason, "outcome_gamma": reason}
        if not leaves_one_out:
            reasons["baseline"] = "it leaves nothing out of its baseline"
        sentences = [
            f"implicit_reward.{self.no_effect(key, condition, reason)}"
            for key, reason in reasons.items()
            if self.is_given(key)
        ]
        if sentences:
            raise ValueError("\n  ".join(sentences))
