"""From a question to the token ids a model sees, and back: the model's own tokenizer and chat template, nothing else."""

import json
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from prefixrl.common.engine import TokenIds
from prefixrl.common.errors import DataError


class Renderer:
    """Renders questions as the opened assistant turn and decodes continuations.

    `stop_tokens` are the end-of-turn ids the model folder declares (tokenizer, config, generation config): only ids are read
    there, no sampling setting.
    """

    def __init__(self, model: str, max_prompt_tokens: int) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._max_prompt_tokens = max_prompt_tokens
        self.stop_tokens = frozenset(_declared_stops(model, self._tokenizer.eos_token_id))
        if not self.stop_tokens:
            raise DataError(
                f"{model} declares no end-of-sequence token; set eos_token in its tokenizer_config.json"
            )

    def prompt(self, question: str) -> TokenIds:
        """Ids of the rendered question; raises ValueError when it is over the limit."""
        if self._tokenizer.chat_template:
            turns = [{"role": "user", "content": question}]
            text = self._tokenizer.apply_chat_template(
                turns, add_generation_prompt=True, tokenize=False
            )
            ids = self._tokenizer.encode(text, add_special_tokens=False)
        else:
            ids = self._tokenizer.encode(question)
        if not 0 < len(ids) <= self._max_prompt_tokens:
            raise ValueError(
                f"prompt has {len(ids)} tokens, allowed are 1 to {self._max_prompt_tokens}"
            )
        return np.asarray(ids, dtype=np.int32)

    def encode(self, text: str) -> TokenIds:
        """Ids of a piece of an answer."""
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)

    def text(self, ids: TokenIds) -> str:
        """Text of an answer, special tokens left out."""
        return str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=True))

    def raw(self, ids: TokenIds) -> str:
        """Text of ids, special tokens written out: two tokenizers that agree on it mean the same tokens."""
        return str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=False))

    def unopened(self, ids: TokenIds) -> str:
        """As `raw`, without what the tokenizer itself puts before every text (a BOS): for whoever encodes the text again so."""
        whole, bare = self._tokenizer.encode("1"), self.encode("1").tolist()
        opening = whole[: len(whole) - len(bare)] if whole[-len(bare) :] == bare else []
        is_opened = bool(opening) and ids[: len(opening)].tolist() == opening
        return self.raw(ids[len(opening) :] if is_opened else ids)

    def encode_plain(self, text: str) -> TokenIds:
        """Ids of a text in which nothing is a special token, whatever it looks like."""
        ids = self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        return np.asarray(ids, dtype=np.int32)

    def without_stop(self, ids: TokenIds) -> TokenIds:
        """A prefix as the target continues it: a stop token at its end is taken off, or the turn would be closed."""
        return ids[:-1] if ids.size and int(ids[-1]) in self.stop_tokens else ids


def _declared_stops(model: str, tokenizer_eos: int | None) -> set[int]:
    stops = set() if tokenizer_eos is None else {int(tokenizer_eos)}
    for name in ("config.json", "generation_config.json"):
        path = Path(model) / name
        if path.is_file():
            declared = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            stops.update([declared] if isinstance(declared, int) else declared or [])
    return stops


class ByteRenderer:
    """What stands in for a tokenizer where the engine is simulated: the UTF-8 bytes of the text."""

    stop_tokens = frozenset({0})

    def prompt(self, question: str) -> TokenIds:
        """Bytes of the question."""
        return self.encode(question)

    def encode(self, text: str) -> TokenIds:
        """Bytes of a text."""
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)

    def text(self, ids: TokenIds) -> str:
        """Text of bytes; ids that are no byte are left out."""
        return bytes(int(token) for token in ids if 0 < token < 256).decode(errors="replace")

    def raw(self, ids: TokenIds) -> str:
        """As `text`."""
        return self.text(ids)

    def encode_plain(self, text: str) -> TokenIds:
        """As `encode`."""
        return self.encode(text)

    def without_stop(self, ids: TokenIds) -> TokenIds:
        """Without a closing 0."""
        return ids[:-1] if ids.size and int(ids[-1]) == 0 else ids
