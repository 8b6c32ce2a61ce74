"""Length of a run's prompts before it begins: measured by the tokenizer, else guessed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prefixrl.common.config.run import RunConfig
from prefixrl.learner.data.rows import Problem

if TYPE_CHECKING:
    from prefixrl.common.prompts.rendering import Renderer

RENDERED = 128
"""Most questions that are rendered: a mean of so many is near enough, and takes a moment."""
TOKEN_CHARS, TEMPLATE_TOKENS = 3, 48
"""Guess without a tokenizer: characters per token of a question, and tokens of the chat template around it."""


@dataclass(frozen=True)
class PromptLength:
    """Mean length of a prompt, and the words that say where it is from."""

    tokens: int
    text: str


def prompt_length(config: RunConfig, problems: Sequence[Problem], renderer: "Renderer | None") -> PromptLength:
    """Return the mean length of the training prompts.

    Args:
        problems: as often as the run asks them.
        renderer: that of the rollouts; None where the adapter's tokenizer is not on this host.
    """
    if config.rollout.engine == "simulated":
        # Its tokens are the bytes of a question (`ByteRenderer`).
        return _measured([len(each.question.encode()) for each in problems])
    if renderer is None:
        return _guessed(config, problems)
    found = [size for each in spread(problems) if (size := _rendered_tokens(renderer, each)) is not None]
    if not found:
        most = config.rollout.max_prompt_tokens
        return PromptLength(most, f"prompts of {most} tokens: those tried are over rollout.max_prompt_tokens = {most}")
    return _measured(found)


def spread(problems: Sequence[Problem]) -> list[Problem]:
    """Return at most `RENDERED` problems, evenly spread from the shortest to the longest."""
    by_length = sorted(problems, key=_chars)
    count = min(len(by_length), RENDERED)
    # From the middle of each of `count` equal parts, so that no end counts twice.
    return [by_length[(2 * part + 1) * len(by_length) // (2 * count)] for part in range(count)]


def _chars(problem: Problem) -> int:
    return len(problem.question) + len(problem.system)


def _rendered_tokens(renderer: "Renderer", problem: Problem) -> int | None:
    """Return the length of one prompt; None for one that is too long to be asked in the run."""
    try:
        return int(renderer.prompt(problem.question, problem.system).size)
    except ValueError:
        return None


def _measured(lengths_tokens: list[int]) -> PromptLength:
    tokens = math.ceil(sum(lengths_tokens) / len(lengths_tokens))
    return PromptLength(tokens, f"prompts of about {tokens} tokens")


def _guessed(config: RunConfig, problems: Sequence[Problem]) -> PromptLength:
    chars = sum(map(_chars, problems)) / len(problems)
    chars += sum(len(text or "") for text in (config.adapter.prompt_template, config.adapter.system))
    tokens = min(config.rollout.max_prompt_tokens, math.ceil(chars / TOKEN_CHARS) + TEMPLATE_TOKENS)
    why = "guessed from their characters: the adapter's tokenizer is not on this host"
    return PromptLength(tokens, f"prompts of {tokens} tokens, {why}")
