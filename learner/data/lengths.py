"""Find questions that cannot be asked before the run starts: too long, or with tokens that no model may read."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from prefixrl.common.config.prompting import ModelConfig
from prefixrl.common.config.run import RunConfig
from prefixrl.common.host.hub import model_folder
from prefixrl.common.prompts.limits import SpecialTexts, doubtful_texts, most_prompt_tokens
from prefixrl.learner.data.rows import Problem, text_of

TEMPLATE_TOKENS = 256
"""Room for a chat template. A question takes at most a token per byte: short ones fit in any case."""


def unaskable(problems: Sequence[Problem], config: RunConfig) -> dict[str, str]:
    """Return reasons by prompt id, for the tokenizers of the models that are on this host."""
    reasons: dict[str, str] = {}
    for role, limit, model in _renderings(config):
        # A token is at least a byte of the text around a question, too.
        advice = _longest_advice(config) if role == "scorer" else ""
        around = min(TEMPLATE_TOKENS, limit // 4) + sum(
            len((text or "").encode()) for text in (model.system, model.prompt_template, advice)
        )
        doubtful = (
            doubtful_texts(model.model)
            if config.data.special_tokens == "refuse"
            else SpecialTexts(())
        )
        suspects = [
            each
            for each in problems
            if len(text_of(each).encode()) + 16 * len(each.earlier) + around > limit
            or doubtful is None
            or doubtful.within(text_of(each))
        ]
        if suspects:
            # Late: few runs have such questions.
            from prefixrl.common.prompts.rendering import renderer_of

            renderer = renderer_of(config, role, model_folder(model.model, needs_weights=False))
        for problem in suspects:
            try:
                renderer.prompt(problem.question, problem.system, problem.earlier, advice)
            except ValueError as error:
                reasons.setdefault(problem.prompt_id, str(error))
    return reasons


def _renderings(
    config: RunConfig,
) -> Iterator[tuple[Literal["rollout", "scorer"], int, ModelConfig]]:
    """Yield role, limit and model of everything that renders prompts with a tokenizer."""
    if config.rollout.has_tokenizer:
        yield "rollout", most_prompt_tokens(config, "rollout"), config.adapter
    if (
        config.target is not None
        and Path(config.target.model).is_dir()
        and config.scorer.has_tokenizer
    ):
        yield "scorer", most_prompt_tokens(config, "scorer"), config.target


def _longest_advice(config: RunConfig) -> str:
    """Return a text as long as the longest advice, a token a word; "" without advice."""
    return " a" * config.max_sampled_tokens if config.has_advice else ""
