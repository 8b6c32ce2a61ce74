"""The JSON of requests to `/chat/completions`, and the outcomes of its answers. Pure.

The answer is the message's content. The reasoning that some endpoints return beside it is no part
of it. A refusal that the model wrote is an answer like any other, a wrong one.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime

import msgspec

from prefixrl.scorer.served.protocol import (
    GARBLED,
    Completed,
    EndpointRefused,
    RequestForm,
    Retry,
    RowRefused,
    RowRequest,
    ServedChoice,
    failed,
    message_of,
    only_choice,
    sampling_keys,
    with_usage,
)

OTHER_LIMIT_KEY = "max_completion_tokens"
"""The key of the most new tokens at endpoints that refuse `max_tokens`."""
TRIAL_QUESTION = "Write the 26 letters of the alphabet in capital letters, without spaces."
TRIAL_BEGINNING, TRIAL_NEXT = "ABCDEFGHIJKLM", "NO"
"""A begun answer, and how an endpoint goes on that truly continues it."""


class _Part(msgspec.Struct, frozen=True):
    text: str | None = None


class _Message(msgspec.Struct, frozen=True):
    content: str | list[_Part] | None = None
    refusal: str | None = None


class _MessageChoice(ServedChoice, frozen=True, kw_only=True):
    message: _Message


class _Chat(msgspec.Struct, frozen=True):
    choices: list[_MessageChoice]


def body(
    row: RowRequest, messages: Sequence[Mapping[str, str]], prefix: str, form: RequestForm
) -> bytes:
    """Encode the request for one answer as JSON.

    Args:
        prefix: the beginning of the answer, which the endpoint must continue; "" for none.
    """
    turns = [*messages, {"role": "assistant", "content": prefix}] if prefix else list(messages)
    request = {"model": row.model, "messages": turns} | sampling_keys(row, form)
    if prefix and form.has_extensions:
        request |= {"continue_final_message": True, "add_generation_prompt": False}
    return msgspec.json.encode({**request, **form.extra})


def read(
    status: int, headers: Mapping[str, str], content: bytes, now: datetime
) -> Completed | Retry | RowRefused | EndpointRefused:
    """Read the answer to a request."""
    if status != 200:
        return failed(status, headers, content, now)
    return with_usage(_answer(content), content)


def _answer(content: bytes) -> Completed | Retry | RowRefused:
    try:
        answer = msgspec.json.decode(content, type=_Chat)
    except GARBLED as error:
        return Retry(f"an answer that is not a chat completion ({error}): {message_of(content)}")
    match only_choice(answer.choices):
        case choice, finish:
            return Completed(_text_of(choice.message), None, finish, None, None, None)
        case fault:
            return fault


def _text_of(message: _Message) -> str:
    """Return the text of an answer: empty where the limit cut the reasoning before it."""
    content = message.content
    if isinstance(content, list):
        content = "".join(part.text or "" for part in content)
    return content or message.refusal or ""
