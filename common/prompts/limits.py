"""Limits of a question that are known before a tokenizer is loaded: its length, and special tokens."""

import math
from collections.abc import Iterable
from typing import Literal

from prefixrl.common.config.run import RunConfig
from prefixrl.common.host.hub import cached_file
from prefixrl.common.models.config_file import document_of, embedding_rows, positions_of


class SpecialTexts:
    """The special tokens of a tokenizer, as they may stand in a text."""

    def __init__(self, tokens: Iterable[str]) -> None:
        self._tokens = sorted(filter(None, tokens))
        self._begins = {each[:2] for each in self._tokens}  # hundreds of tokens have few of them

    def within(self, text: str) -> list[str]:
        """Return the special tokens in a text."""
        return (
            [each for each in self._tokens if each in text]
            if any(map(text.__contains__, self._begins))
            else []
        )

    def without(self, text: str) -> str:
        """Return a text without the special tokens in it."""
        while special := self.within(text):  # what is left may spell another one
            for token in special:
                text = text.replace(token, "")
        return text


def doubtful_texts(model: str) -> SpecialTexts | None:
    """Return the special tokens of a tokenizer.json; None where any text may have a token without a row."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(cached_file(model, "tokenizer.json")))
    except Exception:  # noqa: BLE001  the library's errors have no class of their own; loading it says what is wrong
        return SpecialTexts(())
    if max(tokenizer.get_vocab().values(), default=0) >= (embedding_rows(model) or math.inf):
        return None
    return SpecialTexts(
        each.content for each in tokenizer.get_added_tokens_decoder().values() if each.special
    )


def most_prompt_tokens(
    config: RunConfig, role: Literal["rollout", "scorer"], model: str | None = None
) -> int:
    """Return the longest prompt of a role: its key's, or less to leave positions for a prefix and a token."""
    most = config.engine_section(role).max_prompt_tokens
    positions = positions_of(document_of(model or config.model_section(role).model))
    is_continued = config.mode == "prefix" and not (role == "scorer" and config.has_advice)
    behind = 1 + (config.max_sampled_tokens if is_continued else 0)
    return most if positions is None else min(most, positions - behind)
