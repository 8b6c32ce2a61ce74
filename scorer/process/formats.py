"""The text that a process reward model reads, and checks of its tags and candidates.

    step_tag    question, a space, then every step with its tag        score: softmax of two tokens' logits at the tag
    two_class   a conversation whose last turn is every step with tag  score: softmax of the head's classes at the tag

A tag is found by its place in the whole text, so that nothing an adapter writes can be taken for
one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefixrl.common.config.workers.process_model import STEP, TAG, ProcessModelConfig
from prefixrl.common.errors import ConfigError, DataError

_PROBE = ("What is 1 + 1?", ("One and one are two.", "So the answer is 2."))


@dataclass(frozen=True)
class Marked:
    """An answer as the model reads it."""

    tokens: NDArray[np.int32]
    tag_positions: tuple[int, ...]
    """Position of the tag of each step, among the tokens."""


class StepForm:
    """The form in which answers are put to a process reward model."""

    def __init__(self, tokenizer: Any, settings: ProcessModelConfig) -> None:
        """Try the form out on two steps; ConfigError or DataError where tags are not found in their places."""
        self._tokenizer = tokenizer
        self._settings = settings
        if not tokenizer.is_fast:
            raise DataError(
                f"scorer.prm.model: the tokenizer of {settings.model} cannot tell where its tokens stand in a text; "
                f"save it with a tokenizer.json"
            )
        self._is_chat = settings.format == "two_class" and bool(tokenizer.chat_template)
        if settings.system is not None and not self._is_chat:
            raise ConfigError(
                f"scorer.prm.system has no effect: {settings.model} has no chat template; leave it out"
            )
        added = tokenizer.added_tokens_decoder.values()
        # The longest first: a shorter special text may be a part of a longer one.
        self._removed = sorted(
            {settings.tag, *(token.content for token in added if token.special)}, key=len
        )[::-1]
        # Not known while the trial looks for it; after it every tag must be this token.
        self._tag_token: int | None = None
        try:
            probe = self.marked_text(*_PROBE)
        except ValueError as error:
            raise ConfigError(f"scorer.prm.step_tag = {settings.tag!r}: {error}") from None
        self._tag_token = int(probe.tokens[probe.tag_positions[0]])

    def marked_text(self, question: str, steps: Sequence[str]) -> Marked:
        """Return the tokens of a question with its steps; ValueError if a tag is no token."""
        text, ends = self._text(
            self._literal(question), [self._literal(step).strip() for step in steps]
        )
        encoded = self._tokenizer(
            text, add_special_tokens=not self._is_chat, return_offsets_mapping=True
        )
        ids, spans = encoded["input_ids"], encoded["offset_mapping"]
        token_by_end = {end: index for index, (begin, end) in enumerate(spans) if end > begin}
        positions = tuple(
            self._tag_at(text, end, token_by_end.get(end), spans, ids) for end in ends
        )
        return Marked(np.asarray(ids, dtype=np.int32), positions)

    def candidates(self) -> tuple[int, int]:
        """Return the tokens of a good and a bad step; ConfigError unless each is one token."""
        settings = self._settings
        good = self._candidate("good_token", settings.good_token)
        bad = self._candidate("bad_token", settings.bad_token)
        if good == bad:
            raise ConfigError(
                f"scorer.prm.good_token = {settings.good_token!r} and bad_token = {settings.bad_token!r} are the same "
                f"token of {settings.model} ({good}): every step would have the same score; name both tokens"
            )
        return good, bad

    def _text(self, question: str, steps: Sequence[str]) -> tuple[str, list[int]]:
        """Return the whole text, and the end of each tag in it."""
        tag, form = self._settings.tag, self._settings.form
        content, ends = "", []
        for step in steps:
            before, _, after = form.replace(STEP, step).rpartition(TAG)
            content += before + tag
            ends.append(len(content))
            content += after
        if not self._is_chat:
            head = f"{question} "
            return head + content, [len(head) + end for end in ends]
        # A template may trim the end of a turn, so the turn ends with the last tag.
        content = content[: ends[-1]] if ends else content
        system = [] if self._settings.system is None else [("system", self._settings.system)]
        turns = [*system, ("user", question), ("assistant", content)]
        conversation = [{"role": role, "content": turn} for role, turn in turns]
        text = str(
            self._tokenizer.apply_chat_template(
                conversation, tokenize=False, add_generation_prompt=False
            )
        )
        # From the right: the question before it may hold the same text.
        begin = text.rfind(content)
        if begin < 0:
            raise ValueError(
                f"the chat template of {self._settings.model} changes the answer, or leaves it out"
            )
        return text, [begin + end for end in ends]

    def _tag_at(self, text: str, end: int, index: int | None, spans: Any, ids: list[int]) -> int:
        """Return the position of the tag that ends at `end`; its token may begin with a space."""
        tag = self._settings.tag
        begin = end - len(tag)
        blank = len(text[:begin]) - len(text[:begin].rstrip(" "))
        # Its token may hold the blanks before the tag, and nothing else of the text.
        is_one = index is not None and begin - blank <= spans[index][0] <= begin
        if not is_one or index is None or self._is_unknown(ids[index], tag):
            near = [
                id_
                for id_, (first, last) in zip(ids, spans, strict=True)
                if first < end and last > begin
            ]
            raise ValueError(
                f"the tokenizer of {self._settings.model} reads the tag as {self._in_words(near)} ({len(near)} tokens "
                f"with what stands around it), it must be one known token of its own; give the tag that the model was "
                f"trained with"
            )
        if self._tag_token is not None and ids[index] != self._tag_token:
            raise ValueError(
                f"the tag became token {ids[index]}, elsewhere it is {self._tag_token}"
            )
        return index

    def _candidate(self, key: str, token: int | str) -> int:
        model, size = self._settings.model, len(self._tokenizer)
        if isinstance(token, int):
            if 0 <= token < size:
                return token
            raise ConfigError(
                f"scorer.prm.{key} = {token}: {model} has no such token, its ids are 0 to {size - 1}"
            )
        ids = self._tokenizer.encode(token, add_special_tokens=False)
        if len(ids) != 1 or self._is_unknown(ids[0], token):
            raise ConfigError(
                f"scorer.prm.{key} = {token!r}: the tokenizer of {model} reads it as {self._in_words(ids)}, it must be "
                f"one known token; give the token that the model was trained with, as text (a space before it counts) "
                f"or as id"
            )
        return int(ids[0])

    def _is_unknown(self, token: int, text: str) -> bool:
        """Return True for the token that stands for all unknown texts, unless the text names it."""
        return bool(token == self._tokenizer.unk_token_id and text != self._tokenizer.unk_token)

    def _in_words(self, tokens: list[int]) -> str:
        return ", ".join(map(repr, self._tokenizer.convert_ids_to_tokens(tokens))) or "nothing"

    def _literal(self, text: str) -> str:
        """Return a text without special tokens and tags, which only the form itself may write."""
        # Again after each removal: what stood around a tag may form another one.
        while any(tag in text for tag in self._removed):
            for tag in self._removed:
                text = text.replace(tag, "")
        return text
