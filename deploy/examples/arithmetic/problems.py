r"""The problems of the arithmetic example: families, openings, right answers, JSON lines.

A question is a word and eight digits, "sum 3 1 4 1 5 9 2 6". The word names one of four families. Each
family has one procedure: a state that runs over the digits, whose last value is the answer. A worked
answer is an opening that announces a procedure, the eight running states, and the last of them boxed:

    Let us add them up: 3 4 8 9 4 3 5 1 so \boxed{1}

Only digits on which the four procedures end in four different answers are used: a right answer is then
never luck, and one that follows the wrong opening is always wrong.
"""

import json
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

DIGITS = 8
TRAIN_ROWS = 4096
HELDOUT_ROWS = 512


@dataclass(frozen=True)
class Family:
    """One kind of question and the procedure that answers it."""

    name: str
    """The word that the question begins with."""
    opening: str
    """The opening of an answer that follows this procedure."""
    step: Callable[[int, int, int], int]
    """(state, digit, position) to the next state; the state before the first digit is 0."""


FAMILIES = (
    Family("sum", "Let us add them up:", lambda state, digit, _: (state + digit) % 10),
    Family("largest", "Let us find the biggest one:", lambda state, digit, _: max(state, digit)),
    Family(
        "alternate",
        "Let us switch plus and minus:",
        lambda state, digit, position: (state + (-digit if position % 2 else digit)) % 10,
    ),
    Family("high", "Let us count those above four:", lambda state, digit, _: state + (digit > 4)),
)
OPENINGS = tuple(family.opening for family in FAMILIES)


@dataclass(frozen=True)
class Problem:
    """One question; its gold answer follows from the two fields."""

    family: Family
    digits: tuple[int, ...]

    @property
    def question(self) -> str:
        """The user's turn."""
        return " ".join([self.family.name, *map(str, self.digits)])

    @property
    def gold(self) -> str:
        """The right answer."""
        return str(states(self.family, self.digits)[-1])

    def worked(self, opening: int) -> str:
        """Return the target's answer after the opening of family number `opening`, right or wrong."""
        run = states(FAMILIES[opening], self.digits)
        return " ".join([OPENINGS[opening], *map(str, run), f"so \\boxed{{{run[-1]}}}"])


def states(family: Family, digits: tuple[int, ...]) -> list[int]:
    """The procedure's state after each digit, each 0 to 9."""
    run: list[int] = []
    for position, digit in enumerate(digits):
        run.append(family.step(run[-1] if run else 0, digit, position))
    return run


def stream(rng: random.Random, taken: set[tuple[int, ...]]) -> Iterator[Problem]:
    """Endless problems, families in turn, none on digits in `taken`, to which those given out are added."""
    while True:
        for family in FAMILIES:
            digits = _digits(rng)
            while digits in taken:
                digits = _digits(rng)
            taken.add(digits)
            yield Problem(family, digits)


def _digits(rng: random.Random) -> tuple[int, ...]:
    while True:
        digits = tuple(rng.randrange(10) for _ in range(DIGITS))
        if len({states(family, digits)[-1] for family in FAMILIES}) == len(FAMILIES):
            return digits


def write_jsonl(path: Path, name: str, problems: Iterable[Problem]) -> None:
    """One row per problem: `id`, `question`, `answer`, `family`."""
    rows = (
        {
            "id": f"{name}-{number:05d}",
            "question": problem.question,
            "answer": problem.gold,
            "family": problem.family.name,
        }
        for number, problem in enumerate(problems)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
