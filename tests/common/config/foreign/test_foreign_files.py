"""Files that others wrote: every fault of every reader is one sentence with the path."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from prefixrl.common.config.foreign.files import explained
from prefixrl.common.config.load import load
from prefixrl.common.errors import PrefixRLError, UserError
from prefixrl.common.models.config_file import document_of
from prefixrl.common.prompts.rendering import Renderer
from prefixrl.learner.check.model_shapes import shape_of
from prefixrl.learner.data.files import data_files
from prefixrl.learner.run.directory import inputs
from support.runs.run_helper import RUN_FILE

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


def test_a_text_that_ends_the_tokenizers_search_is_a_sentence_and_a_text_that_does_not_is_encoded(
    tmp_path: Path,
) -> None:
    shutil.copytree(RUN_FILE.parent / "adapter", tmp_path / "m")
    known = json.loads((tmp_path / "m" / "tokenizer.json").read_text())
    known["pre_tokenizer"] |= {"pattern": {"Regex": r"(?=([a-z ]+)+[0-9]{9}q?)\w|\w"}}
    (tmp_path / "m" / "tokenizer.json").write_text(json.dumps(known))
    renderer = Renderer(str(tmp_path / "m"), 1000)
    assert renderer.encode("a b").size
    for encode in (renderer.prompt, renderer.encode, renderer.encode_literal):
        with pytest.raises(
            ValueError, match=r"the tokenizer of .*/m cannot encode '.*x+': .*retry-limit"
        ):
            encode("x" * 60)


@pytest.mark.parametrize("size", ["many", 0, -64, 2.5, None, [64]])
def test_sizes_of_a_config_that_are_none_give_no_shape(size: object, tmp_path: Path) -> None:
    config = json.loads((RUN_FILE.parent / "target" / "config.json").read_text())
    config |= {
        "architectures": ["LlamaForCausalLM"],
        "intermediate_size": config.get("intermediate_size", 64),
    }
    for changed, is_known in ((config, True), (config | {"hidden_size": size}, False)):
        (tmp_path / "config.json").write_text(json.dumps(changed))
        assert (shape_of(str(tmp_path)) is not None) == is_known
