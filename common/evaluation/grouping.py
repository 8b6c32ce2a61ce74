"""Values by key, in the order in which they come. Pure."""

from collections import defaultdict
from collections.abc import Iterable
from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


def grouped(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """Return the values of each key; keys and values keep their order."""
    groups = defaultdict[Key, list[Value]](list)
    for key, value in pairs:
        groups[key].append(value)
    return dict(groups)
