"""Find questions that are too long for a prompt before the run starts."""

from collections.abc import Sequence
from pathlib import Path

from prefixrl.common.config.run import RunConfig
from prefixrl.common.hub import model_folder
from prefixrl.learner.data.rows import Problem

TEMPLATE_TOKENS = 256
"""Room for a chat template. A question takes at most a token per byte: short ones fit in any case."""


def too_long(problems: Sequence[Problem], config: RunConfig) -> dict[str, str]:
    """Return reasons by prompt id, for the tokenizers of the models that are on this host."""
    found: dict[str, str] = {}
    for role, limit, model in _renderings(config):
        suspects = [each for each in problems if len(each.question.encode()) + TEMPLATE_TOKENS > limit]
        if suspects:
            # Late: few runs have long questions.
            from prefixrl.common.engines.rendering import Renderer

            renderer = Renderer(model_folder(model, needs_weights=False), limit)
        for problem in suspects:
            try:
                renderer.prompt(problem.question)
            except ValueError as error:
                found.setdefault(problem.prompt_id, f"{error} ({role}.max_prompt_tokens)")
    return found


def _renderings(config: RunConfig) -> list[tuple[str, int, str]]:
    """Return role, limit and model of everything that renders prompts with a tokenizer."""
    found = []
    if config.rollout.engine != "simulated":
        found.append(("rollout", config.rollout.max_prompt_tokens, config.adapter.model))
    is_here = config.target is not None and Path(config.target.model).is_dir()
    if config.target is not None and is_here and config.scorer.engine != "simulated":
        found.append(("scorer", config.scorer.max_prompt_tokens, config.target.model))
    return found
