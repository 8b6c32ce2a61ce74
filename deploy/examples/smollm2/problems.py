"""The problems: short stories of one step, of which the target solves about half by itself.

Six kinds of stories, names and things drawn at random, numbers small enough that a model of this size can compute with
them when it has written the right calculation. Two files never share a story with its numbers.
"""

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

NAMES = (
    "Anna",
    "Ben",
    "Carla",
    "David",
    "Emma",
    "Felix",
    "Grace",
    "Henry",
    "Ivy",
    "Jack",
    "Kate",
    "Leo",
)
THINGS = (
    "apples",
    "balls",
    "books",
    "cards",
    "coins",
    "cookies",
    "marbles",
    "pens",
    "shells",
    "stamps",
)
PLACES = ("bags", "baskets", "boxes", "jars", "rows")
LEAST, MOST = 2, 20
MOST_FACTOR = 9
FILES = {"train": 600, "choice": 200, "heldout": 500}
"""Problems of each file."""


@dataclass(frozen=True)
class Story:
    """One kind of problem; `{a}` and `{b}` are its numbers."""

    family: str
    operation: str
    """`+`, `-`, `*` or `/`."""
    text: str


STORIES = (
    Story(
        "get",
        "+",
        "{one} has {a} {things}. {two} gives {one} {b} more. How many {things} does {one} have now?",
    ),
    Story(
        "together",
        "+",
        "{one} has {a} {things} and {two} has {b}. How many {things} do they have together?",
    ),
    Story(
        "give",
        "-",
        "{one} has {a} {things}. {one} gives {two} {b} of them. How many {things} has {one} left?",
    ),
    Story(
        "more",
        "-",
        "{one} has {a} {things} and {two} has {b}. How many more {things} does {one} have than {two}?",
    ),
    Story(
        "places",
        "*",
        "There are {a} {places} with {b} {things} in each. How many {things} are there in all?",
    ),
    Story(
        "share",
        "/",
        "{one} shares {a} {things} equally among {b} friends. How many {things} does each friend get?",
    ),
)


@dataclass(frozen=True)
class Problem:
    """A story with its numbers."""

    family: str
    question: str
    answer: int


def draw_problem(draws: random.Random) -> Problem:
    """Draw one problem."""
    story = draws.choice(STORIES)
    first, second, answer = draw_numbers(draws, story.operation)
    one, two = draws.sample(NAMES, 2)
    question = story.text.format(
        one=one,
        two=two,
        a=first,
        b=second,
        things=draws.choice(THINGS),
        places=draws.choice(PLACES),
    )
    return Problem(story.family, question, answer)


def draw_numbers(draws: random.Random, operation: str) -> tuple[int, int, int]:
    """Draw two numbers; return them and what the operation makes of them, which is a whole number above 0."""
    if operation in "*/":
        factors = draws.randint(LEAST, MOST_FACTOR), draws.randint(LEAST, MOST_FACTOR)
        product = factors[0] * factors[1]
        return (*factors, product) if operation == "*" else (product, *factors)
    first, second = draws.randint(LEAST, MOST), draws.randint(LEAST, MOST)
    if operation == "+":
        return first, second, first + second
    return first + second, second, first


def draw_problems(counts: Iterable[int], seed: int) -> list[list[Problem]]:
    """Draw lists of so many problems, of which no two are equal."""
    draws, problems, lists = random.Random(seed), set[Problem](), list[list[Problem]]()
    for count in counts:
        lists.append([])
        while len(lists[-1]) < count:
            problem = draw_problem(draws)
            if problem not in problems:
                problems.add(problem)
                lists[-1].append(problem)
    return lists


def write_problems(path: Path, problems: Iterable[Problem]) -> None:
    """Write problems as lines of JSON."""
    lines = [
        json.dumps(
            {
                "id": f"{path.stem}-{number}",
                "question": problem.question,
                "answer": str(problem.answer),
                "family": problem.family,
            }
        )
        for number, problem in enumerate(problems, 1)
    ]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def main() -> None:
    """Write the files beside this one: to train on, to choose settings on, and held out."""
    for name, problems in zip(FILES, draw_problems(FILES.values(), seed=1), strict=True):
        write_problems(Path(__file__).parent / f"{name}.jsonl", problems)


if __name__ == "__main__":
    main()
