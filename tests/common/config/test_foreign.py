"""Files that others wrote: every fault of every reader is one sentence with the path."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from prefixrl.common.config.foreign import explained
from prefixrl.common.config.load import load
from prefixrl.common.errors import PrefixRLError, UserError
from prefixrl.common.models.config_file import document_of
from prefixrl.learner.data.files import data_files
from prefixrl.learner.run.directory import inputs

DEEP = b"[" * 200_000
BROKEN = {
    "cut": b'{"data_train": ["',
    "a list": b"[1, 2]",
    "a number": b"1" * 10_000,
    "deep": b'{"x": ' + DEEP,
    "UTF-16": '{"vocab_size": 3}'.encode("utf-16"),
    "empty": b"",
}
READERS: dict[str, Callable[[Path], object]] = {
    "config.json": lambda path: document_of(str(path.parent)),
    "inputs.json": lambda path: inputs(path.parent),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("fault", BROKEN)
def test_damage_of_a_json_file_is_a_sentence(fault: str, name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(BROKEN[fault])
    with pytest.raises(UserError, match=rf"{name} is damaged: [^\n]+; (restore|copy) ") as caught:
        READERS[name](tmp_path / name)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("seed = " + "7" * 10_000, "is not valid TOML: Exceeds the limit"),
        ("x = " + DEEP.decode(), "is not valid TOML: it is nested too deeply"),
        ('directory = "a\\u0000b"', "a path in it cannot be used: embedded null"),
        (f'directory = "{"d" * 5000}"', "a path in it cannot be used: File name too long"),
        (None, "cannot read the run file .*: it is a pipe, not a file"),
    ],
    ids=["long number", "deep", "NUL", "long path", "pipe"],
)
def test_a_strange_run_file_is_a_sentence(text: str | None, reason: str, tmp_path: Path) -> None:
    run_file = tmp_path / "run.toml"
    if text is None:
        os.mkfifo(run_file)
    else:
        usual = '[adapter]\nmodel = "org/a"\n[target]\nmodel = "org/t"\n[data]\ntrain = "t.jsonl"\n'
        run_file.write_text(f"{text}\n{usual}[algorithm]\niterations = 1\n")
    (tmp_path / "t.jsonl").touch()
    with pytest.raises(PrefixRLError, match=reason):
        load(run_file)


@pytest.mark.parametrize(("path", "kind"), [("/dev/zero", "a device"), ("pipe", "a pipe")])
def test_data_that_would_be_read_for_ever_is_named(path: str, kind: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match=f"{path}: it is {kind}, not a file"):
        data_files(tmp_path / path, None, None)


def test_a_panic_of_a_library_is_a_sentence_and_an_interrupt_stays_one() -> None:
    panic = type("PanicException", (BaseException,), {})
    with (
        pytest.raises(UserError, match="no tokenizer can be read: out of stack"),
        explained("no tokenizer can be read"),
    ):
        raise panic("out of stack")
    with pytest.raises(KeyboardInterrupt), explained("a file"):
        raise KeyboardInterrupt
