"""Find questions that are too long for a prompt before the run starts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from prefixrl.common.config.prompting import ModelConfig
from prefixrl.common.config.run import RunConfig
from prefixrl.common.host.hub import model_folder
from prefixrl.learner.data.rows import Problem, text_of

TEMPLATE_TOKENS = 256
"""Room for a chat template. A question takes at most a token per byte: short ones fit in any case."""


def too_long(problems: Sequence[Problem], config: RunConfig) -> dict[str, str]:
    """Return reasons by prompt id, for the tokenizers of the models that are on this host."""
    found: dict[str, str] = {}
    for role, limit, asked in _renderings(config):
        # A token is at least a byte of the text around a question, too.
        around = TEMPLATE_TOKENS + sum(len((text or "").encode()) for text in (asked.system, asked.prompt_template))
        suspects = [each for each in problems if len(text_of(each).encode()) + 16 * len(each.earlier) + around > limit]
        if suspects:
            # Late: few runs have long questions.
            from prefixrl.common.prompts.rendering import renderer_of

            renderer = renderer_of(config, role, model_folder(asked.model, needs_weights=False))
        for problem in suspects:
            try:
                renderer.prompt(problem.question, problem.system, problem.earlier)
            except ValueError as error:
                found.setdefault(problem.prompt_id, f"{error} ({role}.max_prompt_tokens)")
    return found


def _renderings(config: RunConfig) -> list[tuple[Literal["rollout", "scorer"], int, ModelConfig]]:
    """Return role, limit and model of everything that renders prompts with a tokenizer."""
    found: list[tuple[Literal["rollout", "scorer"], int, ModelConfig]] = []
    if config.rollout.engine != "simulated":
        found.append(("rollout", config.rollout.max_prompt_tokens, config.adapter))
    is_here = config.target is not None and Path(config.target.model).is_dir()
    if config.target is not None and is_here and config.scorer.engine != "simulated":
        found.append(("scorer", config.scorer.max_prompt_tokens, config.target))
    return found
