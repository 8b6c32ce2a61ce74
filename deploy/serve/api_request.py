"""The JSON of requests, and the errors that refuse requests, in OpenAI's form. Pure.

A field that the server cannot honour is refused, unless its value has no effect: to ignore it would be a wrong answer.
"""

import json
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "parallel_tool_calls": (True, False),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "stream_options.include_obfuscation": (False,),
}
"""Fields of OpenAI's interface that are accepted only with null, or with a value that has no effect."""
IGNORED = frozenset({"metadata", "prompt_cache_key", "safety_identifier", "user"})
"""Fields that change no answer."""
REMEDIES = {
    "prompt": "token ids and blank texts are no problems; give texts",
    "messages": 'give [{"role": "user", "content": "..."}] with a text that is not blank',
    "top_p": "for the likeliest token give temperature 0",
}
MOST_STOPS, MOST_CHOICES, MOST_PROBLEMS = 4, 128, 256
_SHOWN_CHARS = 80
RETRY_S = "1"
"""Seconds after which a request that found too many others may be answered."""


class ApiError(Exception):
    """An answer that is an error, in OpenAI's form."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = {"Retry-After": RETRY_S} if status == HTTPStatus.TOO_MANY_REQUESTS else {}

    @property
    def document(self) -> dict[str, Any]:
        """The body of the answer."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        other = "invalid_request_error" if self.status < 500 else "server_error"
        kind = kinds.get(self.status, other)
        fields = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": fields}


@dataclass(frozen=True)
class Limits:
    """Values that this server allows."""

    model: str
    """Name under which the adapter is served."""
    most_tokens: int
    """Longest answer, prefix and completion."""
    own_system: str | None = None
    """Section of the run whose system turn is fixed; None where a request may bring one."""
    samples_by_default: bool = False
    """True where a request without a temperature is sampled."""


class _Fields(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: object) -> object:
        if not isinstance(value, dict):
            return value
        return {key: each for key, each in value.items() if each is not None}


NotBlank = Annotated[str, Field(pattern=r"\S")]
Problems = Annotated[list[NotBlank], Field(min_length=1, max_length=MOST_PROBLEMS)]
Stop = Annotated[str, Field(min_length=1)]


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _joined(value: object) -> object:
    """Return the text of a message's content, which may be a list of text parts."""
    if not isinstance(value, list) or not all(
        isinstance(part, dict) and part.get("type") == "text" for part in value
    ):
        return value
    texts = [part.get("text") for part in value]
    return "".join(texts) if all(isinstance(text, str) for text in texts) else value


class StreamOptions(_Fields):
    """The options of a stream."""

    include_usage: bool = False


