"""The published problem sets a run file may name: dataset, columns, suffix, way of judging.

Sets are published in several layouts: of the columns listed for a field, the first that a row has is read. `a.b` is
column `b` within column `a`.
"""

from dataclasses import dataclass, field
from typing import Literal

Reading = Literal["text", "joined", "after_hashes", "last_box", "user_turn"]
"""Way of reading a column. text: unchanged. joined: a list of texts, with commas between. after_hashes: the text after
the last `####`. last_box: the content of the last box. user_turn: the last user turn of a conversation."""

Column = tuple[str, Reading]

BOXED = "\n\nThink step by step, and write the final answer in \\boxed{}."
"""Suffix of questions that do not state the form of the answer."""


TASK_SUFFIXES = {
    "prime": (
        "\n\nPresent the answer in LaTex format: \\boxed{Your answer}",
        "\n\nWrite Python code to solve the problem. Present the code in \n```python\nYour code\n```\nat the end.",
    )
}
"""Texts behind a question, for mathematics and for tasks that tests judge. prime: to the letter what PRIME's models
were trained with, its spelling of LaTeX and the blank at a line's end included."""


@dataclass(frozen=True)
class ProblemSet:
    """One published set."""

    hub: str
    """Dataset on the hub; "" where no copy is known and the user must give a path."""
    problems: int
    """Number of problems in the default split as published, after the filters below."""
    question: tuple[Column, ...]
    answer: tuple[Column, ...]
    subset: str = ""
    split: str = "test"
    eval_split: str = ""
    """Split of held-out problems, where the set has one beside `split`."""
    context: str = ""
    """Column with a text before the question; may be missing or empty."""
    id: tuple[str, ...] = ()
    family: str = ""
    suffix: str = BOXED
    where: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Only rows with one of these values in these columns."""
    without: tuple[str, ...] = ()
    """Sets whose questions are left out."""
    same_files_as: str = ""
    """Another set with the same files: a path given for that set is used for this one too."""
    tests_where: tuple[str, str] | None = None
    """Column and value of the rows that are judged by running tests; all other rows are mathematics."""

    @property
    def has_conversations(self) -> bool:
        """True if a question is a turn of a conversation."""
        return any(reading == "user_turn" for _, reading in self.question)


_PROBLEM: tuple[Column, ...] = (("problem", "text"), ("question", "text"), ("Problem", "text"), ("Question", "text"))
_ANSWER: tuple[Column, ...] = (
    ("answer", "text"),
    ("Answer", "text"),
    ("final_answer", "joined"),
    ("solution", "last_box"),
)

PROBLEM_SETS: dict[str, ProblemSet] = {
    "gsm8k": ProblemSet(
        "openai/gsm8k", 7_473, (("question", "text"),), (("answer", "after_hashes"),),
        subset="main", split="train", eval_split="test",
    ),
    "math": ProblemSet(
        "EleutherAI/hendrycks_math", 7_500, _PROBLEM, (("solution", "last_box"),),
        split="train", eval_split="test", family="level",
    ),
    # 9,255 problems of levels 3 to 5 in both splits, 367 of them in MATH-500.
    "math_filtered": ProblemSet(
        "EleutherAI/hendrycks_math", 8_888, _PROBLEM, (("solution", "last_box"),),
        split="train+test", family="level", where={"level": ("3", "4", "5")}, without=("math500",),
        same_files_as="math",
    ),
    "math500": ProblemSet(
        "HuggingFaceH4/MATH-500", 500, _PROBLEM, _ANSWER, id=("unique_id",), family="level",
    ),
    "aime_1983_2024": ProblemSet(
        "gneubig/aime-1983-2024", 933, _PROBLEM, _ANSWER, split="train", id=("ID", "id"), family="Year",
    ),
    "aime_subset": ProblemSet(
        "gneubig/aime-1983-2024", 90, _PROBLEM, _ANSWER, split="train", id=("ID", "id"), family="Year",
        where={"Year": ("2022", "2023", "2024")}, same_files_as="aime_1983_2024",
    ),
    "aime2024": ProblemSet(
        "HuggingFaceH4/aime_2024", 30, _PROBLEM, _ANSWER, split="train", id=("id", "ID"),
    ),
    "amc23": ProblemSet("math-ai/amc23", 40, _PROBLEM, _ANSWER, id=("id",)),
    "minerva": ProblemSet("math-ai/minervamath", 272, _PROBLEM, _ANSWER, id=("idx", "id")),
    "ocwcourses": ProblemSet("", 272, _PROBLEM, _ANSWER, id=("idx", "id"), family="type"),
    "olympiadbench": ProblemSet(
        "Hothan/OlympiadBench", 674, (("question", "text"),), (("final_answer", "joined"),),
        subset="OE_TO_maths_en_COMP", split="train", context="context", id=("id",), family="subfield",
    ),
    "olympiadbench_physics": ProblemSet(
        "Hothan/OlympiadBench", 236, (("question", "text"),), (("final_answer", "joined"),),
        subset="OE_TO_physics_en_COMP", split="train", context="context", id=("id",), family="subfield",
        same_files_as="olympiadbench",
    ),
    # Its questions state the form of the answer. The system turn, a scaffold taught to other models, is left out unless
    # a source has `keep_system`.
    "eurus2_rl": ProblemSet(
        "PRIME-RL/Eurus-2-RL-Data", 482_019, (("prompt", "user_turn"),), (("reward_model.ground_truth", "text"),),
        split="train", id=(), family="data_source", suffix="", tests_where=("ability", "code"),
    ),
}  # fmt: skip
"""Problem sets by the name used in a run file."""
