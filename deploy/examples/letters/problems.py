"""The problems: operations on letters, words that ask for them, openings that announce them.

Letters of a question differ from each other, so each operation has one right answer; two operations may agree on some
places, which is what a wrong opening earns.
"""

import itertools
import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

ALPHABET = "abcdefghij"
LETTERS = 4


@dataclass(frozen=True)
class Operation:
    """One thing that can be done to letters."""

    words: tuple[str, str]
    """The first words of questions that ask for it."""
    opening: str
    """The beginning of answers in which the target does it."""
    result: Callable[[str], str]


OPERATIONS = (
    Operation(("flip", "mirror"), "Read from the end:", lambda letters: letters[::-1]),
    Operation(
        ("swap", "trade"),
        "Turn each pair round:",
        lambda letters: "".join(map(_turned, _pairs(letters))),
    ),
    Operation(
        ("advance", "next"), "Move every one on:", lambda letters: "".join(map(_following, letters))
    ),
    Operation(("sort", "rank"), "Put them in order:", lambda letters: "".join(sorted(letters))),
)


@dataclass(frozen=True)
class Problem:
    """One question; its gold answer follows from the fields."""

    operation: Operation
    word: str
    letters: str

    @property
    def question(self) -> str:
        """The user's turn."""
        return f"{self.word} {self.letters}"

    @property
    def gold(self) -> str:
        """The right answer's letters."""
        return self.operation.result(self.letters)

    def answered(self, operation: Operation) -> str:
        """The target's whole answer after the opening of an operation, the right one or not."""
        return f"{operation.opening} {operation.result(self.letters)}"


def problems(rng: random.Random, rows: int, taken: set[str]) -> list[Problem]:
    """Problems that ask for all words in turn; their letters are added to `taken`, none is in it."""
    asked = itertools.cycle(
        (operation, word) for operation in OPERATIONS for word in operation.words
    )
    found = []
    for operation, word in itertools.islice(asked, rows):
        while (letters := "".join(rng.sample(ALPHABET, LETTERS))) in taken:
            pass
        taken.add(letters)
        found.append(Problem(operation, word, letters))
    return found


def write_jsonl(path: Path, name: str, rows: Iterable[Problem]) -> None:
    """One line per problem: `id`, `question`, `answer`, and as `family` its first word."""
    lines = (
        {
            "id": f"{name}-{number:04d}",
            "question": row.question,
            "answer": row.gold,
            "family": row.word,
        }
        for number, row in enumerate(rows)
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def _pairs(letters: str) -> list[str]:
    return [letters[place : place + 2] for place in range(0, len(letters), 2)]


def _turned(letters: str) -> str:
    return letters[::-1]


def _following(letter: str) -> str:
    return ALPHABET[(ALPHABET.index(letter) + 1) % len(ALPHABET)]
