"""Tokenizers of hand-made folders: the file's own splitting counts, not that of the model's family."""

import json
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config

from prefixrl.common.errors import DataError
from prefixrl.common.prompts.rendering import Renderer
from prefixrl.common.prompts.tokenizer import load_tokenizer
from support.paths import EXAMPLE


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of Qwen2's architecture with a token per character, spaces included."""
    characters = ["<end>", *map(chr, range(32, 127))]
    tokenizer = Tokenizer(
        models.WordLevel({token: number for number, token in enumerate(characters)}, "<end>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(tmp_path)
    Qwen2Config(vocab_size=len(characters)).save_pretrained(tmp_path)
    return tmp_path


def test_a_tokenizer_that_its_folder_calls_whole_keeps_its_own_splitter_under_any_architecture(
    folder: Path,
) -> None:
    tokenizer = load_tokenizer(str(folder))
    ids = tokenizer.encode("plus 3 4", add_special_tokens=False)
    assert tokenizer.decode(ids) == "plus 3 4"
    assert Renderer(str(folder), 100).misread_text() is None


def test_a_tokenizer_that_transformers_reads_otherwise_than_its_file_is_told(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(document | {"tokenizer_class": "Qwen2Tokenizer"}), encoding="utf-8")
    assert Renderer(str(folder), 100).misread_text() == "plus 3 14, please"


def test_the_shipped_models_read_as_their_files_say() -> None:
    for name in ("adapter", "target"):
        assert Renderer(str(EXAMPLE / name), 100).misread_text() is None


def test_a_folder_without_a_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    Qwen2Config().save_pretrained(tmp_path)
    with pytest.raises(DataError, match=f"no tokenizer of {tmp_path} can be read"):
        load_tokenizer(str(tmp_path))
