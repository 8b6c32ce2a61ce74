"""A line of `metrics.jsonl` as flat columns. Pure."""

from collections.abc import Iterator

import msgspec

from prefixrl.common.run.documents import MetricsLine

LEFT_OUT = ("histograms", "engines")
"""Fields that are no number per iteration."""


def columns(line: MetricsLine) -> dict[str, float]:
    """Return the numbers of an iteration by name.

    Names are as in `figures/reward`, `busy_fraction/scorer`, `drift/0/rows`. None has no column.
    """
    document = msgspec.to_builtins(line)
    return dict(_flat({name: each for name, each in document.items() if name not in LEFT_OUT}, ""))


def _flat(value: object, name: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _flat(each, f"{name}/{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        # Ages are named by what they are, not by where they stand.
        for index, each in enumerate(value):
            key = each["age"] if isinstance(each, dict) and "age" in each else index
            yield from _flat(each, f"{name}/{key}")
    elif isinstance(value, bool | int | float):
        yield name, float(value)
