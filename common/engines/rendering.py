"""Questions to token ids and back, by the model's own tokenizer and chat template."""

import json
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from prefixrl.common.engines.base import TokenIds
from prefixrl.common.errors import DataError


class Renderer:
    """Renders questions as the opened assistant turn and decodes continuations."""

    def __init__(self, model: str, max_prompt_tokens: int) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._max_prompt_tokens = max_prompt_tokens
        self.stop_tokens = frozenset(_declared_stops(model, self._tokenizer.eos_token_id))
        """End-of-turn ids that tokenizer, config and generation config declare."""
        if not self.stop_tokens:
            raise DataError(f"{model} declares no end-of-sequence token; set eos_token in its tokenizer_config.json")

    def prompt(self, question: str) -> TokenIds:
        """Return the ids of a rendered question; raises ValueError when it is over the limit."""
        if self._tokenizer.chat_template:
            turns = [{"role": "user", "content": question}]
            text = self._tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
            ids = self._tokenizer.encode(text, add_special_tokens=False)
        else:
            ids = self._tokenizer.encode(question)
        if not 0 < len(ids) <= self._max_prompt_tokens:
            raise ValueError(f"prompt has {len(ids)} tokens, allowed are 1 to {self._max_prompt_tokens}")
        return np.asarray(ids, dtype=np.int32)

    def encode(self, text: str) -> TokenIds:
        """Return the ids of a piece of an answer."""
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)

    def text(self, ids: TokenIds) -> str:
        """Return the text of an answer, special tokens left out."""
        return str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=True))

    def decode_with_special(self, ids: TokenIds) -> str:
        """Return the text of ids, special tokens included: the form tokenizers can be compared by."""
        return str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=False))

    def decode_without_bos(self, ids: TokenIds) -> str:
        """Decode without a leading BOS, for servers that add their own."""
        whole, bare = self._tokenizer.encode("1"), self.encode("1").tolist()
        opening = whole[: len(whole) - len(bare)] if whole[-len(bare) :] == bare else []
        is_opened = bool(opening) and ids[: len(opening)].tolist() == opening
        return self.decode_with_special(ids[len(opening) :] if is_opened else ids)

    def encode_literal(self, text: str) -> TokenIds:
        """Return the ids of a text in which nothing is read as a special token."""
        ids = self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        return np.asarray(ids, dtype=np.int32)

    def without_stop(self, ids: TokenIds) -> TokenIds:
        """Return a prefix without a stop token at its end, which would close the target's turn."""
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
    """Renderer of the simulated engine: tokens are the UTF-8 bytes of the text."""

    stop_tokens = frozenset({0})

    def encode(self, text: str) -> TokenIds:
        """Return the bytes of a text."""
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)

    def text(self, ids: TokenIds) -> str:
        """Return the text of bytes; other ids are left out."""
        return bytes(int(token) for token in ids if 0 < token < 256).decode(errors="replace")

    def without_stop(self, ids: TokenIds) -> TokenIds:
        """Return ids without a closing 0."""
        return ids[:-1] if ids.size and int(ids[-1]) == 0 else ids

    prompt = encode_literal = encode
    decode_with_special = text
