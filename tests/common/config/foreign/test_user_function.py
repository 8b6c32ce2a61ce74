"""A file of the user's own as a module: what it may hold, and what it leaves in this process."""

import math
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from prefixrl.common.config.foreign import user_function
from prefixrl.common.config.load import from_json, import_functions, load
from prefixrl.common.errors import ConfigError
from prefixrl.common.run.digests import file_digest, function_digest
from prefixrl.common.worker.allowed import NOTHING_ALLOWED, check
from support.packages import installed

DATACLASS = """
from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Weight:
    of: float = 0.5


def score(question, answer, gold):
    return Weight().of
"""


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
    actual = user_function.number(value)
    assert type(actual) is float
    assert actual == expected or (math.isnan(actual) and math.isnan(expected))


REWARDS = "[prefixrl.rewards]\nshort = stranger:score\n"
SCORE = "def score(question, text, gold):\n    return float(len(text) < 5)\n"


def test_a_reward_of_an_installed_package_is_found_by_its_name_alone(
    run_file: Path, tmp_path: Path
) -> None:
    with installed(tmp_path, "stranger", REWARDS, SCORE):
        config = load(run_file, ("reward.function=short",))
        assert config.reward.function == "short" and config.reward.is_own
        assert from_json(config.model_dump_json()) == config
        import_functions(config)
        assert user_function.load("short")("", "1234", "") == 1.0
        assert user_function.file_of("short") == tmp_path / "stranger.py"
        assert function_digest("short") == file_digest(tmp_path / "stranger.py")


def test_a_worker_calls_an_installed_reward_without_leave_and_no_file(
    run_file: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(SCORE)
    with installed(tmp_path, "stranger", REWARDS, SCORE):
        check(load(run_file, ("reward.function=short",)), NOTHING_ALLOWED)
        with pytest.raises(ConfigError, match="--allow-function"):
            check(load(run_file, ("reward.function=mine.py:score",)), NOTHING_ALLOWED)


def test_a_reference_with_a_colon_is_a_file_whatever_a_package_is_called(tmp_path: Path) -> None:
    entry = REWARDS.replace("short", f"{tmp_path}/mine.py:score")
    with installed(tmp_path, "stranger", entry, SCORE):
        assert user_function.is_file(f"{tmp_path}/mine.py:score")
        with pytest.raises(ConfigError, match="there is no such file"):
            user_function.resolve("reward.function", f"{tmp_path}/mine.py:score", tmp_path)


def test_a_reward_of_no_package_is_refused_with_those_that_there_are(
    run_file: Path, tmp_path: Path
) -> None:
    with installed(tmp_path, "stranger", REWARDS, SCORE):
        with pytest.raises(
            ConfigError, match=r"is not FILE\.py:NAME.*; installed packages add short"
        ):
            load(run_file, ("reward.function=long",))
        for function in (user_function.load, user_function.file_of):
            with pytest.raises(ConfigError, match="no package that is installed on this host adds"):
                function("long")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("1 / 0", "stranger 1.0 adds 'short' .* cannot be loaded: ZeroDivisionError"),
        ("score = 3", "stranger 1.0 adds 'short' .* is 3; expected a function of question, text"),
        ("def score(question): ...", "it is called with question, text, gold"),
    ],
)
def test_a_broken_reward_of_a_package_is_named(
    run_file: Path, tmp_path: Path, source: str, message: str
) -> None:
    with installed(tmp_path, "stranger", REWARDS, source):
        config = load(run_file, ("reward.function=short",))
        with pytest.raises(ConfigError, match=message):
            import_functions(config)
