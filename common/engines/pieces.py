"""The text that each token adds to an answer, by the tokenizer alone: without torch."""

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


def pieces_of(tokenizer: Tokenizer, ids: NDArray[np.int32]) -> list[str]:
    """Return the text that each token adds, "" for a special one and for a part of a character."""
    stream = DecodeStream(skip_special_tokens=True)
    return [stream.step(tokenizer, token) or "" for token in ids.tolist()]
