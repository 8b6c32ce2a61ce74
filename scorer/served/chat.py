"""The JSON of requests to `/chat/completions`, and the outcomes of its answers. Pure.

The answer is the message's content. The reasoning that some endpoints return beside it is no part
of it. A refusal that the model wrote is an answer like any other, a wrong one.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import msgspec

from prefixrl.common.wire.messages.groups import Finish
from prefixrl.scorer.served.protocol import (
    Completed,
    RequestForm,
    RowRequest,
    ServedChoice,
    ServedChoices,
    ServedPart,
    read_choice,
    sampling_keys,
)

OTHER_LIMIT_KEY = "max_completion_tokens"
"""The key of the most new tokens at endpoints that refuse `max_tokens`."""
TRIAL_QUESTION = "Write the 26 letters of the alphabet in capital letters, without spaces."
TRIAL_BEGINNING, TRIAL_NEXT = "ABCDEFGHIJKLM", "NO"
"""A begun answer, and how an endpoint goes on that truly continues it."""


class _Part(ServedPart):
    text: str | None = None


class _Message(ServedPart):
    content: str | list[_Part] | None = None
    refusal: str | None = None


class _MessageChoice(ServedChoice, kw_only=True):
    message: _Message


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


def _completed(choice: _MessageChoice, finish: Finish) -> Completed:
    """Return the text of an answer: empty where the limit cut the reasoning before it."""
    content = choice.message.content
    if isinstance(content, list):
        content = "".join(part.text or "" for part in content)
    return Completed(content or choice.message.refusal or "", None, finish, None, None, None)


read = partial(read_choice, ServedChoices[_MessageChoice], "chat completion", _completed)
"""Reads the answer to a request for a message."""
