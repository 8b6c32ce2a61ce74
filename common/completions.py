"""What is said to an OpenAI-compatible completions endpoint, and what its answers mean. Pure: no sockets, no clock.

A prompt with its prefix goes to `/completions`, which continues a text as it stands; `/chat/completions` would close the turn
and answer anew. Everything an answer can be is one of these:

    Written    a continuation
    Again      the same request may succeed later: 408, 409, 425, 429, 5xx, an answer cut short or garbled
    Rejected   this row cannot be continued: 400, 413, 422, content withheld, an end that is not known here
    Denied     nothing can: a wrong key, an unknown model, a wrong address, no credit
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Literal

import msgspec

from prefixrl.common.messages import Finish, Sampling

AGAIN = frozenset({408, 409, 425, 429})
REJECTED = frozenset({400, 413, 422})
RATE_LIMIT = 429
NO_CREDIT = 402
OUT_OF_CREDIT = "insufficient_quota"
"""OpenAI's word for it, which it says with the status of a rate limit."""
MOST_STOPS = 4
"""Stop texts that OpenAI's API takes."""
REASON_CHARS = 300
GARBLED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What the decoder raises: bytes that are no UTF-8 and brackets without end are no errors of msgspec's own."""

_ENDED: dict[str, Finish] = {
    "stop": "eos", "eos": "eos", "eos_token": "eos", "stop_sequence": "eos", "length": "length",
}  # fmt: skip
_GIVEN_UP = {"abort", "error", None}
"""By the server, most often because it is stopped."""


@dataclass(frozen=True)
class Row:
    """One continuation to ask for."""

    model: str
    prompt: list[int] | str
    sampling: Sampling
    seed: int | None
    stop_tokens: Sequence[int]
    stops: Sequence[str]
    """What the stop tokens are as text."""


@dataclass(frozen=True)
class Written:
    """A continuation, and what the endpoint counted for it."""

    text: str
    tokens: list[int] | None
    """Ids, None where the endpoint tells none."""
    finish: Finish
    prompt: list[int] | None
    """The prompt as the endpoint read it, None where it does not tell."""
    prompt_tokens: int | None
    completion_tokens: int | None


@dataclass(frozen=True)
class Again:
    """No answer now."""

    reason: str
    after_s: float | None = None
    """Seconds after which the endpoint asks to be asked again."""
    is_limit: bool = False
    is_unconnected: bool = False
    """Nobody listens at the address: asking costs nothing."""
    is_unresolved: bool = False
    """There is no such host."""
    is_late: bool = False
    """No answer within the time of a request."""
    prompt_tokens: int | None = None
    """Both as in `Written`: an answer that is of no use was computed too."""
    completion_tokens: int | None = None


@dataclass(frozen=True)
class Rejected:
    """This row will never be continued."""

    reason: str
    prompt_tokens: int | None = None
    """Both as in `Again`."""
    completion_tokens: int | None = None


@dataclass(frozen=True)
class Denied:
    """No row will be continued."""

    status: int
    reason: str


class Model(msgspec.Struct, frozen=True):
    """One entry of `/models`."""

    id: str
    max_model_len: int | None = None
    """vLLM's: tokens of prompt and completion together."""


class _Models(msgspec.Struct, frozen=True):
    data: list[Model]


class _Choice(msgspec.Struct, frozen=True):
    text: str | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Completion(msgspec.Struct, frozen=True):
    choices: list[_Choice]
    usage: _Usage | None = None


class _Counted(msgspec.Struct, frozen=True):
    """A completion of which nothing else is read."""

    usage: _Usage | None = None


class _Said(msgspec.Struct, frozen=True):
    message: str
    type: object = None
    code: object = None


class _Failure(msgspec.Struct, frozen=True):
    error: _Said | str


def body(row: Row, dialect: Literal["vllm", "openai"]) -> bytes:
    """The JSON of a request for one row."""
    sampling = row.sampling
    asked: dict[str, object] = {
        "model": row.model,
        "prompt": row.prompt,
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
    }
    if row.seed is not None:
        asked["seed"] = row.seed
    if dialect == "openai":
        if row.stops:
            asked["stop"] = list(row.stops)[:MOST_STOPS]
        return msgspec.json.encode(asked)
    # Everything is named: a server's defaults are those of the model's generation_config.
    asked |= {
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": sorted(row.stop_tokens),
        "ignore_eos": True,  # of the model's own; the stop tokens are the job's
        "add_special_tokens": False,  # the prompt has its BOS, if it is to have one
        "return_token_ids": True,
    }
    return msgspec.json.encode(asked)


