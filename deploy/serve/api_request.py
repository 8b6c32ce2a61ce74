"""The JSON of requests, and the errors that refuse them, in OpenAI's form. Pure.

A field that cannot be honoured is refused, unless its value asks for nothing: silence would be a wrong answer.
"""

from dataclasses import dataclass
from typing import Any

import msgspec

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
    "logprobs": (None, False),
    "parallel_tool_calls": (None, True, False),
    "presence_penalty": (None, 0),
    "response_format": (None, {"type": "text"}),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "top_logprobs": (None, 0),
}
"""Fields of OpenAI's that are taken only with values that ask for nothing."""
IGNORED = frozenset({"metadata", "prompt_cache_key", "safety_identifier", "user"})
"""Fields that change no answer."""
MOST_TEMPERATURE = 2.0
MOST_STOPS = 4
MOST_CHOICES = 128
MOST_PROBLEMS = 256
_SHOWN_CHARS = 80


class ApiError(Exception):
    """An answer that is an error, in OpenAI's form."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, retry_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers = {} if retry_s is None else {"Retry-After": str(retry_s)}
        """Time after which the same request may be answered."""

    @property
    def document(self) -> dict[str, Any]:
        """The body of the answer."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class Limits:
    """Values that this server allows."""

    model: str
    """Name under which the adapter is served."""
    most_tokens: int
    """Longest answer, prefix and completion."""
    own_system: str | None = None
    """Section of the run whose system turn is fixed; None where a request may bring one."""


@dataclass(frozen=True)
class Asked:
    """A request that can be answered."""

    problems: tuple[str, ...]
    system: str
    choices: int
    """Answers per problem."""
    temperature: float
    top_p: float | None
    """None: that of the run."""
    max_tokens: int | None
    """None: as long as the run allows."""
    stops: tuple[str, ...]
    seed: int | None
    streams: bool
    includes_usage: bool
    is_chat: bool


def read(body: bytes, limits: Limits, is_chat: bool) -> Asked:
    """Return what a body asks for; raises ApiError."""
    try:
        document = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is no JSON ({error}); send one JSON object") from None
    if not isinstance(document, dict):
        raise _refused("", document, "a JSON object", "send one")
    fields = _Fields(document)
    _check_model(fields.take("model"), limits)
    problems, system = _conversation(fields, limits) if is_chat else (_problems(fields), "")
    choices = fields.whole("n", 1, MOST_CHOICES) or 1
    temperature = fields.number("temperature", 0.0, MOST_TEMPERATURE) or 0.0
    top_p = fields.number("top_p", 0.0, 1.0)
    if top_p == 0.0:
        raise _refused("top_p", 0.0, "above 0, up to 1", "for the likeliest token give temperature 0")
    if choices > 1 and temperature == 0.0:
        raise _refused("n", choices, "1 at temperature 0", "greedy answers are all alike; give a temperature above 0")
    asked = Asked(
        problems=problems,
        system=system,
        choices=choices,
        temperature=temperature,
        top_p=top_p,
        max_tokens=_max_tokens(fields, limits, is_chat),
        stops=_stops(fields),
        seed=fields.whole("seed", -(2**63), 2**63 - 1),
        streams=fields.flag("stream"),
        includes_usage=_includes_usage(fields),
        is_chat=is_chat,
    )
    fields.check_rest()
    return asked


