"""The tokenizer of a model folder, as the folder's files have it."""

from pathlib import Path
from typing import Any

from prefixrl.common.config.foreign.files import explained
from prefixrl.common.errors import DataError
from prefixrl.common.host.hub import cached_file

_WHOLE_FILE = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes of `tokenizer_config.json` that say: tokenizer.json is all there is."""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)
_PROBES = ("plus 3 14, please", "It's (x + 1)/2 = 12.5;\n\n  y\tis Ünknown!", "  two  spaces ")


def load_tokenizer(model: str) -> Any:
    """Return the tokenizer of a model folder or hub name; raise DataError without one."""
    # Late: a simulated engine has no tokenizer.
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    if Path(model).is_dir() and not has_tokenizer(model):
        # By the architecture alone transformers would make one that knows no word.
        raise DataError(
            f"no tokenizer of {model} can be read: it has none of {', '.join(TOKENIZER_FILES)}"
        )
    with explained(f"no tokenizer of {model} can be read", DataError):
        # AutoTokenizer goes by the model's architecture and puts that family's splitter in place of the file's own.
        is_whole = get_tokenizer_config(model).get("tokenizer_class") in _WHOLE_FILE
        return (PreTrainedTokenizerFast if is_whole else AutoTokenizer).from_pretrained(model)


def has_tokenizer(folder: str) -> bool:
    """Return True if a folder holds files of a tokenizer."""
    return any((Path(folder) / name).is_file() for name in TOKENIZER_FILES)


def misread_text(tokenizer: Any, model: str) -> str | None:
    """Return a text that is read otherwise than by the model's tokenizer.json, if any."""
    path = cached_file(model, "tokenizer.json")
    if path is None or not Path(path).is_file():
        return None
    from tokenizers import Tokenizer

    of_file = Tokenizer.from_file(str(path))
    for text in _PROBES:
        if (
            tokenizer.encode(text, add_special_tokens=False)
            != of_file.encode(text, add_special_tokens=False).ids
        ):
            return text
    return None
