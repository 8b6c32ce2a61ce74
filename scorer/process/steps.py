"""Steps of an answer, where they end in its tokens, and the reward from their score. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """A piece of an answer between two separators, not blank."""

    text: str
    """Without white space around it."""
    end: int
    """Characters of the answer up to its end, without the separator."""


def split(answer: str, separator: str, most: int) -> list[Step]:
    """Return the steps of an answer; the last of `most` steps is all that is left."""
    steps: list[Step] = []
    at = 0
    while at < len(answer):
        found = answer.find(separator, at) if len(steps) < most - 1 else -1
        end = len(answer) if found < 0 else found
        if text := answer[at:end].strip():
            steps.append(Step(text, at + len(answer[at:end].rstrip())))
        at = end + (len(separator) if found >= 0 else 0)
    return steps


def token_ends(pieces: Iterable[str], ends: Sequence[int]) -> tuple[int, ...]:
    """Return the number of `pieces` up to each end; a character of several tokens belongs to the last of them."""
    found: list[int] = []
    characters = tokens = 0
    for piece in pieces:
        characters, tokens = characters + len(piece), tokens + 1
        while len(found) < len(ends) and ends[len(found)] <= characters:
            found.append(tokens)
    if len(found) < len(ends):
        raise ValueError(
            f"a step ends after {ends[len(found)]} characters, all tokens together have {characters}"
        )
    return tuple(found)


def combined(outcome: float, score: float, outcome_coefficient: float, coefficient: float) -> float:
    """Return the reward of a text, in [0, 1] up to rounding, which is cut."""
    return min(1.0, max(0.0, outcome_coefficient * outcome + coefficient * score))
