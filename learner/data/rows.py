"""A row to a problem: the columns of its parts, and the way to read them. Pure."""

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import msgspec

from prefixrl.common.config.data import (
    ASKED_COLUMN,
    TASK_SUFFIXES,
    Column,
    Columns,
    DataConfig,
    ProblemSet,
    Reading,
    Source,
)
from prefixrl.common.config.foreign.verifier import WITH_MATHEMATICAL_GOLD
from prefixrl.common.evaluation.grouping import grouped
from prefixrl.common.prompts.program_tests import read_tests
from prefixrl.common.wire.messages.groups import CodeMode, Prompt, Turn
from prefixrl.learner.data.columns import (
    MissingColumn,
    Values,
    column_value,
    is_blank,
    question_part,
    read,
    text,
    turns,
    turns_and_question,
)

MOST_FAMILIES = 16
"""Families of a source up to which each has figures of its own."""
QUESTIONS = (
    "question problem prompt query messages conversations instruction input Question Problem"
)
ANSWERS = "answer gold gold_answer final_answer target ground_truth reward_model.ground_truth label correct Answer"
ANSWERS += " solution output completion response"
"""Usual names of columns in plain files. The first name that a file has is taken."""
GUESSED_SHARE = 0.9
MARKS: dict[Reading, re.Pattern[str]] = {
    "after_hashes": re.compile("####"),
    "last_box": re.compile(r"\\(?:boxed|fbox)\s*\{"),
    "before_unit": re.compile(r"^[-+$]?[\d.,/:]+%?\s+\([A-Za-z][^()\d=+*^\\]*[A-Za-z.]\)\s*$"),
}
"""Marks of answers that have the gold answer in one part, by the reading that takes it."""
MISSING_WORDS = frozenset({"none", "nan", "null", "n/a", "#n/a", "<na>"})
"""Texts that tables have where a value is missing."""


class Problem(msgspec.Struct, frozen=True):
    """One problem; `family` is "" where the data names none."""

    prompt_id: str
    question: str
    """The text that is asked, with its suffix."""
    gold: str
    family: str = ""
    code: CodeMode = "none"
    source: str = ""
    system: str = ""
    earlier: tuple[Turn, ...] = ()
    """Turns between the system turn and the question."""

    def prompt(self) -> Prompt:
        """Return the part that workers see."""
        return Prompt(
            self.prompt_id, self.question, self.gold, self.code, self.system, earlier=self.earlier
        )


def text_of(problem: Problem) -> str:
    """Return all that a problem says, turns before the question included."""
    return "\n".join([problem.system, *(said for _, said in problem.earlier), problem.question])


def prompts(problems: Sequence[Problem]) -> list[Prompt]:
    """Return what workers see; its `source` is the name under which figures list the problem."""
    families = grouped((each.source, each.family) for each in problems)
    has_own = {name for name, of in families.items() if 1 < len(set(of)) <= MOST_FAMILIES}
    asked_of_workers = []
    for problem in problems:
        name = (
            f"{problem.source}/{problem.family}"
            if problem.source in has_own and problem.family
            else problem.source
        )
        asked_of_workers.append(msgspec.structs.replace(problem.prompt(), source=name))
    return asked_of_workers


@dataclass(frozen=True)
class Layout:
    """Columns of the parts of a problem in the rows of one source."""

    question: Columns
    """Columns of which the first that a row has is the question; of a template all."""
    answer: Columns
    context: str
    id: tuple[str, ...]
    family: str
    suffix: str
    code: CodeMode
    tests_where: tuple[str, str] | None
    where: Mapping[str, tuple[str, ...]]
    template: str | None
    reading: Reading | None
    """The reading that a key gives; None where it is guessed."""
    is_plain: bool
    """False for a problem set, whose columns are known."""
    has_system: bool
    needed: frozenset[str]
    """Columns of ids and families without which a row is bad, and "answer"."""
    task_suffixes: tuple[str, str] = ("", "")
    """Texts behind `suffix`: of mathematics, and of tasks that tests judge."""

    def ending(self, code: CodeMode) -> str:
        """Return the text behind the question of a problem that is judged so."""
        return self.suffix + self.task_suffixes[code == "tests"]

    @property
    def columns(self) -> frozenset[str]:
        """Every column that may be read; `a.b` is a column of that name, or within `a`."""
        names = [name for name, _ in (*self.question, *self.answer)]
        names += [
            self.context,
            self.family,
            *self.id,
            *self.where,
            self.tests_where[0] if self.tests_where else "",
        ]
        return frozenset(each for name in names if name for each in (name, name.partition(".")[0]))

    def __str__(self) -> str:
        names = " + ".join(
            repr(name) for name, _ in (self.question if self.template else self.question[:1])
        )
        answer, reading = self.answer[0]
        return f"{names} = {answer!r}" + ("" if reading == "as_it_is" else f" ({reading})")


