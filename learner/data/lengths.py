"""Which questions no prompt has room for: told before the run begins, not by a worker in the middle of it."""

from collections.abc import Callable, Sequence
from pathlib import Path

from prefixrl.common.config import RunConfig
from prefixrl.common.hub import model_folder
from prefixrl.learner.data.rows import Problem

TEMPLATE_TOKENS = 256
"""Room for a chat template. A question takes at most a token per byte, so that a shorter one needs no tokenizer to be told."""


def too_long(problems: Sequence[Problem], config: RunConfig) -> dict[str, str]:
    """Reasons by prompt id, for the adapter's tokenizer and, where the target is on this host, for the target's."""
    limits = [
        (role, limit, model)
        for role, limit, model in _renderings(config)
        if any(_may_be_too_long(each, limit) for each in problems)
    ]
    found: dict[str, str] = {}
    for role, limit, model in limits:
        objection = _objection(model, limit)
        for problem in problems:
            if problem.prompt_id not in found and _may_be_too_long(problem, limit):
                said = objection(problem.question)
                if said is not None:
                    found[problem.prompt_id] = f"{said} ({role}.max_prompt_tokens)"
    return found


def _renderings(config: RunConfig) -> list[tuple[str, int, str]]:
    """Role, limit and model of everything that renders prompts of this run by a tokenizer."""
    found = []
    if config.rollout.engine != "simulated":
        found.append(("rollout", config.rollout.max_prompt_tokens, config.adapter.model))
    is_here = config.target is not None and Path(config.target.model).is_dir()
    if config.target is not None and is_here and config.scorer.engine != "simulated":
        found.append(("scorer", config.scorer.max_prompt_tokens, config.target.model))
    return found


def _may_be_too_long(problem: Problem, limit: int) -> bool:
    return len(problem.question.encode()) + TEMPLATE_TOKENS > limit


def _objection(model: str, limit: int) -> Callable[[str], str | None]:
    from prefixrl.common.rendering import Renderer

    renderer = Renderer(model_folder(model, needs_weights=False), limit)

    def objection(question: str) -> str | None:
        try:
            renderer.prompt(question)
        except ValueError as error:
            return str(error)
        return None

    return objection
