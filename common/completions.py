"""What is said to an OpenAI-compatible completions endpoint, and what its answers mean. Pure: no sockets, no clock.

A prompt with its prefix goes to `/completions`, which continues a text as it stands; `/chat/completions` would close the turn
and answer anew. Everything an answer can be is one of these:

    Written    a continuation
    Again      the same request may succeed later: 408, 409, 425, 429, 5xx, an answer cut short or garbled
    Rejected   this row cannot be continued: 400, 413, 422, content withheld
    Denied     nothing can: a wrong key, an unknown model, a wrong address, no credit
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Literal

import msgspec

from prefixrl.common.messages import Finish, Sampling

AGAIN = frozenset({408, 409, 425, 429})
REJECTED = frozenset({400, 413, 422})
RATE_LIMIT = 429
MOST_STOPS = 4
"""Stop texts that OpenAI's API takes."""
SAID_CHARS = 300

_ENDED: dict[str, Finish] = {
    "stop": "eos", "eos": "eos", "eos_token": "eos", "stop_sequence": "eos", "length": "length",
}  # fmt: skip


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


@dataclass(frozen=True)
class Rejected:
    """This row will never be continued."""

    reason: str


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


class _Said(msgspec.Struct, frozen=True):
    message: str


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
    try:
        answer = msgspec.json.decode(content, type=_Completion)
    except msgspec.MsgspecError as error:
        return Again(f"an answer that is no completion ({error}): {said(content)}")
    if len(answer.choices) != 1:
        return Again(f"{len(answer.choices)} completions in the answer, one was asked for")
    choice, usage = answer.choices[0], answer.usage or _Usage()
    if choice.finish_reason == "content_filter":
        return Rejected("the endpoint withheld the completion (content_filter)")
    finish = _ENDED.get(choice.finish_reason or "")
    if (
        finish is None
    ):  # "abort", "error": the server gave the row up, most often because it is stopped
        return Again(f"a completion that ended with finish_reason {choice.finish_reason!r}")
    return Written(
        choice.text or "",
        choice.token_ids,
        finish,
        choice.prompt_token_ids,
        usage.prompt_tokens,
        usage.completion_tokens,
    )


def read_models(
    status: int, headers: Mapping[str, str], content: bytes, now: datetime
) -> list[Model] | Again | Denied:
    """What an answer to the question for models means."""
    if status != 200:
        outcome = _failed(status, headers, content, now)
        return Denied(status, outcome.reason) if isinstance(outcome, Rejected) else outcome
    try:
        return msgspec.json.decode(content, type=_Models).data
    except msgspec.MsgspecError as error:
        return Denied(status, f"no list of models ({error}): {said(content)}")


def _failed(
    status: int, headers: Mapping[str, str], content: bytes, now: datetime
) -> Again | Rejected | Denied:
    reason = f"{status} {said(content)}".strip()
    if status in AGAIN or status >= 500:
        after_s = retry_after_s(headers.get("retry-after"), now)
        return Again(reason, after_s, status == RATE_LIMIT or after_s is not None)
    if status in REJECTED:
        return Rejected(reason)
    if moved := headers.get("location"):
        reason += f" (it points to {moved})"
    return Denied(status, reason)


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
    """The message of an error, or the beginning of whatever came instead, on one line."""
    try:
        error = msgspec.json.decode(content, type=_Failure).error
        text = error if isinstance(error, str) else error.message
    except msgspec.MsgspecError:
        try:
            text = msgspec.json.decode(content, type=_Said).message
        except msgspec.MsgspecError:
            text = content[: 4 * SAID_CHARS].decode(errors="replace")
    return " ".join(text.split())[:SAID_CHARS]