def _columns(column: str | None, usual: str) -> Columns:
    return tuple((name, "as_it_is") for name in ([column] if column else usual.split()))


def layout(source: Source, data: DataConfig) -> Layout:
    """Return the layout by the keys of a source, else of its problem set, else of `[data]`."""
    problem_set, is_plain = source.problem_set, source.problem_set is None
    if problem_set is None:
        question, answer = (
            _columns(data.question_column, QUESTIONS),
            _columns(data.answer_column, ANSWERS),
        )
        problem_set = ProblemSet("", 0, question, answer, id=("id",), suffix="")
    # Columns of `[data]` are those of plain files: a known problem set has names of its own.
    given_id = source.id_column or (data.id_column if is_plain else None)
    given_family = source.family_column or (data.family_column if is_plain else None)
    # A template names columns: it does not fit a source that names its question's column itself.
    inherits = is_plain and not source.question_column
    template = source.question_template or (data.question_template if inherits else None)
    reading = source.answer_reading or (data.answer_reading if is_plain else None)
    question = _columns(source.question_column, "") or problem_set.question
    answer = _columns(source.answer_column, "") or problem_set.answer
    return Layout(
        question=_columns(None, " ".join(ASKED_COLUMN.findall(template))) if template else question,
        answer=tuple((name, reading) for name, _ in answer) if reading else answer,
        context="" if template else problem_set.context,
        id=(given_id,) if given_id else problem_set.id,
        family=given_family or problem_set.family,
        needed=frozenset(filter(None, ("answer", given_id, given_family))),
        suffix=problem_set.suffix if source.suffix is None else source.suffix,
        code=source.code or ("none" if problem_set.tests_where else data.code),
        tests_where=None if source.code else problem_set.tests_where,
        where=problem_set.where
        | {column: tuple(map(str, values)) for column, values in source.where.items()},
        template=template,
        reading=reading,
        is_plain=is_plain,
        has_system=is_plain if source.keep_system is None else source.keep_system,
        task_suffixes=TASK_SUFFIXES[source.task_suffix] if source.task_suffix else ("", ""),
    )


def settled(layout: Layout, rows: Sequence[Values]) -> Layout:
    """Return the layout with the columns and the reading that the first rows have, where no key names them."""
    if not layout.is_plain or not rows:
        return layout
    question = layout.question if layout.template else _usual(layout.question, rows)
    answer = _usual(layout.answer, rows)
    if layout.reading is None and layout.code in WITH_MATHEMATICAL_GOLD:
        answer = ((answer[0][0], _guess(rows, answer)),)
    return replace(layout, question=question, answer=answer)


def _usual(columns: Columns, rows: Sequence[Values]) -> Columns:
    """Return the first column that more than half of the rows have."""
    has = (
        column
        for column in columns
        if 2 * sum(not is_blank(column_value(row, column[0])) for row in rows) > len(rows)
    )
    return (next(has, columns[0]),)


def _guess(rows: Sequence[Values], answer: Columns) -> Reading:
    """Return the reading that nine answers of ten ask for."""
    texts = []
    for row in rows:
        with suppress(ValueError, RecursionError):
            texts.append(_answer(row, answer))
    for reading, mark in MARKS.items():
        if texts and sum(mark.search(each) is not None for each in texts) >= GUESSED_SHARE * len(
            texts
        ):
            return reading
    return "as_it_is"


