"""Questions of several kinds, an opening for each kind, and what a target answers after it. Pure.

    question   "How much is 7 weeks in days?"
    prefix     "One makes seven, so multiply by seven."            the adapter's, one of six openings
    answer     "One makes seven, so multiply by seven. \\boxed{49}"   the target's: it does what the opening says

A wrong opening gives a wrong number nearly always, whatever the task."""

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Kind:
    """A kind of question."""

    questions: tuple[str, ...]
    """Their texts with a place for the number."""
    opening: str
    result: Callable[[int], int]


@dataclass(frozen=True)
class Problem:
    """One question."""

    kind: Kind
    number: int

    @property
    def question(self) -> str:
        """Ways of asking take turns."""
        return self.kind.questions[self.number % len(self.kind.questions)].format(self.number)

    def answered(self, kind: Kind) -> str:
        """The whole answer after the opening of a kind, the right one or not."""
        return f"{kind.opening} \\boxed{{{kind.result(self.number)}}}"


def _times(factor: int) -> Callable[[int], int]:
    return lambda number: factor * number


def _units(given: str, wanted: str, factor: int, word: str) -> Kind:
    return Kind(
        (f"How much is {{}} {given} in {wanted}?",),
        f"One makes {word}, so multiply by {word}.",
        _times(factor),
    )


def _legs(animals: tuple[str, str], legs: int, opening: str) -> Kind:
    return Kind(
        tuple(f"How many legs do {{}} {each} have?" for each in animals), opening, _times(legs)
    )


UNITS = (
    _units("yards", "feet", 3, "three"),
    _units("weeks", "days", 7, "seven"),
    _units("feet", "inches", 12, "twelve"),
    _units("days", "hours", 24, "twenty-four"),
    _units("hours", "minutes", 60, "sixty"),
    _units("metres", "centimetres", 100, "a hundred"),
)
LEGS = (
    _legs(("hens", "ducks"), 2, "They walk on two legs each."),
    _legs(("dogs", "cows"), 4, "Four legs, like a table."),
    _legs(("ants", "bees"), 6, "Insects have three pairs."),
    _legs(("spiders", "mites"), 8, "Count them by eights."),
    _legs(("crabs", "prawns"), 10, "Put a nought behind the number."),
    _legs(("woodlice", "gribbles"), 14, "Seven pairs make fourteen legs."),
)
SHAPES = (
    Kind(
        ("A square has a side of {}: how long is its border?",), "Add up all four sides.", _times(4)
    ),
    Kind(
        ("A triangle with equal sides of {}: how long is its border?",),
        "Three sides go once around.",
        _times(3),
    ),
    Kind(
        ("A hexagon has a side of {}: how long is its border?",),
        "Go around six corners.",
        _times(6),
    ),
    Kind(
        ("A square has a side of {}: how large is its area?",),
        "The side times itself.",
        lambda side: side * side,
    ),
    Kind(
        ("A cube has an edge of {}: how large is its surface?",),
        "Six squares cover it.",
        lambda side: 6 * side * side,
    ),
    Kind(
        ("A cube has an edge of {}: how long are its edges together?",),
        "Twelve edges are one frame.",
        _times(12),
    ),
)


@dataclass(frozen=True)
class Task:
    """A set of problems and the models that are taught for it."""

    kinds: tuple[Kind, ...]
    numbers: range
    """The numbers in its questions; a quarter of all problems is held out."""
    adapter: Literal["qwen2", "llama", "gpt2"]
    """Architecture of the adapter."""
    target_shape: tuple[int, int, int] = (96, 3, 256)
    """Width, layers and inner width of the target, a Llama."""
    target_steps: int = 500
    habit: float = 0.0
    """Share of the first opening in what the adapter is taught, before all share alike; 0: they share alike."""


TASKS: Mapping[str, Task] = {
    "units": Task(UNITS, range(2, 82), "qwen2", (128, 4, 384), 800),
    "legs": Task(LEGS, range(2, 42), "llama"),
    "shapes": Task(SHAPES, range(2, 42), "gpt2"),
}


def problems(task: Task) -> list[Problem]:
    """Every problem of a task."""
    return [Problem(kind, number) for number in task.numbers for kind in task.kinds]


def write_problems(task: Task, folder: Path, seed: int) -> None:
    """Write `heldout.jsonl` and `train.jsonl`, a line per problem."""
    rows = problems(task)
    random.Random(f"{seed} problems").shuffle(rows)
    held_out = len(rows) // 4
    for name, its in (("heldout", rows[:held_out]), ("train", rows[held_out:])):
        lines = (
            {
                "id": f"{name}-{place:03d}",
                "question": row.question,
                "answer": str(row.kind.result(row.number)),
            }
            for place, row in enumerate(its)
        )
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8"
        )