def read(
    status: int, headers: Mapping[str, str], content: bytes, now: datetime
) -> Written | Again | Rejected | Denied:
    """What an answer to a completion means."""
    if status != 200:
        return _failed(status, headers, content, now)
    outcome, usage = _completion(content), _usage(content)
    return replace(
        outcome, prompt_tokens=usage.prompt_tokens, completion_tokens=usage.completion_tokens
    )


def _completion(content: bytes) -> Written | Again | Rejected:
    try:
        answer = msgspec.json.decode(content, type=_Completion)
    except GARBLED as error:
        return Again(f"an answer that is no completion ({error}): {said(content)}")
    if len(answer.choices) != 1:
        return Again(f"{len(answer.choices)} completions in the answer, one was asked for")
    choice = answer.choices[0]
    if choice.finish_reason in _GIVEN_UP:
        return Again(f"a completion that ended with finish_reason {choice.finish_reason!r}")
    if choice.finish_reason == "content_filter":
        return Rejected("the endpoint withheld the completion (content_filter)")
    finish = _ENDED.get(choice.finish_reason or "")
    if finish is None:
        return Rejected(
            f"the completion ended with finish_reason {choice.finish_reason!r}, known are {', '.join(_ENDED)}"
        )
    return Written(choice.text or "", choice.token_ids, finish, choice.prompt_token_ids, None, None)


def _usage(content: bytes) -> _Usage:
    try:
        return msgspec.json.decode(content, type=_Counted).usage or _Usage()
    except GARBLED:
        return _Usage()


def read_models(
    status: int, headers: Mapping[str, str], content: bytes, now: datetime
) -> list[Model] | Again | Denied:
    """What an answer to the question for models means."""
    if status != 200:
        outcome = _failed(status, headers, content, now)
        return Denied(status, outcome.reason) if isinstance(outcome, Rejected) else outcome
    try:
        return msgspec.json.decode(content, type=_Models).data
    except GARBLED as error:
        return Denied(status, f"no list of models ({error}): {said(content)}")


def _failed(
    status: int, headers: Mapping[str, str], content: bytes, now: datetime
) -> Again | Rejected | Denied:
    reason = f"{status} {said(content)}".strip()
    if status == RATE_LIMIT and _is_out_of_credit(content):
        return Denied(NO_CREDIT, reason)
    if status in AGAIN or status >= 500:
        after_s = retry_after_s(headers.get("retry-after"), now)
        return Again(reason, after_s, status == RATE_LIMIT or after_s is not None)
    if status in REJECTED:
        return Rejected(reason)
    if moved := headers.get("location"):
        reason = f"{status} (it points to {moved}) {said(content)}".strip()
    return Denied(status, reason)


def _is_out_of_credit(content: bytes) -> bool:
    try:
        error = msgspec.json.decode(content, type=_Failure).error
    except GARBLED:
        return False
    return not isinstance(error, str) and OUT_OF_CREDIT in (error.type, error.code)


def retry_after_s(value: str | None, now: datetime) -> float | None:
    """Seconds of a Retry-After, which holds seconds or a date (RFC 9110, 10.2.3); None without one that can be read."""
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


def said(content: bytes) -> str:
    """The message of an error, or whatever came instead, on one line; not `shown` yet."""
    try:
        error = msgspec.json.decode(content, type=_Failure).error
        text = error if isinstance(error, str) else error.message
    except GARBLED:
        try:
            text = msgspec.json.decode(content, type=_Said).message
        except GARBLED:
            text = content.decode(errors="replace")
    return " ".join(text.split())


def shown(reason: str, key: str) -> str:
    """A reason as it may be logged: some servers repeat the key they were given, and half a key is told too much as well."""
    return (reason.replace(key, "***") if key else reason)[:REASON_CHARS]