def is_wanted(values: Values, layout: Layout) -> bool:
    """Return True if a row passes `where`; raise ValueError where one of its columns is missing."""
    return all(
        not _spellings(values, name).isdisjoint(wanted) for name, wanted in layout.where.items()
    )


def _spellings(values: Values, name: str) -> set[str]:
    """Return the texts by which `where` may name a value."""
    # MATH writes "Level 3", MATH-500 writes 3, and a table that lacks some levels holds floats and NaN.
    if isinstance(value := column_value(values, name), float) and not math.isfinite(value):
        return set()
    spelt = text(values, name, "as_it_is").removeprefix("Level ")
    return {spelt, spelt.removesuffix(".0")} if isinstance(value, float) else {spelt}


def problem(values: Values, layout: Layout, default_id: str, source: str) -> Problem:
    """Return the problem in a row; raise ValueError with the reason where there is none."""
    earlier, question = _question(values, layout)
    has_system = bool(earlier) and earlier[0][0] == "system"
    code, family = _code(values, layout), layout.family
    names = [
        name
        for name in layout.id
        if name in layout.needed or not is_blank(column_value(values, name))
    ]
    has_family = family and (family in layout.needed or column_value(values, family) is not None)
    return Problem(
        prompt_id=text(values, names[0], "as_it_is") if names else default_id,
        question=question + layout.ending(code),
        gold=_gold(values, layout, code),
        family=text(values, family, "as_it_is") if has_family else "",
        code=code,
        source=source,
        # Rows share theirs: once in memory is enough.
        system=sys.intern(earlier[0][1]) if has_system and layout.has_system else "",
        earlier=tuple(earlier[has_system:]),
    )


def _question(values: Values, layout: Layout) -> tuple[list[Turn], str]:
    """Return the turns before the question, and the question."""
    if layout.template is not None:
        return [], ASKED_COLUMN.sub(
            lambda place: question_part(values, place[1]), layout.template
        ).strip()
    earlier, question = turns_and_question(values, _first(values, layout.question)[0])
    if layout.context and (context := column_value(values, layout.context)):
        question = f"{context}\n\n{question}"
    return earlier, question


def _gold(values: Values, layout: Layout, code: CodeMode) -> str:
    """Return the gold answer; "" if the row has no answer and needs no answer."""
    if (
        all(is_blank(column_value(values, name)) for name, _ in layout.answer)
        and "answer" not in layout.needed
    ):
        return ""
    if code == "tests":
        name, reading = _first(values, layout.answer)
        value = column_value(values, name)
        tests = (
            json.dumps(value, default=str)
            if isinstance(value, (list, dict))
            else text(values, name, reading)
        )
        # Only for its errors: tests that cannot be read make a bad row, not failed verdicts.
        read_tests(tests)
        return tests
    answer = _answer(values, layout.answer)
    if layout.reading != "as_it_is" and answer.strip().lower() in MISSING_WORDS:
        raise ValueError(
            f'the answer is {answer!r}, as of a missing value; answer_reading = "as_it_is" takes it'
        )
    return answer


def _answer(values: Values, columns: Columns) -> str:
    name, reading = _first(values, columns)
    conversation = turns(column_value(values, name))
    if not conversation:
        return text(values, name, reading)
    if conversation[-1][0] != "assistant":
        raise ValueError(
            f"column {name!r} ends with a turn of the {conversation[-1][0]}; expected the assistant's"
        )
    return read(conversation[-1][1], name, reading)


def _code(values: Values, layout: Layout) -> CodeMode:
    if layout.tests_where is None:
        return layout.code
    column, value = layout.tests_where
    return "tests" if text(values, column, "as_it_is") == value else layout.code


def _first(values: Values, columns: Columns) -> Column:
    """Return the first of these columns that the row has; the last one where one is empty."""
    present = [column for column in columns if column_value(values, column[0]) is not None]
    if not present and len(columns) > 1:
        raise MissingColumn(f"none of the columns {', '.join(repr(name) for name, _ in columns)}")
    return present[0] if present else columns[-1]
