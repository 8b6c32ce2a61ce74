"""DAPO's punishment of over-long answers (Yu et al. 2025, arXiv 2503.14476, equation 13), beside the verdict.

    [reward]
    function = ".../overlong.py:clipped"

The paper's reward is 1 for a right answer and -1 for a wrong one, less the punishment. Rewards here
are from 0 to 1: `clipped` subtracts half of the punishment and stops at 0, `scaled` shifts and
scales the paper's reward. Both take `finish`, so that direct mode hands them cut answers, too. Not
measured here.
"""

from typing import Any

MOST_TOKENS = 2048
"""The run's limit: rollout.answer_tokens in direct mode, scorer.max_new_tokens in prefix mode."""
CACHE_TOKENS = 512
"""Tokens before the limit over which the punishment grows from 0 to 1."""


def punishment(tokens: int, finish: str) -> float:
    """Return 0 up to the cache, 1 at the limit and for a cut answer, and what lies between in proportion."""
    if finish == "length":
        return 1.0
    return min(1.0, max(0.0, (tokens - (MOST_TOKENS - CACHE_TOKENS)) / CACHE_TOKENS))


def _right(verdict: Any) -> float:
    # An exception leaves the row out of training: a verifier that failed is no wrong answer.
    if verdict.status == "error":
        raise ValueError(verdict.extracted)
    return float(verdict.reward)


def clipped(
    question: str, text: str, gold: str, verdict: Any, tokens: int, finish: str
) -> dict[str, float]:
    """Reward 1 for a short right answer, half of it for one at the limit, 0 for every wrong one."""
    right, much = _right(verdict), punishment(tokens, finish)
    return {"reward": max(0.0, right - much / 2), "right": right, "punishment": much}


def scaled(
    question: str, text: str, gold: str, verdict: Any, tokens: int, finish: str
) -> dict[str, float]:
    """Reward 1 and 2/3 for a right answer that is short or at the limit, 1/3 and 0 for a wrong one."""
    right, much = _right(verdict), punishment(tokens, finish)
    return {"reward": (1 + 2 * right - much) / 3, "right": right, "punishment": much}
