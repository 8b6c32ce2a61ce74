"""The `[data]` section: the problems of training and evaluation, and where they are."""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from pydantic import AfterValidator, BeforeValidator, Field, field_validator

from prefixrl.common.config.foreign.files import read_toml
from prefixrl.common.config.foreign.verifier import (
    BUILT_IN,
    MATHEMATICS,
    SANDBOXED,
    WITH_MATHEMATICAL_GOLD,
    check_verifier,
)
from prefixrl.common.config.section import Positive, PositiveFloat, Section, Several
from prefixrl.common.errors import ConfigError
from prefixrl.common.wire.messages.groups import CodeMode

Reading = Literal["as_it_is", "joined", "after_hashes", "last_box", "last_number", "before_unit"]
"""Way of reading a column; `Source.answer_reading` explains the values."""

Column = tuple[str, Reading]
Columns = tuple[Column, ...]

VerifierName = Annotated[CodeMode, AfterValidator(check_verifier)]

BOXED = "\n\nThink step by step, and write the final answer in \\boxed{}."
"""Suffix of questions that do not state the form of the answer."""

_PROBLEM: Columns = tuple(
    (name, "as_it_is") for name in ("problem", "question", "Problem", "Question")
)
_ANSWER: Columns = (
    ("answer", "as_it_is"),
    ("Answer", "as_it_is"),
    ("final_answer", "joined"),
    ("solution", "last_box"),
)
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
    eval_problems: int = field(default=0, kw_only=True)
    """Number of problems in `eval_split`."""
    question: Columns = _PROBLEM
    answer: Columns = _ANSWER
    subset: str = ""
    other_subsets: tuple[str, ...] = field(default=(), kw_only=True)
    """Names of files and folders beside the subset with other rows, or the same rows in another form."""
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


_TABLE = read_toml(
    Path(__file__).parent / "tables" / "problem_sets.toml", "the table of problem sets"
)
PROBLEM_SETS = msgspec.convert(_TABLE, dict[str, ProblemSet])
"""Problem sets by the name used in a run file."""


ASKED_COLUMN = re.compile(r"\{([A-Za-z_][\w.]*)\}")
"""A column in a question template."""
HUB = "hf:"
"""Prefix of the path of a dataset on the hub."""
TRAIN_FILE, EVAL_FILE = "data/train.jsonl", "data/eval.jsonl"
"""Files of a run directory with the problems as they are asked."""


