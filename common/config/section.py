"""The base of every section of the run file (strict, frozen), and types of bounded numbers."""

import json
import re
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from functools import reduce
from typing import Annotated, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, model_validator

Mode = Literal["prefix", "direct"]

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Share = Annotated[float, Field(gt=0, le=1)]
AboveOne = Annotated[float, Field(gt=1, allow_inf_nan=False)]

Item = TypeVar("Item")
Several = Annotated[tuple[Item, ...], Field(strict=False)]
"""A list of the run file."""
Identifier = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")]
OrOff = BeforeValidator(lambda value: None if value == "off" else value)
"""For a key that is on by default: "off" stands for None, since TOML has no word for it."""

_is_run_file = ContextVar("is_run_file", default=False)
"""True while the section that is checked is a part of a user's run file."""
FROM_RUN_FILE = {"is_run_file": True}
"""Validation context of a user's run file: keys without effect are refused there even at their default values. A
resolved config, which names every key, is validated without it."""

OnlyWith = Mapping[str, tuple[tuple[object, ...], str]]
"""Keys that act only with some values of a controlling key: the values that they need, and why they
do nothing with other values."""


class Section(BaseModel):
    """A table of the run file."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, strict=True
    )

    ONLY_IN_MODE: ClassVar[OnlyWith] = {}
    """Keys that have an effect in one `mode` of the run only."""

    @model_validator(mode="after")
    def _checked(self, info: ValidationInfo) -> Self:
        """Call every `_check_...` of a section, those of its base first; each raises ValueError for what it refuses."""
        _is_run_file.set(bool(info.context))
        for kind in (each for each in reversed(type(self).__mro__) if issubclass(each, Section)):
            for check in (each for name, each in vars(kind).items() if name.startswith("_check_")):
                check(self)
        return self

    def is_given(self, key: str) -> bool:
        """Return True if the user set a key; in a resolved config, if it is not at its default."""
        if _is_run_file.get():
            return key in self.model_fields_set
        return bool(getattr(self, key) != type(self).model_fields[key].get_default())

    def refuse_given(self, keys: Iterable[str], condition: str, reason: str) -> None:
        """Raise ValueError for the first given key of these, which have no effect under a condition."""
        for key in keys:
            if self.is_given(key):
                raise ValueError(self.no_effect(key, condition, reason))

    def refuse_without_effect(self, tables: Mapping[str, OnlyWith]) -> None:
        """Raise ValueError naming each key without effect, by tables of controlling keys."""
        sentences = [
            sentence
            for control, table in tables.items()
            for sentence in self.without_effect(table, control, getattr(self, control))
        ]
        if sentences:
            raise ValueError("\n    ".join(sentences))

    def without_effect(self, table: OnlyWith, control: str, value: object) -> list[str]:
        """Return a sentence for every given key of `table` without effect while `control = value`."""
        return [
            f"{self.no_effect(key, assigned(control, value), reason)}, or use {control} = "
            f"{' or '.join(map(toml, values))}"
            for key, (values, reason) in table.items()
            if value not in values and self.is_given(key)
        ]

    def no_effect(self, key: str, condition: str, reason: str) -> str:
        """Return the sentence that refuses one key."""
        return f"{assigned(key, getattr(self, key))} has no effect with {condition}: {reason}; leave {key} out"

    def refuse_if(self, is_refused: object, keys: str, reason: str) -> None:
        """Raise ValueError for keys that do not go together, or for a key at its value, if the condition holds.

        Args:
            is_refused: the condition.
            keys: their names from this section on, with a space between two.
            reason: why they are refused, and the remedy.
        """
        if is_refused:
            values = [assigned(key, reduce(getattr, key.split("."), self)) for key in keys.split()]
            raise ValueError(f"{' with '.join(values)}: {reason}")


def assigned(key: str, value: object) -> str:
    """Write a key with its value as a run file has them."""
    return f"{key} absent" if value is None else f"{key} = {toml(value)}"


def toml(value: object) -> str:
    """Write a value as a run file has it."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json", exclude_unset=True)
    if isinstance(value, dict):
        quoted = {
            name if re.fullmatch(r"[\w-]+", name) else toml(name): each
            for name, each in value.items()
        }
        pairs = [f"{name} = {toml(each)}" for name, each in quoted.items()]
        return f"{{ {', '.join(pairs)} }}" if pairs else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    return json.dumps(value, ensure_ascii=False)
