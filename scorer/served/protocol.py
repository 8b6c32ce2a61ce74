"""Requests to an OpenAI-compatible completions endpoint, and its answers. Pure.

A prompt with its prefix goes to `/completions`, which continues the text itself;
`/chat/completions` would close the turn and answer again. An answer is one of these:

    Completed         a continuation
    Retry             the same request may succeed later: 408, 409, 425, 429, 5xx, an answer cut short or garbled
    RowRefused        this row cannot be continued: 400, 413, 422, content withheld, an unknown finish_reason
    EndpointRefused   no row can be continued: a wrong key, an unknown model, a wrong address, no credit
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Annotated, Generic, TypeVar, dataclass_transform

import msgspec

from prefixrl.common.wire.messages.groups import Finish, Sampling

AGAIN = frozenset({408, 409, 425, 429})
REJECTED = frozenset({400, 413, 422})
RATE_LIMIT = 429
NO_CREDIT = 402
OUT_OF_CREDIT = "insufficient_quota"
"""OpenAI's code for it, sent with the status of a rate limit."""
MOST_STOPS = 4
"""Most stop texts that OpenAI's API accepts."""
REASON_CHARS = 300
GARBLED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Errors of the decoder; for invalid UTF-8 and endless brackets they are not msgspec's own."""

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
MOST_TOKENS = 2**27
"""More tokens than any request has; a usage that counts more is not believed."""
Count = Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)]

_ENDS: dict[str, Finish] = {
    "stop": "eos",
    "eos": "eos",
    "eos_token": "eos",
    "stop_sequence": "eos",
    "length": "length",
}
_GIVEN_UP = {"abort", "error", None}
"""Ends by the server, most often because it is stopped."""


@dataclass(frozen=True)
class RequestForm:
    """The keys that an endpoint takes."""

    has_extensions: bool
    """True if vLLM's own keys are sent."""
    omit: tuple[str, ...] = ()
    """Keys of sampling that it refuses."""
    extra: Mapping[str, object] = field(default_factory=dict)
    """Further keys of every request."""
    limit_key: str = "max_tokens"
    """The key of the most new tokens."""


@dataclass(frozen=True)
class RowRequest:
    """A request for one continuation."""

    model: str
    prompt: list[int] | str
    sampling: Sampling
    seed: int | None
    stop_tokens: Sequence[int]
    stops: Sequence[str]
    """The stop tokens as text."""


@dataclass(frozen=True)
class Completed:
    """A continuation, and the tokens that the endpoint counted for it."""

    text: str
    tokens: list[int] | None
    """Token ids; None if the endpoint sends none."""
    finish: Finish
    prompt: list[int] | None
    """Token ids of the prompt as the endpoint read it; None if it sends none."""
    prompt_tokens: int | None
    completion_tokens: int | None


@dataclass(frozen=True)
class Retry:
    """There is no answer now."""

    reason: str
    after_s: float | None = None
    """Seconds until the endpoint wants the next request; None if it does not state them."""
    is_limit: bool = False
    is_unconnected: bool = False
    """True if no process listens at the address: a request costs nothing."""
    is_unresolved: bool = False
    """True if there is no such host."""
    is_late: bool = False
    """True if there was no answer within the time of a request."""
    status: int = 200
    """Status of an answer that is an error."""
    prompt_tokens: int | None = None
    """Tokens as counted for a useless answer, which was computed too."""
    completion_tokens: int | None = None


@dataclass(frozen=True)
class RowRefused:
    """This row will never be continued."""

    reason: str
    prompt_tokens: int | None = None
    """Tokens as counted for a withheld or unreadable answer."""
    completion_tokens: int | None = None


@dataclass(frozen=True)
class EndpointRefused:
    """No row will be continued."""

    status: int
    reason: str


@dataclass_transform(frozen_default=True)
class ServedPart(msgspec.Struct, frozen=True):
    """The JSON of an answer, or a part of it. Every class of it is frozen, as this one is."""


class ServedModel(ServedPart):
    """One entry of `/models`."""

    id: str
    max_model_len: int | None = None
    """Most tokens of prompt and completion together; only vLLM sends it."""


class _Models(ServedPart):
    data: list[ServedModel]


class ServedChoice(ServedPart):
    """One text of an answer."""

    finish_reason: str | None = None


AnyChoice = TypeVar("AnyChoice", bound=ServedChoice)


class ServedChoices(ServedPart, Generic[AnyChoice]):
    """An answer that holds texts."""

    choices: list[AnyChoice]


class _TextChoice(ServedChoice):
    text: str | None = None
    token_ids: list[TokenId] | None = None
    prompt_token_ids: list[TokenId] | None = None


class _Usage(ServedPart):
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None


class _Counted(ServedPart):
    """The part of a completion that is read apart: it, or the rest, may be invalid."""

    usage: _Usage | None = None


class _ErrorBody(ServedPart):
    message: str
    type: object = None
    code: object = None


class _Failure(ServedPart):
    error: _ErrorBody | str


def body(row: RowRequest, form: RequestForm) -> bytes:
    """Encode the request for the completion of one row as JSON."""
    request = {"model": row.model, "prompt": row.prompt} | sampling_keys(row, form)
    if not form.has_extensions:
        if row.stops:
            request["stop"] = list(row.stops)[:MOST_STOPS]
        return msgspec.json.encode({**request, **form.extra})
    request |= {
        "stop_token_ids": sorted(row.stop_tokens),
        "ignore_eos": True,  # that of the model; the stop tokens are the job's
        "add_special_tokens": False,  # the prompt holds its BOS already, if any
        "return_token_ids": True,
    }
    return msgspec.json.encode({**request, **form.extra})


