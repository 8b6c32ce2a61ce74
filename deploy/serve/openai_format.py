"""The JSON of answers in OpenAI's form: whole ones, and events of a stream. Pure."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
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
        total = self.prompt_tokens + self.completion_tokens
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens, "total_tokens": total}


@dataclass
class Format:
    """Documents that answer one request."""

    model: str
    is_chat: bool
    includes_usage: bool
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created_s: int = field(default_factory=lambda: int(time.time()))

    def whole(self, deltas: Sequence[AnswerPart], choices: int, usage: TokenCounts) -> bytes:
        """Return a whole answer."""
        texts, ends = [""] * choices, [""] * choices
        for each in deltas:
            texts[each.index] += each.text
            ends[each.index] = each.finish or ends[each.index]
        found = []
        for index, (text, finish) in enumerate(zip(texts, ends, strict=True)):
            said = (
                {"message": {"role": "assistant", "content": text, "refusal": None}} if self.is_chat else {"text": text}
            )
            found.append({"index": index, **said, "finish_reason": finish, "logprobs": None})
        return msgspec.json.encode(self._document(found, "chat.completion") | {"usage": usage.document})

    def opening(self, choices: int) -> bytes:
        """Return the events before the text: in a chat, the role of every answer."""
        role = {"role": "assistant", "content": ""}
        return b"".join(self._chat_event(index, role, None) for index in range(choices)) if self.is_chat else b""

    def event(self, delta: AnswerPart) -> bytes:
        """Return the event of a part; nothing for one without text that ends nothing."""
        if not delta.text and delta.finish is None:
            return b""
        if not self.is_chat:
            choice = {"index": delta.index, "text": delta.text, "finish_reason": delta.finish, "logprobs": None}
            return self._event([choice])
        text = self._chat_event(delta.index, {"content": delta.text}, None) if delta.text else b""
        return text + (self._chat_event(delta.index, {}, delta.finish) if delta.finish else b"")

    def ending(self, usage: TokenCounts) -> bytes:
        """Return the events behind the text."""
        counts = self._event([], usage.document) if self.includes_usage else b""
        return counts + LAST_EVENT

    def _chat_event(self, index: int, delta: dict[str, str], finish: Finish | None) -> bytes:
        return self._event([{"index": index, "delta": delta, "finish_reason": finish, "logprobs": None}])

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


def event_of(document: dict[str, Any]) -> bytes:
    """Return a document as a server-sent event."""
    return b"data: " + msgspec.json.encode(document) + b"\n\n"


def models(name: str, created_s: int) -> bytes:
    """Return the list of the one model that is served."""
    found = {"id": name, "object": "model", "created": created_s, "owned_by": "prefixrl"}
    return msgspec.json.encode({"object": "list", "data": [found]})
