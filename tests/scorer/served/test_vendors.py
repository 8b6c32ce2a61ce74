"""Replies of vendors' endpoints, read here and by the official `openai` client.

Both ask the same stand-in over a socket, once for each case, without a repetition.
"""

import asyncio
from dataclasses import dataclass
from typing import Any

import openai
import pytest

from prefixrl.common.config.workers.served import OpenAIConfig
from prefixrl.scorer.served import chat
from prefixrl.scorer.served.http_client import HttpClient
from prefixrl.scorer.served.protocol import Completed, EndpointRefused, Retry, RowRefused
from support.completions_server import Reply, failure, serving

QUESTION: Any = [{"role": "user", "content": "What is 2 + 2?"}]
PAGE = b"<html><body><h1>502 Bad Gateway</h1></body></html>"
Outcome = Completed | Retry | RowRefused | EndpointRefused


def answered(
    content: Any, finish: str | None = "stop", usage: Any = None, **message: Any
) -> dict[str, Any]:
    """Return a chat completion."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": content} | message,
        "finish_reason": finish,
    }
    usual = {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}
    fields = {"id": "c", "object": "chat.completion", "created": 1, "model": "m"}
    return fields | {"choices": [choice], "usage": usual if usage is None else usage}


@dataclass(frozen=True)
class Case:
    """A reply, and how both clients read it."""

    reply: Reply
    kind: type
    """The outcome here."""
    client: type | str | None
    """The official client's exception, or the content that it returns."""
    text: str = "4"
    tokens: int | None = 7
    """Completion tokens that are counted here; None if they cannot be read."""
    after_s: float | None = None
    is_limit: bool = False


def answer(content: Any, client: type | str | None = "4", **expected: Any) -> Case:
    return Case(Reply(content=content), Completed, client, **expected)


def error(
    status: int, body: Any, kind: type, client: type, *, headers: Any = None, **rest: Any
) -> Case:
    return Case(Reply(status, body, headers or {}), kind, client, **rest)


def limited(headers: dict[str, str], after_s: float | None) -> Case:
    body = failure("Rate limit reached for requests per min: limit 3, used 3, requested 1")
    return error(
        429,
        body,
        Retry,
        openai.RateLimitError,
        headers=headers,
        after_s=after_s,
        is_limit=True,
    )


