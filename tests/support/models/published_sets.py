r"""Small files of our own problems, laid out as the problem sets are published: names, formats and columns.

Every set has some good rows, each with an answer that is right and one that is wrong, and rows that cannot be used.
"""

import csv
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

Values = dict[str, Any]


@dataclass(frozen=True)
class Good:
    """A row, and what a model may write for it."""

    values: Values
    right: str
    wrong: str


@dataclass(frozen=True)
class Published:
    """One set: how its files are written, and what they hold."""

    write: Callable[[Path, list[Values]], None]
    good: tuple[Good, ...]
    bad: tuple[tuple[Values, str], ...]
    """Rows that cannot be used, with a piece of the reason."""


def parquet(*names: str) -> Callable[[Path, list[Values]], None]:
    """One file, or the rows spread over several."""

    def write(folder: Path, rows: list[Values]) -> None:
        columns = {name for row in rows for name in row}
        whole = [{name: row.get(name) for name in columns} for row in rows]
        schema = pa.Table.from_pylist(whole).schema
        size = -(-len(rows) // len(names))
        for index, name in enumerate(names):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            part = whole[index * size : (index + 1) * size]
            pa.parquet.write_table(pa.Table.from_pylist(part, schema), path)

    return write


def jsonl(name: str) -> Callable[[Path, list[Values]], None]:
    def write(folder: Path, rows: list[Values]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    return write


def csv_file(name: str) -> Callable[[Path, list[Values]], None]:
    def write(folder: Path, rows: list[Values]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), restval="")
            writer.writeheader()
            writer.writerows(rows)

    return write


def boxed(answer: str) -> str:
    return f"So it is \\boxed{{{answer}}}."


def fenced(program: str) -> str:
    return f"Here it is.\n```python\n{program}\n```\n"


def maths(values: Values, right: str, wrong: str) -> Good:
    return Good(values, boxed(right), boxed(wrong))


def _math(problem: str, level: int, answer: str, kind: str = "Algebra") -> Values:
    return {
        "problem": problem,
        "level": f"Level {level}",
        "type": kind,
        "solution": f"Write it down, first \\boxed{{0}}, then \\boxed{{{answer}}}.",
    }


def _turns(question: str) -> list[Values]:
    return [{"role": "system", "content": "A scaffold that is left out."}, {"role": "user", "content": question}]


def _eurus(ability: str, question: str, truth: str, index: int) -> Values:
    return {
        "data_source": f"our_{ability}",
        "prompt": _turns(question),
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": "train", "index": index},
    }


def _olympiad(number: int, question: str, answers: list[str] | None, **more: Any) -> Values:
    return {
        "id": number, "question": question, "solution": ["None of ours."], "final_answer": answers, "context": None,
        "modality": "Text-only", "difficulty": "Competition", "is_multiple_answer": False, "unit": None,
        "answer_type": "Numerical", "error": None, "question_type": "Open-ended", "subfield": "Algebra",
        "subject": "Math", "language": "English",
    } | more  # fmt: skip


MATH_ROWS = (
    maths(_math("What is $2+3\\cdot 4$?", 1, "14"), "14", "20"),
    maths(_math("Solve $2x = 7$ for $x$.", 3, "\\frac{7}{2}"), "3.5", "\\frac{2}{7}"),
    maths(_math("Which set is $\\{1,2\\}\\cap\\{2,3\\}$?", 5, "\\{2\\}"), "\\{2\\}", "\\{1\\}"),
)
MATH_BAD: tuple[tuple[Values, str], ...] = (
    ({**_math("No box here?", 4, "1"), "solution": "It is 1."},
        "column 'solution' has no closed \\boxed{}: 'It is 1.'"),
    ({**_math("?", 4, "1"), "problem": None}, "none of the columns 'problem', 'question', 'Problem', 'Question'"),
)  # fmt: skip
AIME_CSV = (
    maths({"ID": "2022-I-1", "Year": 2022, "Problem Number": 1, "Question": "How many hours have two days,\nin all?",
           "Answer": "048", "Part": "I"}, "48", "24"),
    maths({"ID": "1990-1", "Year": 1990, "Problem Number": 1, "Question": "Half of 28?", "Answer": "14", "Part": ""},
          "014", "15"),
)  # fmt: skip

PUBLISHED: dict[str, Published] = {
    "gsm8k": Published(
        parquet("main/train-00000-of-00001.parquet"),
        (
            maths({"question": "Ann has 3 boxes of 400 pins. How many pins?",
                   "answer": "3 x 400 = <<3*400=1200>>1200 pins.\n#### 1,200"}, "1200", "400"),
            maths({"question": "Bo had 5 pears, ate 8 of a friend's. Own minus eaten?", "answer": "5-8.\n#### -3"},
                "-3", "3"),
        ),
        (({"question": "And this?", "answer": "It is 4."}, "column 'answer' has no answer after ####: 'It is 4.'"),
         ({"question": None, "answer": "#### 4"}, "column 'question' is None")),
    ),
    "math": Published(
        parquet("algebra/train-00000-of-00001.parquet",
            "number_theory/train-00000-of-00001.parquet"), MATH_ROWS, MATH_BAD,
    ),
    "math_filtered": Published(parquet("algebra/test-00000-of-00001.parquet"), MATH_ROWS[1:], MATH_BAD),
    "math500": Published(
        jsonl("test.jsonl"),
        (maths({"problem": "What is $7^2$?", "solution": "\\boxed{49}", "answer": "49", "subject": "Algebra",
            "level": 1,
                "unique_id": "test/algebra/1.json"}, "49", "14"),
         maths({"problem": "Write $\\sqrt{8}$ simply.", "solution": "", "answer": "2\\sqrt{2}", "subject": "Algebra",
                "level": 3, "unique_id": "test/algebra/2.json"}, "\\sqrt{8} = 2\\sqrt 2", "4")),
        (({"problem": "?", "answer": "1", "level": 1, "unique_id": "test/algebra/1.json"},
          "stands in test.jsonl row 1 already"),
         ({"problem": "No answer?", "level": 1, "unique_id": "x"}, "none of the columns 'answer'")),
    ),
    "aime_1983_2024": Published(
        csv_file("AIME_Dataset_1983_2024.csv"), AIME_CSV,
        (({"ID": "1991-2", "Year": 1991, "Question": "Blank?", "Answer": ""}, "column 'Answer' is ''"),),
    ),
    "aime_subset": Published(
        csv_file("AIME_Dataset_1983_2024.csv"), AIME_CSV[:1],
        (({"ID": "x", "Year": "", "Question": "Which year?", "Answer": "1"}, "column 'Year' is ''"),),
    ),
    "aime2024": Published(
        parquet("data/train-00000-of-00001.parquet"),
        (maths({"id": 60, "problem": "How many weeks have 84 days?", "solution": "\\boxed{12}", "answer": "012",
            "url": "",
                "year": "2024"}, "12", "84"),),
        (({"id": 61, "problem": " ", "answer": "1"}, "column 'problem' is ' '"),),
    ),
    "amc23": Published(
        parquet("data/test-00000-of-00001.parquet"),
        (maths({"id": 0, "question": "A third of 81?", "answer": 27.0, "url": ""}, "27", "28"),),
        (({"id": 1, "question": "And?", "answer": None}, "none of the columns 'answer'"),),
    ),
    "minerva": Published(
        jsonl("test.jsonl"),
        (maths({"question": "A cube has edges of 2 m. Its volume in cubic metres?", "answer": "8"}, "8", "6"),
         maths({"problem": "Mass times acceleration, as a formula in $m$ and $a$?", "solution": "It is \\boxed{m a}.",
                "type": "Physics", "idx": 7}, "a m", "m+a")),
        (({"problem": "No box?", "solution": "None.", "idx": 8}, "column 'solution' has no closed \\boxed{}"),),
    ),
    "ocwcourses": Published(
        jsonl("test.jsonl"),
        (maths({"problem": "Light of 3 s delay is how many seconds away?", "solution": "\\boxed{3}",
            "type": "Astronomy",
                "idx": 0}, "3", "9"),),
        (({"solution": "\\boxed{3}", "type": "Astronomy", "idx": 1}, "none of the columns 'problem'"),),
    ),
    "olympiadbench": Published(
        parquet("OE_TO_maths_en_COMP/OE_TO_maths_en_COMP.parquet"),
        (maths(_olympiad(1, "Find all real $x$ with $x^2 = 9$.", ["$-3,3$"], is_multiple_answer=True), "3, -3", "3"),
         maths(_olympiad(2, "What is a half?", ["$\\frac{1}{2}$"]), "0.5", "2")),
        ((_olympiad(3, "No answer?", None), "column 'final_answer' is None"),),
    ),
    "olympiadbench_physics": Published(
        parquet("OE_TO_physics_en_COMP/OE_TO_physics_en_COMP.parquet"),
        (maths(_olympiad(9, "What is its speed in m/s?", ["$4$"], context="A cart covers 12 m in 3 s.",
            subject="Physics",
                         subfield="Mechanics"), "4", "36"),),
        ((_olympiad(10, "No answer?", []), "column 'final_answer' is []"),),
    ),
    "eurus2_rl": Published(
        parquet("data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"),
        (maths(_eurus("math", "Twice 21?\n\nGive it as \\boxed{Your answer}.", "42", 0), "42", "21"),
         Good(_eurus("code", "Read two numbers, print their sum.", json.dumps({"inputs": ["1 2\n", "5 5\n"],
                                                                              "outputs": ["3\n", "10\n"]}), 1),
              fenced("print(sum(map(int, input().split())))"), fenced("print(0)")),
         Good(_eurus("code", "Write double(n).", json.dumps({"fn_name": "double", "inputs": [[2], [5]],
                                                            "outputs": [4, 10]}), 2),
              fenced("def double(n):\n    return 2 * n"), fenced("def double(n):\n    return -n"))),
        (({**_eurus("math", "?", "1", 3), "prompt": [{"role": "system", "content": "no user"}]},
            "column 'prompt' is [{"),
         (_eurus("math", "No truth?", "", 4), "column 'reward_model.ground_truth' is ''")),
    ),
}  # fmt: skip


def publish(name: str, folder: Path) -> Path:
    """Write a set, good rows first, into a folder of its own; for `math_filtered` also what it leaves out."""
    published = PUBLISHED[name]
    rows = [good.values for good in published.good] + [values for values, _ in published.bad]
    published.write(folder / name, rows)
    return folder / name
