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


def split_steps(answer: str, separator: str, most: int) -> list[Step]:
    """Return the steps of an answer; the last of `most` steps is all that is left."""
    steps: list[Step] = []
    start = 0
    while start < len(answer):
        end = answer.find(separator, start) if len(steps) < most - 1 else -1
        is_last = end < 0
        if is_last:
            end = len(answer)
        piece = answer[start:end]
        if piece.strip():
            steps.append(Step(piece.strip(), start + len(piece.rstrip())))
        start = end if is_last else end + len(separator)
    return steps


def token_ends(pieces: Iterable[str], ends: Sequence[int]) -> tuple[int, ...]:
    """Return the number of `pieces` up to each end; a character of several tokens belongs to the last of them."""
    counts: list[int] = []
    characters = 0
    for tokens, piece in enumerate(pieces, start=1):
        characters += len(piece)
        while len(counts) < len(ends) and ends[len(counts)] <= characters:
            counts.append(tokens)
    if len(counts) < len(ends):
        raise ValueError(
            f"a step ends after {ends[len(counts)]} characters, all tokens together have {characters}"
        )
    return tuple(counts)


def combined_reward(
    outcome: float, score: float, outcome_coefficient: float, coefficient: float
) -> float:
    """Return the reward of a text, in [0, 1] up to rounding, which is cut."""
    return min(1.0, max(0.0, outcome_coefficient * outcome + coefficient * score))
