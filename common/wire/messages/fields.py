"""Limits and base classes of all messages."""

from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, dataclass_transform, get_type_hints

import msgspec
from msgspec import Meta

VERSIONS_KEPT = 1024
"""Newest versions whose digests are known: more than any window, evaluation or sleeping worker spans."""
UNPROVED = -1
"""Value in place of a version while no version may be claimed."""
Role = Literal["rollout", "scorer", "rank", "operator"]
MOST_NAME_CHARS = 256
MOST_TEXT_CHARS = 4096
Name = Annotated[str, Meta(max_length=MOST_NAME_CHARS)]
"""A name, digest or host; longer ones are refused where they arrive."""
Text = Annotated[str, Meta(max_length=MOST_TEXT_CHARS)]
"""A reason, state or short answer; its sender cuts it with `cut_text`."""
Count = Annotated[int, Meta(ge=0, le=2**53)]
MOST_ROWS = 8192
"""More rows than any engine takes at once. A worker that offers more would take all work."""
MOST_SAMPLES = 2**16
"""Rows of one group, the draws of which are made at once."""
MOST_GROUPS = 2**20
"""Groups that a rank may ask for at once."""
MOST_LEASES_LISTED = 2**15
"""A worker holds fewer tasks than rows, and the broker gives it a small multiple of `MOST_ROWS` at most."""
Version = Annotated[int, Meta(ge=UNPROVED, le=2**31 - 1)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]
"""A time or another figure that is not negative; neither NaN nor infinite."""


@dataclass(frozen=True)
class RowFigure:
    """Mark of a field of a row or of its verdict: its mean over the trained rows is a figure of every iteration."""

    name: str
    """Name of the figure, as `docs/data.md` lists it."""


@cache
def row_figures(kind: type[msgspec.Struct]) -> dict[str, str]:
    """Return the fields of a struct that are marked `RowFigure`, with the names of their figures."""
    return {
        field: mark.name
        for field, hint in get_type_hints(kind, include_extras=True).items()
        for mark in getattr(hint, "__metadata__", ())
        if isinstance(mark, RowFigure)
    }


def encodable(text: str) -> str:
    """Return a text without lone surrogates, which no message can hold."""
    return text.encode(errors="replace").decode()


def cut_text(text: str) -> str:
    """Return a text short enough to be sent as `Text`, in characters that can be encoded."""
    cut = text if len(text) <= MOST_TEXT_CHARS else text[: MOST_TEXT_CHARS - 4] + " ..."
    return encodable(cut)


def common_fields(kind: type[msgspec.Struct], *sources: object) -> dict[str, Any]:
    """Return the fields of a struct that sources have under the same names; the last source wins."""
    return {
        name: getattr(each, name)
        for each in sources
        for name in kind.__struct_fields__
        if hasattr(each, name)
    }


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))
class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True, gc=False):
    """A message of one of the unions; its tag is its class name. All of them are frozen, as this class is.

    Messages and their parts are trees of plain values: no cycle can hold one, so the garbage collector need not look.
    """


class Leased(Message):
    """A message about one lease of a task."""

    task: Name
    """Name that no other lease ever has."""


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))
class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A piece of a message; all of them are frozen, as this class is."""