def _as_table(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    return {"name": value} if value in PROBLEM_SETS else {"path": value}


def _as_tables(value: Any) -> Any:
    tables = value if isinstance(value, (list, tuple)) else [value]
    return tuple(_as_table(each) for each in tables)


class Source(Section):
    """One source of problems; columns are named here, else by the problem set, else by `[data]`."""

    name: str | None = None
    """A published problem set (`PROBLEM_SETS`); absent: the columns are named here or in `[data]`."""
    path: str | None = None
    """A JSONL, JSON, CSV or Parquet file, a folder of them or hf:OWNER/NAME[@REVISION]; absent: the set's hub copy."""
    subset: str | None = None
    """For a folder or hub dataset: only files below a folder of this name."""
    split: str | None = None
    """For a folder or hub dataset: train, test, train+test, …; needed if it has several. Absent: the set's (in
    `eval` its test split)."""
    where: dict[str, Several[str | int]] = Field(default={})
    """Only rows with one of these values in these columns: where = { level = [3, 4, 5] }."""
    without: Several[Annotated["Source", BeforeValidator(_as_table)]] = ()
    """Sources whose questions are left out of this one."""
    weight: PositiveFloat | None = None
    """Share of the training prompts, relative to other weights; without any all problems are equally frequent."""
    suffix: str | None = None
    """Text appended to every question, in place of the problem set's."""
    task_suffix: Literal["prime"] | None = None
    """Text appended to every question by its kind, behind `suffix`. prime: what PRIME's models were asked, a box in
    LaTeX, or, where tests judge the answer, a Python program in a fence. Questions of eurus2_rl have it already."""
    keep_system: bool | None = None
    """Conversations are asked with their own system turn, except of a model whose section has a `system`. Absent: true
    for plain files, false for problem sets (eurus2_rl)."""
    code: VerifierName | None = None
    """Replaces `data.code` for this source."""
    id_column: str | None = None
    question_column: str | None = None
    answer_column: str | None = None
    family_column: str | None = None
    question_template: str | None = None
    """Replaces `data.question_template` for this source."""
    answer_reading: Reading | None = None
    """Replaces `data.answer_reading` for this source."""

    def _check_place(self) -> None:
        if self.name is None and self.path is None:
            raise ValueError(
                "name and path are missing; give a problem set, or a file, a folder or hf:OWNER/NAME"
            )
        _check_question(self)
        self.refuse_if(
            self.name is not None and self.name not in PROBLEM_SETS,
            "name",
            f"not a problem set; known ones: {', '.join(PROBLEM_SETS)}. Give a file or a folder "
            f"as path",
        )

    @property
    def problem_set(self) -> ProblemSet | None:
        """The problem set that it names, if any."""
        return PROBLEM_SETS[self.name] if self.name else None

    @property
    def published(self) -> int | None:
        """The published number of its problems; None where the user chooses others, or none is known."""
        problem_set = self.problem_set
        if (
            problem_set is None
            or self.where
            or self.subset
            or tuple(each.name for each in self.without) != problem_set.without
        ):
            return None
        counts = {
            None: problem_set.problems,
            problem_set.split: problem_set.problems,
            problem_set.eval_split: problem_set.eval_problems,
        }
        return counts.get(self.split) or None

    @property
    def label(self) -> str:
        """Its name in ids, figures and messages."""
        if self.name:
            return self.name
        assert self.path is not None
        return Path(self.path.removeprefix(HUB)).name.partition(".")[0]

    def code_of(self, default: CodeMode) -> CodeMode:
        """Return how programs judge some of its rows, not read yet; `default` is `data.code`."""
        tests = self.problem_set.tests_where if self.problem_set else None
        if self.code is not None or tests is None:
            return self.code or default
        column, value = tests
        return "tests" if value in (self.where.get(column) or (value,)) else "none"


class DataConfig(Section):
    """Problems to train and evaluate on."""

    train: Annotated[
        tuple[Source, ...], BeforeValidator(_as_tables), Field(strict=False, min_length=1)
    ]
    """Training problems: the name of a problem set, a file, a folder, hf:OWNER/NAME, a table of keys, or a list."""
    eval: Annotated[tuple[Source, ...], BeforeValidator(_as_tables), Field(strict=False)] = ()
    """Held-out problems, given like `train`."""
    paths: dict[str, str] = Field(default={})
    """Path of a problem set on this host, by its name. A problem set without any path comes from the hub."""
    epochs: Positive | None = None
    """Passes over the training problems; the last iteration may be small. With a filter every problem is still sampled,
    and filtered groups make the run shorter. Exclusive with `algorithm.iterations`."""
    sampling: Literal["uniform", "by_outcome"] = "uniform"
    """uniform: every problem is asked equally often, or by its source's weight. by_outcome: a problem is asked the more
    often, the likelier a group of it has right and wrong rows, by the outcomes of its own groups and of its source's.
    Every problem keeps a tenth of its turns. The run ends by `algorithm.iterations`."""
    on_bad_row: Literal["skip", "stop"] = "skip"
    """skip: a row that cannot be used is left out, named in `bad_rows.jsonl` and counted. stop: it ends the start."""
    special_tokens: Literal["refuse", "allow"] = "refuse"
    """refuse: a row whose text has special tokens of a model that is asked is bad, since it could close its own turn.
    allow: they are read as such."""
    id_column: str | None = None
    """Absent: the column `id` where a row has one, else the row's number."""
    question_column: str | None = None
    """Column of the question, for sources that name none. Absent: `question`, else another usual name that the file has
    (problem, prompt, messages, …). Of a conversation the last user turn is the question, with the turns before it."""
    answer_column: str | None = None
    """Column of the gold answer, for sources that name none. Absent: `answer`, else another usual name."""
    question_template: str | None = None
    """A question of several columns, for sources that name none: "{context}\\n\\n{question}\\n{options}". Options are
    listed by their letters; an empty column leaves nothing."""
    answer_reading: Reading | None = None
    """Part of the answer column that is the gold answer, for sources that name none. as_it_is: the whole text.
    after_hashes: the text after the last `####`. last_box: the content of the last box. last_number: the last number.
    before_unit: the text before a unit in brackets. joined: a list, with commas between. Absent: guessed from the first
    rows and named by `--check`; with `reward.function` and for tests as_it_is."""
    code: VerifierName = MATHEMATICS
    """The verifier of answers. none: as mathematics, and no program is run. answers: the answer is the value of
    an `<llm-code>` block, or of a function that the text defines. tests: the gold answer is JSON with inputs, outputs
    and optionally fn_name, or asserts; the reward is the share of the first ten that the answer's program
    passes. Programs run in a sandbox. Another name: the verifier of that name that an installed package adds."""
    float_tolerance: Annotated[float, Field(gt=0, le=0.01)] = 1e-9
    """Relative difference up to which a float that a program gives is right; 1e-6 as in contests is absolute too."""
    family_column: str | None = None
    """Column by which evaluation results are also broken down."""

    @field_validator("paths")
    @classmethod
    def _are_known(cls, paths: dict[str, str]) -> dict[str, str]:
        unknown = [name for name in paths if name not in PROBLEM_SETS]
        if unknown:
            raise ValueError(
                f"{', '.join(unknown)}: not a problem set; known ones: {', '.join(PROBLEM_SETS)}"
            )
        return paths

    def _check_weights(self) -> None:
        _check_question(self)
        weights = [source.weight for source in self.train]
        if None in weights and any(weights):
            raise ValueError(
                f"train has weights {weights}: give a weight to every source, or to none"
            )

    @property
    def verifiers(self) -> frozenset[str]:
        """The names of the verifiers that judge the answers to some problems."""
        return frozenset(source.code_of(self.code) for source in (*self.train, *self.eval))

    @property
    def added_verifiers(self) -> tuple[str, ...]:
        """The verifiers that installed packages add."""
        return tuple(sorted(self.verifiers - set(BUILT_IN)))

    @property
    def runs_programs(self) -> bool:
        """True if answers to some problems may be judged by running programs."""
        return not self.verifiers.isdisjoint(SANDBOXED)

    @property
    def has_fractions(self) -> bool:
        """True if some training problems may have rewards between 0 and 1."""
        verifiers = {source.code_of(self.code) for source in self.train}
        return not verifiers <= set(WITH_MATHEMATICAL_GOLD)

    @property
    def weights(self) -> tuple[float, ...] | None:
        """Weights of the training sources in order; None if all problems are equally frequent."""
        weights = tuple(source.weight for source in self.train if source.weight is not None)
        return weights or None


def _check_question(section: Source | DataConfig) -> None:
    if section.question_template is None:
        return
    section.refuse_if(
        not ASKED_COLUMN.search(section.question_template),
        "question_template",
        "it names no column; put {question} or another one into it",
    )
    section.refuse_if(
        section.question_column is not None,
        "question_template",
        "question_column names the question too; leave one out",
    )


def resolve(data: DataConfig, base: Path) -> DataConfig:
    """Return the section with absolute paths and each set's `without`; raises ConfigError."""
    local = {name: _local(f"data.paths.{name}", path, base) for name, path in data.paths.items()}

    def resolved(source: Source, key: str) -> Source:
        problem_set = source.problem_set
        path = source.path
        if path is not None:
            path = path if path.startswith(HUB) else _local(key, path, base)
        elif problem_set is not None:
            path = local.get(source.name or "") or local.get(problem_set.same_files_as)
            path = path or (HUB + problem_set.hub if problem_set.hub else None)
        if path is None:
            name = source.name
            raise ConfigError(
                f'{key} = {name!r}: no copy is known on the hub; give its path ([data.paths] {name} = "…")'
            )
        without = source.without or (
            tuple(Source(name=name) for name in problem_set.without) if problem_set else ()
        )
        left_out = tuple(resolved(each, f"{key}.without") for each in without)
        # What is left out of a source is its default split, also for held-out sources.
        is_held_out = key.startswith("data.eval") and ".without" not in key
        split = (
            source.split or (problem_set.eval_split if problem_set and is_held_out else "") or None
        )
        return source.model_copy(update={"path": path, "without": left_out, "split": split})

    def all_resolved(sources: tuple[Source, ...], key: str) -> tuple[Source, ...]:
        keys = [f"{key}[{index}]" for index in range(len(sources))] if len(sources) > 1 else [key]
        return tuple(map(resolved, sources, keys))

    train = all_resolved(data.train, "data.train")
    held_out = all_resolved(data.eval, "data.eval")
    return data.model_copy(update={"train": train, "eval": held_out, "paths": local})


def _local(key: str, name: str, base: Path) -> str:
    path = (base / os.path.expanduser(name)).resolve()
    if not path.exists():
        missing = f"{key} = {name!r}: there is no such file or folder (looked at {path})"
        if key.startswith("data.paths."):
            raise ConfigError(missing)
        raise ConfigError(
            f"{missing}, and no problem set of that name. Known problem sets: {', '.join(PROBLEM_SETS)}; a dataset on "
            f"the hub is {HUB}OWNER/NAME"
        )
    return str(path)
