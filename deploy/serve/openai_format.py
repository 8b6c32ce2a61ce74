"""The JSON of answers in OpenAI's form: whole ones, and events of a stream. Pure."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import msgspec

Finish = Literal["stop", "length"]
LAST_EVENT = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class AnswerPart:
    """A part of one answer."""

    index: int
    text: str
    tokens: int
    """Tokens of the part, those without a text too."""
    finish: Finish | None = None
    """Set in the last part."""


@dataclass
class TokenCounts:
    """Counts of one request."""

    prompt_tokens: int
    completion_tokens: int = 0

    @property
    def document(self) -> dict[str, int]:
        """The counts as OpenAI names them."""
        return asdict(self) | {"total_tokens": self.prompt_tokens + self.completion_tokens}


@dataclass
class Format:
    """Documents that answer one request."""

    model: str
    is_chat: bool
    includes_usage: bool
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created_s: int = field(default_factory=lambda: int(time.time()))

    def whole(
        self, parts: Sequence[AnswerPart], choices: int, usage: TokenCounts
    ) -> dict[str, Any]:
        """Return a whole answer."""
        texts = [""] * choices
        ends = [""] * choices
        for part in parts:
            texts[part.index] += part.text
            ends[part.index] = part.finish or ends[part.index]
        documents = []
        for index, (text, end) in enumerate(zip(texts, ends, strict=True)):
            message = {"role": "assistant", "content": text, "refusal": None}
            content = {"message": message} if self.is_chat else {"text": text}
            documents.append(_choice(index, end, **content))
        return self._document(documents, "chat.completion") | {"usage": usage.document}

    def opening(self, choices: int) -> bytes:
        """Return the events before the text: in a chat, the role of every answer."""
        role = {"role": "assistant", "content": ""}
        opened = range(choices if self.is_chat else 0)
        return b"".join(self._event([_choice(index, None, delta=role)]) for index in opened)

    def event(self, part: AnswerPart) -> bytes:
        """Return the events of a part: none without text, unless it ends an answer."""
        choices = []
        if not self.is_chat and (part.text or part.finish):
            choices.append(_choice(part.index, part.finish, text=part.text))
        if self.is_chat and part.text:
            choices.append(_choice(part.index, None, delta={"content": part.text}))
        if self.is_chat and part.finish:
            choices.append(_choice(part.index, part.finish, delta={}))
        return b"".join(self._event([choice]) for choice in choices)

    def ending(self, usage: TokenCounts) -> bytes:
        """Return the events behind the text."""
        return (self._event([], usage.document) if self.includes_usage else b"") + LAST_EVENT

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> bytes:
        document = self._document(choices, "chat.completion.chunk")
        return event_of(document | {"usage": usage} if self.includes_usage else document)

    def _document(self, choices: list[dict[str, Any]], chat_kind: str) -> dict[str, Any]:
        return {
            "id": f"{'chatcmpl' if self.is_chat else 'cmpl'}-{self.id}",
            "object": chat_kind if self.is_chat else "text_completion",
            "created": self.created_s,
            "model": self.model,
            "choices": choices,
        }


def _choice(index: int, finish: str | None, **said: object) -> dict[str, Any]:
    return {"index": index, **said, "finish_reason": finish, "logprobs": None}


def event_of(document: dict[str, Any]) -> bytes:
    """Return a document as a server-sent event."""
    return b"data: " + msgspec.json.encode(document) + b"\n\n"
