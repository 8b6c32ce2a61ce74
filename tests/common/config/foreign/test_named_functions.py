"""Functions that a run file names: found beside it, refused with file and line, read without being executed."""

from pathlib import Path

import pytest

from prefixrl.common.config.foreign import user_function
from prefixrl.common.config.load import from_json, import_functions, load
from prefixrl.common.errors import ConfigError


def refusal(run_file: Path, *settings: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(run_file, settings)
    return str(caught.value)


def test_a_function_is_found_beside_the_run_file(run_file: Path) -> None:
    (run_file.parent / "mine.py").write_text("def score(question, answer, gold):\n    return 1.0\n")
    config = load(run_file, ("reward.function=mine.py:score",))
    assert config.reward.function == f"{run_file.parent / 'mine.py'}:score"
    assert from_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("place", "source", "expected"),
    [
        pytest.param("mine", "", "is not FILE.py:NAME, for example", id="no file ending"),
        pytest.param("mine.py", "", "is not FILE.py:NAME, for example", id="no name"),
        pytest.param(
            "mine.py:no name", "", "is not FILE.py:NAME, for example", id="a name with a space"
        ),
        pytest.param("gone.py:f", "", "there is no such file (looked at ", id="no file"),
        pytest.param(
            "mine.py:f", "def g(): ...\n", "mine.py has no 'f'; it defines g", id="another function"
        ),
        pytest.param(
            "mine.py:f", "", "mine.py has no 'f'; it defines no function", id="an empty file"
        ),
        pytest.param(
            "mine.py:f",
            "def g():\n    def f(): ...\n",
            "mine.py has no 'f'; it defines g",
            id="a nested function",
        ),
        pytest.param(
            "mine.py:f",
            "print(f)\n",
            "mine.py has no 'f'; it defines no function",
            id="a name that is read only",
        ),
        pytest.param(
            "mine.py:f", "x = '\x00'\n", "mine.py is not valid Python: ", id="a null byte"
        ),
        pytest.param(
            "mine.py:f",
            "x = 1\ndef f(:\n",
            "SyntaxError: invalid syntax (mine.py, line 2)",
            id="a syntax error",
        ),
    ],
)
@pytest.mark.parametrize("key", user_function.CALLS)
def test_a_function_that_cannot_be_called_is_refused_with_file_line_and_reason(
    run_file: Path, key: str, place: str, source: str, expected: str
) -> None:
    (run_file.parent / "mine.py").write_text(source)
    message = refusal(run_file, f"{key}={place}", "algorithm.name=grpo")
    assert message.startswith(f"{key} = {place!r}")
    assert expected in message


@pytest.mark.parametrize(
    "source",
    [
        pytest.param("def f(question, text, gold): ...", id="def"),
        pytest.param("class f: ...", id="class"),
        pytest.param(
            "# -*- coding: utf-8 -*-\ndef f(question, text, gold, verdict): 'é'",
            id="a declared encoding",
        ),
        pytest.param("f = print", id="assignment"),
        pytest.param("from os import remove as f", id="import as"),
        pytest.param("from mine import *", id="import all"),
        pytest.param("if True:\n    def f(): ...", id="in a condition"),
        pytest.param("def f(): ...\nf = print", id="bound twice"),
        pytest.param("try:\n    import f\nexcept ImportError:\n    f = None", id="in a try"),
    ],
)
def test_reading_a_config_finds_the_name_however_it_is_bound_and_executes_nothing(
    run_file: Path, source: str
) -> None:
    executed = run_file.parent / "executed"
    (run_file.parent / "mine.py").write_text(f"open({str(executed)!r}, 'w').close()\n{source}\n")
    config = load(run_file, ("reward.function=mine.py:f",))
    assert config.reward.function == f"{run_file.parent / 'mine.py'}:f"
    assert not executed.exists()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        pytest.param("f = 3\n", "'f' in {path} is a int, not a function", id="no function"),
        pytest.param("from os import *\n", "{path} has no 'f'", id="import all without it"),
        pytest.param(
            "\n\nraise KeyError('k')\nf = 1",
            "KeyError: 'k' (mine.py, line 3); mend the file",
            id="an exception",
        ),
        pytest.param(
            "import sys\nsys.exit(3)\nf = 1",
            "SystemExit: 3 (mine.py, line 2); mend the file",
            id="an exit",
        ),
    ],
)
@pytest.mark.parametrize("key", user_function.CALLS)
def test_a_function_that_does_not_run_is_refused_before_anything_is_started(
    run_file: Path, key: str, source: str, expected: str
) -> None:
    path = run_file.parent / "mine.py"
    path.write_text(source)
    config = load(run_file, (f"{key}=mine.py:f", "algorithm.name=grpo"))
    with pytest.raises(ConfigError) as refused:
        import_functions(config)
    assert str(refused.value).startswith(f"{key} = '{path}:f': ")
    assert str(refused.value).endswith(expected.format(path=path))
