"""A file of the user's own as a module: what it may hold, and what it leaves in this process."""

import math
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from prefixrl.common.config.foreign import user_function
from prefixrl.common.errors import ConfigError
from support.tables import program

DATACLASS = program(__file__, "DATACLASS")


def written(path: Path, source: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(source)
    return path


def modules() -> set[str]:
    return {name for name in sys.modules if name.startswith("prefixrl_user_")}


def test_a_file_may_define_dataclasses_with_postponed_annotations(tmp_path: Path) -> None:
    path = written(tmp_path / "mine.py", DATACLASS)
    assert user_function.load(f"{path}:score")("", "", "") == 0.5


def test_files_of_the_same_name_do_not_take_each_others_place(tmp_path: Path) -> None:
    functions = [
        user_function.load(
            f"{written(tmp_path / folder / 'mine.py', f'def f(): return {folder!r}')}:f"
        )
        for folder in ("a", "b")
    ]
    assert [function() for function in functions] == ["a", "b"]
    assert len({function.__module__ for function in functions}) == 2
    assert {function.__module__ for function in functions} <= modules()


def test_functions_of_one_file_share_its_module(tmp_path: Path) -> None:
    path = written(tmp_path / "mine.py", "seen = []\ndef f(): return seen\ndef g(): return seen\n")
    f, g = (user_function.load(f"{path}:{name}") for name in ("f", "g"))
    assert f() is g()


def test_a_file_that_does_not_run_leaves_no_module_behind(tmp_path: Path) -> None:
    path, before = written(tmp_path / "mine.py", "raise KeyError(3)\n"), modules()
    with pytest.raises(ConfigError, match=r"KeyError: 3 \(mine.py, line 1\); mend the file"):
        user_function.load(f"{path}:f")
    assert modules() == before


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, 1.0),
        (Fraction(1, 4), 0.25),
        (np.bool_(True), 1.0),
        (np.float32(0.25), 0.25),
        (np.int64(1), 1.0),
        (np.array(0.5), 0.5),
        (10**400, math.inf),
        (math.nan, math.nan),
        (None, math.nan),
        ("1", math.nan),
        (1j, math.nan),
        (np.array([0.5]), math.nan),
    ],
)
def test_a_number_is_a_float_whoever_made_it(value: object, expected: float) -> None:
    found = user_function.number(value)
    assert type(found) is float
    assert found == expected or (math.isnan(found) and math.isnan(expected))
