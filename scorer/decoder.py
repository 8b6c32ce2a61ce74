"""From token ids to text by `tokenizer.json` alone, so that a scorer of direct mode starts in a second and needs no torch."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from prefixrl.common.errors import DataError


class Decoder:
    """The tokenizer of a model folder."""

    def __init__(self, model: str) -> None:
        """Read the tokenizer; raises DataError when there is none that can be read."""
        path = Path(model) / "tokenizer.json"
        try:
            self._tokenizer: Tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # what the library raises has no class of its own
            raise DataError(
                f"no tokenizer of {model} can be read: {error}; direct mode needs a tokenizer.json there "
                "(AutoTokenizer.from_pretrained(...).save_pretrained(...) writes one)"
            ) from error

    def text(self, ids: NDArray[np.int32]) -> str:
        """Text of an answer, special tokens left out."""
        return str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=True))
