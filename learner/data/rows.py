"""A row to a problem: the columns of its parts, and the way to read them. Pure."""

import math
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from prefixrl.common.config.data import TASK_SUFFIXES, Column, DataConfig, ProblemSet, Reading, Source
from prefixrl.common.prompts.extract import extract_answer
from prefixrl.common.wire.messages.groups import CodeMode, Prompt

SHOWN_CHARS = 60
MOST_FAMILIES = 16
"""Families of a source up to which each has figures of its own."""


class Problem(msgspec.Struct, frozen=True):
    """One problem; `family` is "" where the data names none."""

    prompt_id: str
    question: str
    """The text that is asked, with its suffix."""
    gold: str
    family: str = ""
    code: CodeMode = "none"
    source: str = ""
    """Label of its source."""
    system: str = ""
    """Its own system turn; "" without one."""

    def prompt(self) -> Prompt:
        """Return the part that workers see."""
        return Prompt(self.prompt_id, self.question, self.gold, self.code, self.system)


def prompts(problems: Sequence[Problem]) -> list[Prompt]:
    """Return what workers see, each under the name that its figures are listed under."""
    families: dict[str, set[str]] = defaultdict(set)
    for each in problems:
        families[each.source].add(each.family)
    has_own = {source for source, names in families.items() if 1 < len(names) <= MOST_FAMILIES}
    found = []
    for each in problems:
        name = f"{each.source}/{each.family}" if each.source in has_own and each.family else each.source
        found.append(msgspec.structs.replace(each.prompt(), source=name))
    return found


class MissingColumn(ValueError):
    """A row lacks a column. The message does not list its columns: the row holds only those that were read."""


@dataclass(frozen=True)
class Layout:
    """Columns of the parts of a problem in the rows of one source."""

    question: tuple[Column, ...]
    answer: tuple[Column, ...]
    context: str
    id: tuple[str, ...]
    must_have_id: bool
    family: str
    must_have_family: bool
    suffix: str
    code: CodeMode
    tests_where: tuple[str, str] | None
    where: Mapping[str, tuple[str, ...]]
    must_have_answer: bool = True
    task_suffixes: tuple[str, str] = ("", "")
    """Texts behind `suffix`: of mathematics, and of tasks that tests judge."""
    has_system: bool = False

    def ending(self, code: CodeMode) -> str:
        """Return the text behind the question of a problem that is judged so."""
        return self.suffix + self.task_suffixes[code == "tests"]

    @property
    def columns(self) -> frozenset[str]:
        """Every column that may be read; `a.b` is a column of that name, or within `a`."""
        named = [name for name, _ in (*self.question, *self.answer)]
        named += [self.context, self.family, *self.id, *self.where, self.tests_where[0] if self.tests_where else ""]
        return frozenset(each for name in named if name for each in (name, name.partition(".")[0]))


def layout(source: Source, data: DataConfig) -> Layout:
    """Return the layout by the keys of a source, else of its problem set, else of `[data]`."""
    known = source.problem_set or ProblemSet(
        hub="",
        problems=0,
        question=((data.question_column, "text"),),
        answer=((data.answer_column, "text"),),
        id=(data.id_column or "id",),
        family=data.family_column or "",
        suffix="",
    )
    is_plain = source.problem_set is None
    given_id = source.id_column or (data.id_column if is_plain else None)
    given_family = source.family_column or (data.family_column if is_plain else None)
    return Layout(
        question=((source.question_column, "text"),) if source.question_column else known.question,
        answer=((source.answer_column, "text"),) if source.answer_column else known.answer,
        context=known.context,
        id=(given_id,) if given_id else known.id,
        must_have_id=given_id is not None,
        family=given_family or known.family,
        must_have_family=given_family is not None,
        suffix=known.suffix if source.suffix is None else source.suffix,
        code=source.code or ("none" if known.tests_where else data.code),
        tests_where=None if source.code else known.tests_where,
        where=known.where | {column: tuple(map(str, values)) for column, values in source.where.items()},
        task_suffixes=TASK_SUFFIXES[source.task_suffix] if source.task_suffix else ("", ""),
        has_system=source.keep_system,
    )


def is_wanted(values: Mapping[str, object], layout: Layout) -> bool:
    """Return True if a row passes `where`; raise ValueError where one of its columns is missing."""
    return all(not _spellings(values, name).isdisjoint(wanted) for name, wanted in layout.where.items())


