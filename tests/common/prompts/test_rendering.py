"""Questions to ids and back, with the shipped example's tokenizer and hand-made model folders."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from prefixrl.common.errors import DataError
from prefixrl.common.prompts.rendering import ByteRenderer, Renderer
from support.paths import EXAMPLE

ADAPTER = EXAMPLE / "adapter"
QUESTION = "sum 3 1 4 1 5 9 2 6"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The example's tokenizer in a folder of its own, without weights."""
    return Path(
        shutil.copytree(ADAPTER, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    )


def edit(path: Path, **changes: object) -> None:
    document = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps(document), encoding="utf-8")


def test_a_question_becomes_the_opened_assistant_turn_of_the_models_own_template() -> None:
    tokenizer = AutoTokenizer.from_pretrained(ADAPTER)
    turns = [{"role": "user", "content": QUESTION}]
    expected = tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    ids = Renderer(str(ADAPTER), 100).prompt(QUESTION)
    assert ids.dtype == np.int32
    assert ids.tolist() == expected


def test_without_a_template_the_question_itself_is_the_prompt(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    renderer = Renderer(str(folder), 100)
    expected = AutoTokenizer.from_pretrained(folder).encode(QUESTION)
    assert renderer.prompt(QUESTION).tolist() == expected


def test_a_prompt_over_the_limit_is_refused_with_both_numbers() -> None:
    size = Renderer(str(ADAPTER), 100).prompt(QUESTION).size
    assert Renderer(str(ADAPTER), size).prompt(QUESTION).size == size
    with pytest.raises(ValueError, match=rf"^prompt has {size} tokens, allowed .* {size - 1} "):
        Renderer(str(ADAPTER), size - 1).prompt(QUESTION)


def test_stop_tokens_are_all_the_ends_the_folder_declares(folder: Path) -> None:
    own = AutoTokenizer.from_pretrained(folder).eos_token_id
    edit(folder / "config.json", eos_token_id=3)
    edit(folder / "generation_config.json", eos_token_id=[4, 5], temperature=9.0)
    assert Renderer(str(folder), 100).stop_tokens == {own, 3, 4, 5}
    edit(folder / "config.json", eos_token_id=None)
    (folder / "generation_config.json").unlink()
    assert Renderer(str(folder), 100).stop_tokens == {own}


def test_a_model_without_any_end_is_refused_with_the_remedy(folder: Path) -> None:
    edit(folder / "config.json", eos_token_id=None)
    edit(folder / "generation_config.json", eos_token_id=None)
    edit(folder / "tokenizer_config.json", eos_token=None)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(DataError, match=r"model declares no end-of-sequence.*set eos_token in"):
        Renderer(str(folder), 100)


def test_only_a_stop_token_at_the_end_is_taken_off() -> None:
    renderer = Renderer(str(ADAPTER), 100)
    (stop,) = renderer.stop_tokens
    for given_ids, expected in (
        ([5, 6, stop], [5, 6]),
        ([stop], []),
        ([5, stop, stop], [5, stop]),
        ([stop, 5], [stop, 5]),
        ([5, 6], [5, 6]),
        ([], []),
    ):
        ids = np.asarray(given_ids, dtype=np.int32)
        assert renderer.without_stop(ids).tolist() == expected


def test_text_is_that_of_the_ids_without_special_tokens() -> None:
    renderer = Renderer(str(ADAPTER), 100)
    ids = renderer.encode("Let us add them up: 3 4")
    (stop,) = renderer.stop_tokens
    assert renderer.text(ids) == "Let us add them up: 3 4"
    assert renderer.text(np.append(ids, np.int32(stop))) == renderer.text(ids)


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_bytes_stand_in_for_a_tokenizer_without_loss(text: str) -> None:
    renderer = ByteRenderer()
    assert renderer.text(renderer.encode(text)) == text
    closed = np.append(renderer.encode(text), np.int32(0))
    assert renderer.without_stop(closed).tolist() == renderer.encode(text).tolist()