class ChatMessage(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(strict=True, extra="forbid")
    role: str
    content: Annotated[NotBlank, BeforeValidator(_joined)]
    name: str | None = None


class ApiRequest(_Fields):
    """The fields that both kinds of requests have."""

    is_chat: ClassVar[bool] = False
    model: str
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] = 1
    """Answers per problem."""
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """None: that of the run."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """None: as long as the run allows."""
    stop: Annotated[list[Stop], Field(max_length=MOST_STOPS), BeforeValidator(_as_list)] = []
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    @property
    def problems(self) -> list[str]:
        """The problems to answer."""
        raise NotImplementedError

    @property
    def system(self) -> str:
        """The system turn before each problem."""
        return ""

    def check(self, limits: Limits) -> None:
        """Raise ApiError for what this server cannot honour."""
        if self.model != limits.model:
            remedy = (
                f"this server has {_as_json(limits.model)} only; give that, as /v1/models lists it"
            )
            raise ApiError(
                404, f"model = {_as_json(self.model)}: {remedy}", "model", "model_not_found"
            )
        is_open = limits.samples_by_default and "temperature" not in self.model_fields_set
        if self.n > 1 and self.temperature == 0.0 and not is_open:
            raise _refusal(
                "n",
                self.n,
                "allowed is 1 at temperature 0",
                "greedy answers are all alike; give a temperature above 0",
            )
        if (self.max_tokens or 0) > limits.most_tokens:
            remedy = "the most is the run's own limit, which `prefixrl serve --set` can raise"
            raise _refusal(
                "max_tokens", self.max_tokens, f"allowed is 1 to {limits.most_tokens}", remedy
            )
        options = self.stream_options.model_extra or {}
        stream_options = {f"stream_options.{name}": value for name, value in options.items()}
        for name, value in ((self.model_extra or {}) | stream_options).items():
            neutral = NEUTRAL.get(name, ())
            # In Python 0 equals false.
            is_neutral = any(
                value == each and isinstance(value, bool) == isinstance(each, bool)
                for each in neutral
            )
            if name not in IGNORED and not is_neutral:
                allowed = f"allowed is {' or '.join(('null', *map(_as_json, neutral)))}"
                raise _refusal(name, value, allowed, "this server does not offer it; leave it out")


class CompletionRequest(ApiRequest):
    """The body of /v1/completions."""

    prompt: Annotated[Problems, BeforeValidator(_as_list)]

    @property
    def problems(self) -> list[str]:
        """The prompts, one problem each."""
        return self.prompt


class ChatRequest(ApiRequest):
    """The body of /v1/chat/completions."""

    is_chat: ClassVar[bool] = True
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None

    @property
    def problems(self) -> list[str]:
        """The user's message."""
        return [self.messages[-1].content]

    @property
    def system(self) -> str:
        """The system message before it, if there is one."""
        return self.messages[0].content if len(self.messages) > 1 else ""

    def check(self, limits: Limits) -> None:
        """Raise ApiError for what this server cannot honour; join the two names of the limit."""
        roles = [each.role for each in self.messages]
        if roles not in (["user"], ["system", "user"], ["developer", "user"]):
            remedy = "the adapter was trained on single problems and has seen no earlier turns; send the last one alone"
            raise _refusal(
                "messages", roles, 'allowed is the roles ["user"] or ["system", "user"]', remedy
            )
        if len(roles) == 2 and limits.own_system is not None:
            remedy = f"the run has its own ({limits.own_system}); leave it out"
            raise _refusal(
                "messages.0", self.messages[0].content, "allowed is no system message", remedy
            )
        if self.max_completion_tokens is not None:
            if self.max_tokens not in (None, self.max_completion_tokens):
                limits_given = [self.max_tokens, self.max_completion_tokens]
                raise _refusal(
                    "max_tokens",
                    limits_given,
                    "allowed is one limit",
                    "give max_tokens or max_completion_tokens",
                )
            self.max_tokens = self.max_completion_tokens
        super().check(limits)


def read(body: bytes, limits: Limits, is_chat: bool) -> ApiRequest:
    """Return the request in a body; raise ApiError for an invalid body."""
    try:
        request = (ChatRequest if is_chat else CompletionRequest).model_validate_json(body)
    except ValidationError as errors:
        error = errors.errors(include_url=False, include_context=False)[0]
        if error["type"] == "json_invalid":
            raise ApiError(
                400, f"the body is no JSON ({error['msg']}); send one JSON object"
            ) from None
        value = None if error["type"] == "missing" else error["input"]
        param = str(error["loc"][0]) if error["loc"] else ""
        remedy = REMEDIES.get(param, "give such a value, or leave it out")
        raise _refusal(".".join(map(str, error["loc"])), value, error["msg"], remedy) from None
    request.check(limits)
    return request


def _as_json(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def _refusal(name: str, value: object, rule: str, remedy: str) -> ApiError:
    """Return the error for a field whose value breaks a rule."""
    message = f"{name or 'the body'} = {_as_json(value)}: {rule}; {remedy}"
    return ApiError(400, message, name.partition(".")[0] or None, "invalid_value")