def _spellings(values: Mapping[str, object], name: str) -> set[str]:
    """Return the texts by which `where` may name a value."""
    # MATH writes "Level 3", MATH-500 writes 3, and a table that lacks some levels holds floats and NaN.
    if isinstance(value := _found(values, name), float) and not math.isfinite(value):
        return set()
    text = _text(values, name, "text").removeprefix("Level ")
    return {text, text.removesuffix(".0")} if isinstance(value, float) else {text}


def problem(values: Mapping[str, object], layout: Layout, default_id: str, source: str) -> Problem:
    """Return the problem in a row; raise ValueError with the reason where there is none."""
    question = _first(values, layout.question)
    if layout.context and (context := _found(values, layout.context)):
        question = f"{context}\n\n{question}"
    names = [name for name in layout.id if name.partition(".")[0] in values or layout.must_have_id]
    family = layout.family
    code = _code(values, layout)
    has_family = family and (layout.must_have_family or _found(values, family) is not None)
    return Problem(
        prompt_id=_text(values, names[0], "text") if names else default_id,
        question=question + layout.ending(code),
        gold=_gold(values, layout),
        family=_text(values, family, "text") if has_family else "",
        code=code,
        source=source,
        system=_system_turn(values, layout) if layout.has_system else "",
    )


def _gold(values: Mapping[str, object], layout: Layout) -> str:
    """Return the gold answer; "" where the row has none and needs none."""
    given = [_found(values, name) for name, _ in layout.answer]
    is_blank = all(each is None or each == [] or not str(each).strip() for each in given)
    return "" if is_blank and not layout.must_have_answer else _first(values, layout.answer)


def _code(values: Mapping[str, object], layout: Layout) -> CodeMode:
    if layout.tests_where is None:
        return layout.code
    column, wanted = layout.tests_where
    return "tests" if _text(values, column, "text") == wanted else layout.code


def _first(values: Mapping[str, object], columns: tuple[Column, ...]) -> str:
    """Return the text of the first of these columns that the row has."""
    for name, reading in columns[:-1]:
        if _found(values, name) is not None:
            return _text(values, name, reading)
    present = [name for name, _ in columns if _found(values, name) is not None]
    if not present and len(columns) > 1:
        named = ", ".join(repr(name) for name, _ in columns)
        raise MissingColumn(f"none of the columns {named}")
    return _text(values, *columns[-1])


def _found(values: Mapping[str, object], name: str) -> object:
    """Return the value of a column, None where it is missing; `a.b` is b within a."""
    if name in values:
        return values[name]
    outer, dot, inner = name.partition(".")
    within = values.get(outer) if dot else None
    return _found(within, inner) if isinstance(within, dict) else None


def _text(values: Mapping[str, object], name: str, reading: Reading) -> str:
    outer = name.partition(".")[0]
    if name not in values and outer not in values:
        raise MissingColumn(f"no column {name!r}")
    value = _found(values, name)
    if reading == "user_turn":
        return _user_turn(name, value)
    if reading == "joined" and isinstance(value, list):
        value = ", ".join(str(each) for each in value)
    if isinstance(value, bool) or not isinstance(value, (str, int, float)) or not str(value).strip():
        raise ValueError(f"column {name!r} is {_shown(value)}; expected text or a number")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"column {name!r} is {value}; expected text or a finite number")
    text = str(value)
    if reading == "after_hashes":
        _, hashes, answer = text.rpartition("####")
        answer = answer.replace(",", "").replace("$", "").strip()
        if not hashes or not answer:
            raise ValueError(f"column {name!r} has no answer after ####: {_shown(text)}")
        return answer
    if reading == "last_box":
        if (box := extract_answer(text)) is None:
            raise ValueError(f"column {name!r} has no closed \\boxed{{}}: {_shown(text)}")
        return box
    return text


def _user_turn(name: str, value: object) -> str:
    texts = _turns(value, "user")
    if not texts or not isinstance(texts[-1], str) or not texts[-1].strip():
        raise ValueError(
            f"column {name!r} is {_shown(value)}; expected turns with role and content, one of them the user's"
        )
    return texts[-1]


def _system_turn(values: Mapping[str, object], layout: Layout) -> str:
    found = (_found(values, name) for name, reading in layout.question if reading == "user_turn")
    texts = [text for value in found for text in _turns(value, "system")]
    # Rows share theirs: once in memory is enough.
    return sys.intern(texts[0]) if texts and isinstance(texts[0], str) else ""


def _turns(value: object, role: str) -> list[object]:
    """Return the contents of a conversation's turns of one role."""
    turns = value if isinstance(value, list) else []
    asked = (turn for turn in turns if isinstance(turn, dict) and turn.get("role") == role)
    return [turn["content"] for turn in asked if "content" in turn]


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "…"