def of_kind(message: str, code: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": code, "param": None, "code": code}}


CASES = {
    "a text": answer(answered("4")),
    "a text in parts": answer(
        answered([{"type": "text", "text": "4"}]), [{"type": "text", "text": "4"}]
    ),
    "no content": answer(answered(None), None, text=""),
    "empty content": answer(answered(""), "", text=""),
    "the limit used up by reasoning": answer(
        answered("", "length", reasoning_content="hm"), "", text=""
    ),
    "an answer cut by the limit": answer(answered("4", "length")),
    "reasoning beside the answer": answer(answered("4", reasoning_content="2 + 2 is 4")),
    "reasoning of a gateway": answer(answered("4", reasoning="2 + 2", reasoning_details=[{}])),
    "a refusal": answer(answered(None, refusal="I cannot help."), None, text="I cannot help."),
    "no usage": answer(answered("4") | {"usage": None}, tokens=None),
    "usage below zero": answer(
        answered("4", usage={"prompt_tokens": -1, "completion_tokens": -7}), tokens=None
    ),
    "usage that is a text": answer(answered("4", usage="many"), tokens=None),
    "usage with details": answer(
        answered(
            "4",
            usage={
                "prompt_tokens": 11,
                "completion_tokens": 7,
                "completion_tokens_details": {"reasoning_tokens": 5},
            },
        )
    ),
    "keys that nobody announced": answer(answered("4") | {"service_tier": "x", "x_vendor": [1]}),
    "an answer that the filter withheld": Case(
        Reply(content=answered(None, "content_filter")), RowRefused, None
    ),
    "an unknown end": Case(Reply(content=answered("4", "safety")), RowRefused, "4"),
    "no end": Case(Reply(content=answered("4", None)), Retry, "4"),
    "two answers": Case(
        Reply(content=answered("4") | {"choices": answered("4")["choices"] * 2}), Retry, "4"
    ),
    "no answer in the list": Case(
        Reply(content=answered("4") | {"choices": []}), Retry, IndexError
    ),
    "an error with status 200": Case(
        Reply(content=of_kind("The model is overloaded", "overloaded")),
        Retry,
        TypeError,
        tokens=None,
    ),
    "a page with status 200": Case(Reply(content=PAGE), Retry, AttributeError, tokens=None),
    "half a document": Case(Reply(content=b'{"choices": [{"mess'), Retry, Exception, tokens=None),
    "a dropped connection": Case(Reply(drops=True), Retry, openai.APIConnectionError, tokens=None),
    "a limit without a time": limited({}, None),
    "a limit with seconds": limited({"Retry-After": "3"}, 3.0),
    "a limit with a part of a second": limited({"Retry-After": "0.25"}, 0.25),
    "a limit with an unreadable time": limited({"Retry-After": "soon"}, None),
    "no credit": error(
        429,
        of_kind("You exceeded your current quota", "insufficient_quota"),
        EndpointRefused,
        openai.RateLimitError,
    ),
    "a wrong key": error(
        401,
        of_kind("Incorrect API key", "invalid_api_key"),
        EndpointRefused,
        openai.AuthenticationError,
    ),
    "a region that is not served": error(
        403, failure("Country not supported"), EndpointRefused, openai.PermissionDeniedError
    ),
    "an unknown model": error(
        404,
        of_kind("The model does not exist", "model_not_found"),
        EndpointRefused,
        openai.NotFoundError,
    ),
    "an unknown parameter": error(
        400, failure("Unsupported parameter: 'temperature'"), RowRefused, openai.BadRequestError
    ),
    "a prompt that is too long": error(
        400,
        of_kind("maximum context length", "context_length_exceeded"),
        RowRefused,
        openai.BadRequestError,
    ),
    "a prompt that the filter refuses": error(
        400,
        of_kind("content management policy", "content_filter"),
        RowRefused,
        openai.BadRequestError,
    ),
    "a form that is refused": error(
        422, {"detail": [{"msg": "field required"}]}, RowRefused, openai.UnprocessableEntityError
    ),
    "an error in the server": error(500, failure("oops"), Retry, openai.InternalServerError),
    "a page of a gateway": error(502, PAGE, Retry, openai.InternalServerError),
    "a rest that a gateway asks for": error(
        503,
        PAGE,
        Retry,
        openai.InternalServerError,
        headers={"Retry-After": "2"},
        after_s=2.0,
        is_limit=True,
    ),
    "an overloaded vendor": error(529, failure("Overloaded"), Retry, openai.InternalServerError),
}


async def _outcome(url: str) -> Outcome:
    client = HttpClient(OpenAIConfig(url=url, api="chat"))
    try:
        return await client.post(f"{url}/chat/completions", b"{}", chat.read)
    finally:
        await client.close()


def _content_for_the_official_client(url: str) -> Any:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        completion = client.chat.completions.create(model="m", messages=QUESTION)
        return completion.choices[0].message.content


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_reply_is_read_here_as_it_should_be_and_by_the_official_client_as_it_does(
    case: Case,
) -> None:
    with serving(lambda _: case.reply) as server:
        outcome = asyncio.run(_outcome(server.url))
        if isinstance(case.client, type):
            with pytest.raises(case.client):
                _content_for_the_official_client(server.url)
        else:
            assert _content_for_the_official_client(server.url) == case.client
    assert type(outcome) is case.kind
    if isinstance(outcome, Completed):
        assert (outcome.text, outcome.completion_tokens) == (case.text, case.tokens)
    if isinstance(outcome, Retry):
        assert (outcome.after_s, outcome.is_limit) == (case.after_s, case.is_limit)