def sampling_keys(row: RowRequest, form: RequestForm) -> dict[str, object]:
    """Return the keys of a request that say how a row is sampled."""
    sampling = row.sampling
    keys: dict[str, object] = {
        form.limit_key: sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
    }
    if row.seed is not None:
        keys["seed"] = row.seed
    for key in form.omit:
        keys.pop(key, None)
    if form.has_extensions:
        # Name every setting: the server takes defaults from the model's generation_config.
        keys |= {
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
        }
    return keys


def read_choice(
    kind: type[ServedChoices[AnyChoice]],
    name: str,
    completed: Callable[[AnyChoice, Finish], Completed],
    status: int,
    headers: Mapping[str, str],
    content: bytes,
    now: datetime,
) -> Completed | Retry | RowRefused | EndpointRefused:
    """Read the answer to a request for one text; `name` stands for the kind of answer in messages."""
    if status != 200:
        return failed(status, headers, content, now)
    try:
        choice = only_choice(msgspec.json.decode(content, type=kind).choices)
    except GARBLED as error:
        choice = Retry(f"an answer that is not a {name} ({error}): {message_of(content)}")
    return with_usage(completed(*choice) if isinstance(choice, tuple) else choice, content)


def _completed(choice: _TextChoice, finish: Finish) -> Completed:
    return Completed(
        choice.text or "", choice.token_ids, finish, choice.prompt_token_ids, None, None
    )


read = partial(read_choice, ServedChoices[_TextChoice], "completion", _completed)
"""Reads the answer to a request for a completion."""


def only_choice(choices: Sequence[AnyChoice]) -> tuple[AnyChoice, Finish] | Retry | RowRefused:
    """Return the only text of an answer, and why it ended."""
    if len(choices) != 1:
        return Retry(f"{len(choices)} completions in the answer, one was asked for")
    finish_reason = choices[0].finish_reason
    if finish_reason in _GIVEN_UP:
        return Retry(f"a completion that ended with finish_reason {finish_reason!r}")
    if finish_reason == "content_filter":
        return RowRefused("the endpoint withheld the completion (content_filter)")
    if (finish := _ENDS.get(finish_reason or "")) is None:
        return RowRefused(
            f"the completion ended with finish_reason {finish_reason!r}, known are {', '.join(_ENDS)}"
        )
    return choices[0], finish


def with_usage(
    outcome: Completed | Retry | RowRefused, content: bytes
) -> Completed | Retry | RowRefused:
    """Return an outcome with the tokens that the endpoint counted for it."""
    try:
        usage = msgspec.json.decode(content, type=_Counted).usage or _Usage()
    except GARBLED:
        return outcome
    return replace(
        outcome, prompt_tokens=usage.prompt_tokens, completion_tokens=usage.completion_tokens
    )


def read_models(
    status: int, headers: Mapping[str, str], content: bytes, now: datetime
) -> list[ServedModel] | Retry | EndpointRefused:
    """Read the answer to a request for the models."""
    if status != 200:
        outcome = failed(status, headers, content, now)
        return (
            EndpointRefused(status, outcome.reason) if isinstance(outcome, RowRefused) else outcome
        )
    try:
        return msgspec.json.decode(content, type=_Models).data
    except GARBLED as error:
        return EndpointRefused(status, f"not a list of models ({error}): {message_of(content)}")


def failed(
    status: int, headers: Mapping[str, str], content: bytes, now: datetime
) -> Retry | RowRefused | EndpointRefused:
    """Read an answer with another status than 200."""
    reason = f"{status} {message_of(content)}".strip()
    if status == RATE_LIMIT and _is_out_of_credit(content):
        return EndpointRefused(NO_CREDIT, reason)
    if status in AGAIN or status >= 500:
        after_s = retry_after_s(headers.get("retry-after"), now)
        is_limit = status == RATE_LIMIT or after_s is not None
        return Retry(reason, after_s, is_limit, status=status)
    if status in REJECTED:
        return RowRefused(reason)
    if moved := headers.get("location"):
        reason = f"{status} (it points to {moved}) {message_of(content)}".strip()
    return EndpointRefused(status, reason)


def _is_out_of_credit(content: bytes) -> bool:
    try:
        error = msgspec.json.decode(content, type=_Failure).error
    except GARBLED:
        return False
    return not isinstance(error, str) and OUT_OF_CREDIT in (error.type, error.code)


def retry_after_s(value: str | None, now: datetime) -> float | None:
    """Read a Retry-After, seconds or a date (RFC 9110, 10.2.3); return seconds, None if invalid."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            then = parsedate_to_datetime(value)
        except ValueError:
            return None
        seconds = (then if then.tzinfo else then.replace(tzinfo=UTC)).timestamp() - now.timestamp()
    return max(0.0, seconds) if seconds < float("inf") else None


def message_of(content: bytes) -> str:
    """Return the message of an error, or else the content, on one line; not `redacted` yet."""
    try:
        error = msgspec.json.decode(content, type=_Failure).error
        text = error if isinstance(error, str) else error.message
    except GARBLED:
        try:
            text = msgspec.json.decode(content, type=_ErrorBody).message
        except GARBLED:
            text = content.decode(errors="replace")
    return " ".join(text.split())


def redacted(reason: str, key: str) -> str:
    """Hide the key in a reason, and cut it: some servers repeat the key that they were sent."""
    return (reason.replace(key, "***") if key else reason)[:REASON_CHARS]
