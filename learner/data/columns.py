"""The columns of a row to text: columns within columns, ways of reading, conversations, lists of options. Pure."""

import ast
import math
import re
from collections.abc import Mapping
from decimal import Decimal

import msgspec

from prefixrl.common.config.data import Reading
from prefixrl.common.prompts.extract import extract_answer
from prefixrl.common.wire.messages.groups import Turn

Values = Mapping[str, object]
SHOWN_CHARS = 60
ROLES = {"human": "user", "gpt": "assistant", "developer": "system"}
"""Roles of other names."""
_ASKED_ROLES = ("system", "user", "assistant")
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:/\d+)?|-?\.\d+")
_UNIT = re.compile(r"(.*\d.*?)\s+\([^()]*\)")
_LETTERED = re.compile(r"\s*\(?[A-Z0-9][).:]")


class MissingColumn(ValueError):
    """A row lacks a column. The message does not list its columns: the row holds only those that were read."""


def column_value(values: Values, name: str) -> object:
    """Return the value of a column, None where it is missing; `a.b` is b within a, which may be JSON text."""
    if name in values:
        return values[name]
    outer, dot, inner = name.partition(".")
    within = _decoded(values.get(outer)) if dot else None
    return column_value(within, inner) if isinstance(within, dict) else None


def is_blank(value: object) -> bool:
    """Return True for a value that says nothing."""
    return value is None or value == [] or (isinstance(value, str) and not value.strip())


def _decoded(value: object) -> object:
    """Return what a text of JSON, or of a Python literal, holds; any other value as it is."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("{", "["):
        return value
    try:
        return msgspec.json.decode(value)
    except (ValueError, RecursionError, msgspec.MsgspecError):
        pass
    try:
        return ast.literal_eval(value) if "{'" in value else value
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return value


def text(values: Values, name: str, reading: Reading) -> str:
    """Return the text of a column; raise MissingColumn, or ValueError where it holds none."""
    value = _scalar(values, name, is_joined=reading == "joined")
    if (
        isinstance(value, bool)
        or not isinstance(value, (str, int, float))
        or not str(value).strip()
    ):
        joined = (
            '; answer_reading = "joined" takes a list' if isinstance(value, list) and value else ""
        )
        raise ValueError(
            f"column {name!r} is {beginning_of(value)}; expected text or a number{joined}"
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"column {name!r} is {value}; expected text or a finite number")
    return read(str(value), name, reading)


def _scalar(values: Values, name: str, is_joined: bool) -> object:
    if name not in values and name.partition(".")[0] not in values:
        raise MissingColumn(f"no column {name!r}")
    value = column_value(values, name)
    if (
        isinstance(value, list)
        and value
        and (len(value) == 1 or is_joined)
        and turns(value) is None
    ):
        value = ", ".join(map(str, value)) if len(value) > 1 else value[0]
    if isinstance(value, Decimal):
        return format(value, "f") if value.is_finite() else float(value)
    return value.decode() if isinstance(value, bytes) else value


def read(content: str, name: str, reading: Reading) -> str:
    """Return the part of a column's text that a reading takes; raise ValueError where it has none."""
    if reading == "after_hashes":
        _, hashes, answer = content.rpartition("####")
        answer = answer.replace(",", "").replace("$", "").strip()
        if not hashes or not answer:
            raise ValueError(f"column {name!r} has no answer after ####: {beginning_of(content)}")
        return answer
    if reading == "last_box":
        if (box := extract_answer(content)) is None:
            raise ValueError(f"column {name!r} has no closed \\boxed{{}}: {beginning_of(content)}")
        return box
    if reading == "last_number":
        if not (numbers := _NUMBER.findall(content)):
            raise ValueError(f"column {name!r} has no number: {beginning_of(content)}")
        return str(numbers[-1]).replace(",", "")
    if reading == "before_unit" and (unit := _UNIT.fullmatch(content.strip())):
        return unit[1]
    return content


def turns(value: object) -> list[Turn] | None:
    """Return the turns of a conversation as role and text, None for another value; raise ValueError."""
    value = _decoded(value)
    if not isinstance(value, list) or not value:
        return None
    has_roles = all(isinstance(turn, dict) and ("role" in turn or "from" in turn) for turn in value)
    return [_turn(turn) for turn in value] if has_roles else None


def _turn(turn: Values) -> Turn:
    role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
    if isinstance(content, list) and all(
        isinstance(part, dict) and "text" in part for part in content
    ):
        content = "".join(str(part["text"]) for part in content)
    role = ROLES.get(str(role), str(role))
    if role not in _ASKED_ROLES or not isinstance(content, str):
        raise ValueError(
            f"a turn is {beginning_of(turn)}; expected a role of {', '.join(_ASKED_ROLES)}, and text as content"
        )
    return role, content


def turns_and_question(values: Values, name: str) -> tuple[list[Turn], str]:
    """Return the turns before the question, and the question: the last turn of the user; raise ValueError."""
    if not (conversation := turns(column_value(values, name))):
        return [], text(values, name, "as_it_is")
    last = max(
        (index for index, (role, _) in enumerate(conversation) if role == "user"), default=-1
    )
    if last < 0 or not conversation[last][1].strip():
        raise ValueError(
            f"column {name!r} is {beginning_of(column_value(values, name))}; expected turns, one of them the user's"
        )
    return conversation[:last], conversation[last][1]


def question_part(values: Values, name: str) -> str:
    """Return a column as a part of a question: "" where it is empty, options line by line with their letters."""
    value = _decoded(column_value(values, name))
    if (
        isinstance(value, dict)
        and isinstance(value.get("text"), list)
        and isinstance(value.get("label"), list)
    ):
        # Some sets keep letters and texts of their options in two lists.
        value = dict(zip(map(str, value["label"]), value["text"], strict=False))
    if (
        isinstance(value, list)
        and len(value) > 1
        and not all(_LETTERED.match(str(each)) for each in value)
    ):
        # Options without letters get some: the gold answer may be a letter.
        value = {chr(ord("A") + index): each for index, each in enumerate(value)}
    if isinstance(value, dict):
        return "\n".join(f"{letter}) {each}" for letter, each in value.items())
    if isinstance(value, list):
        return "\n".join(map(str, value))
    has_column = name in values or name.partition(".")[0] in values
    return "" if has_column and is_blank(value) else text(values, name, "as_it_is")


def beginning_of(value: object) -> str:
    """Return the beginning of a value for a message."""
    written = repr(value)
    return written if len(written) <= SHOWN_CHARS else written[:SHOWN_CHARS] + "…"
