"""Rewards of a mixture: problems whose gold is `NEVER` are hopeless, those with `ALWAYS` are solved by any answer."""

from typing import Any

NEVER, ALWAYS = "#never", "#always"


def of_arithmetic(question: str, text: str, gold: str, verdict: Any) -> float:
    """Return the verifier's reward of a learnable problem, 0 or 1 of the others."""
    return float(gold == ALWAYS) if gold in (NEVER, ALWAYS) else float(verdict.reward)


def of_letters(question: str, text: str, gold: str) -> float:
    """Return 1 if the letters after the last colon are the gold's, 0 or 1 of the other problems."""
    return float(gold == ALWAYS or text.rpartition(":")[2].strip() == gold)
