"""Tables of cases in a folder's `cases.toml`: of each test by its name, the names of its arguments and rows of them.

Its `programs.toml` has, by file and name, the programs that its tests start or load.
"""

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def table(file: str) -> Callable[[Any], Any]:
    """Give a test of a file (`__file__`) the cases that stand beside it; a list in a row is a tuple."""

    def give(test: Any) -> Any:
        found = tomllib.loads(Path(file).with_name("cases.toml").read_text(encoding="utf-8"))[
            test.__name__
        ]
        rows = [
            tuple(tuple(each) if isinstance(each, list) else each for each in row)
            for row in found["rows"]
        ]
        return pytest.mark.parametrize(found["names"], rows)(test)

    return give


def program(file: str, name: str) -> str:
    """The source of a program of a test's file (`__file__`)."""
    path = Path(file)
    found: str = tomllib.loads(path.with_name("programs.toml").read_text(encoding="utf-8"))[
        path.stem
    ][name]
    return found