class _Fields:
    """The fields of a request that are not read yet."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._left = dict(document)

    def take(self, name: str) -> Any:
        return self._left.pop(name, None)

    def number(self, name: str, least: float, most: float) -> float | None:
        value = self.take(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise _refused(name, value, f"a number from {least:g} to {most:g}", "give one, or leave it out")
        return float(value)

    def whole(self, name: str, least: int, most: int, remedy: str = "") -> int | None:
        value = self.take(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise _refused(name, value, f"{least} to {most}", remedy or "give such a number, or leave it out")
        return value

    def flag(self, name: str) -> bool:
        value = self.take(name)
        if value not in (None, True, False) or (isinstance(value, int) and not isinstance(value, bool)):
            raise _refused(name, value, "true or false", "give one, or leave it out")
        return bool(value)

    def check_rest(self) -> None:
        """Raise ApiError for a field that this server does not honour."""
        for name, value in self._left.items():
            if name in IGNORED or (name in NEUTRAL and any(_is_same(value, each) for each in NEUTRAL[name])):
                continue
            allowed = " or ".join(_shown(each) for each in NEUTRAL[name]) if name in NEUTRAL else "no value"
            raise _refused(name, value, allowed, "this server does not offer it; leave it out")


def _is_same(value: Any, other: Any) -> bool:
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def _shown(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def _refused(name: str, value: Any, allowed: str, remedy: str) -> ApiError:
    where = name or "the body"
    return ApiError(400, f"{where} = {_shown(value)}: allowed is {allowed}; {remedy}", name or None, "invalid_value")


def _check_model(value: Any, limits: Limits) -> None:
    if value != limits.model:
        raise ApiError(
            400 if not isinstance(value, str) else 404,
            f"model = {_shown(value)}: this server has {_shown(limits.model)} only; give that, as /v1/models lists it",
            "model",
            "model_not_found",
        )


def _problems(fields: _Fields) -> tuple[str, ...]:
    value = fields.take("prompt")
    problems = [value] if isinstance(value, str) else value
    is_list = isinstance(problems, list) and 0 < len(problems) <= MOST_PROBLEMS
    if not is_list or not all(isinstance(each, str) and each.strip() for each in problems):
        allowed = f"a problem as text, or a list of 1 to {MOST_PROBLEMS} of them"
        raise _refused("prompt", value, allowed, "token ids and blank texts are no problems; give texts")
    return tuple(problems)


def _conversation(fields: _Fields, limits: Limits) -> tuple[tuple[str, ...], str]:
    """Return the problem of a conversation, and its system turn."""
    value = fields.take("messages")
    if not isinstance(value, list) or not value or not all(isinstance(each, dict) for each in value):
        raise _refused("messages", value, "a list of messages", 'give [{"role": "user", "content": "..."}]')
    roles = tuple(each.get("role") for each in value)
    if roles not in (("user",), ("system", "user"), ("developer", "user")):
        raise _refused(
            "messages",
            list(roles),
            'the roles ["user"] or ["system", "user"]',
            "the adapter was trained on single problems and has seen no earlier turns; send the last problem alone",
        )
    texts = [_content(each, f"messages[{index}]") for index, each in enumerate(value)]
    if len(texts) == 2 and limits.own_system is not None:
        raise _refused(
            "messages[0]", value[0], "no system message", f"the run has its own ({limits.own_system}); leave it out"
        )
    return (texts[-1],), texts[0] if len(texts) == 2 else ""


def _content(message: dict[str, Any], name: str) -> str:
    value = message.get("content")
    parts = value if isinstance(value, list) else [{"type": "text", "text": value}]
    texts = [
        each.get("text") if isinstance(each, dict) and each.get("type") == "text" else None for each in parts or [None]
    ]
    text = "".join(each for each in texts if isinstance(each, str))
    if not text.strip() or not all(isinstance(each, str) for each in texts):
        raise _refused(f"{name}.content", value, "a text that is not blank, or a list of text parts", "give one")
    others = sorted(message.keys() - {"role", "content", "name"})
    if others:
        raise _refused(f"{name}.{others[0]}", message[others[0]], "no value", "leave it out")
    return text


def _max_tokens(fields: _Fields, limits: Limits, is_chat: bool) -> int | None:
    remedy = "the most is the run's own limit, which `prefixrl serve --set` can raise"
    names = ("max_tokens", "max_completion_tokens") if is_chat else ("max_tokens",)
    given = [each for name in names if (each := fields.whole(name, 1, limits.most_tokens, remedy)) is not None]
    if len(set(given)) > 1:
        raise _refused("max_tokens", given, "one limit", "give max_tokens or max_completion_tokens")
    return given[0] if given else None


def _stops(fields: _Fields) -> tuple[str, ...]:
    value = fields.take("stop")
    stops = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(stops, list) or len(stops) > MOST_STOPS or not all(isinstance(e, str) and e for e in stops):
        raise _refused("stop", value, f"a text, or a list of up to {MOST_STOPS}", "give texts that are not empty")
    return tuple(stops)


def _includes_usage(fields: _Fields) -> bool:
    value = fields.take("stream_options")
    if value is None:
        return False
    options = _Fields(value) if isinstance(value, dict) else None
    if options is None:
        raise _refused("stream_options", value, 'an object like {"include_usage": true}', "give one, or leave it out")
    is_included = options.flag("include_usage")
    if options.flag("include_obfuscation"):
        raise _refused("stream_options", value, 'an object like {"include_usage": true}', "leave the others out")
    options.check_rest()
    return is_included
