"""Servers that scorers ask over HTTP: rewards, and a target that is served elsewhere."""

import re
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from prefixrl.common.config.section import NonNegativeFloat, Positive, PositiveFloat, Section
from prefixrl.common.config.workers.engine_record import EngineRecord

OPENAI = EngineRecord(
    make="prefixrl.scorer.served.load:load_served",
    takes_options=False,
    needs_address=True,
    roles=("scorer",),
    holds_weights=False,
    shares_runs=False,
)
"""A target behind an OpenAI-compatible endpoint."""
OWN_KEYS = frozenset(
    (
        "model",
        "prompt",
        "messages",
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "seed",
        "stop",
        "n",
        "stream",
    )
)
"""Keys of a request that this software sets itself."""
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*")


def _problem(url: str) -> str:
    """Return the fault of an endpoint address as the end of a sentence, "" if it has none."""
    from httpx2 import URL, InvalidURL  # seldom needed, slow to import

    try:
        parts = urlsplit(url)
        host = parts.hostname
        _ = parts.port
        URL(url)
    except (ValueError, InvalidURL) as error:
        return f": {error}"
    return "" if parts.scheme in ("http", "https") and host else "; scheme or host is missing"


class ServerConfig(Section):
    """A server that scorers ask over HTTP."""

    NAME: ClassVar[str]
    """The section's own name in the run file."""

    url: str | None = None
    key_variable: str | None = None
    """Name of the environment variable, on the scorers' hosts, that holds the key. Absent: no key is sent."""
    requests: Positive = 64
    request_s: PositiveFloat = 300.0
    patience_s: PositiveFloat = 600.0

    @field_validator("url")
    @classmethod
    def _is_an_address(cls, url: str | None) -> str | None:
        if url is None:
            return None
        problem = _problem(url)
        if set(url) & set("?#") or "@" in (url if problem else urlsplit(url).netloc):
            raise ValueError(
                "the address (not shown: addresses are logged) has a user, a password or a query; put the key into an "
                "environment variable and name that in key_variable"
            )
        if problem:
            raise ValueError(f"{url!r} is not an address like http://HOST:PORT/v1{problem}")
        return url.rstrip("/")

    @field_validator("key_variable")
    @classmethod
    def _is_a_name(cls, name: str | None) -> str | None:
        if name is not None and not _VARIABLE.fullmatch(name):
            raise ValueError(
                "this (not shown: it may be the key itself) is not an environment variable's name like OPENAI_API_KEY"
            )
        return name


class OpenAIConfig(ServerConfig):
    """The options of `scorer.engine = "openai"`."""

    NAME = "scorer.openai"

    url: str | None = None
    """Address above `/completions`, for example "http://node7:8000/v1"."""
    model: str | None = None
    """Name of the target at the endpoint. Absent: the only model that the endpoint lists."""
    api: Literal["completions", "chat"] = "completions"
    """completions: the target continues the text of a prompt. chat: it is asked in messages, as vendors' models are; no
    file of the target is needed, and target.model is its name at the endpoint."""
    dialect: Literal["vllm", "openai"] | None = None
    """vllm: vLLM's extensions: token ids come back, stop tokens end a row, top_k, min_p. openai: OpenAI's keys only.
    Absent: vllm for completions, openai for chat."""
    omit: Annotated[tuple[Literal["temperature", "top_p", "seed"], ...], Field(strict=False)] = ()
    """Settings that the endpoint refuses, as models that reason do; they are left out of requests."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Further keys of every request, passed unchanged: { reasoning_effort = "low" }."""
    prompt: Literal["tokens", "text"] = "tokens"
    """tokens: the prompt is sent as ids. text: for endpoints without ids, which may read other tokens at the prefix."""
    requests: Positive = 64
    """Rows requested at once, per scorer."""
    request_s: PositiveFloat = 300.0
    """Limit of one request, then repeated. A row that misses it twice while others are answered gets no verdict."""
    patience_s: PositiveFloat = 600.0
    """Longest time without any answer; then the scorer ends. A row alone that fails for so long gets no verdict."""
    seeded: bool = True
    """Send each row's own seed, so that a repeated request gets the same text if the endpoint honours seeds."""
    requests_per_minute: Positive | None = None
    """Most requests per minute, of all scorers of the run together. Absent: no limit."""
    tokens_per_minute: Positive | None = None
    """Most tokens per minute, of prompts and completions, of all scorers together. Absent: no limit."""
    prompt_price: NonNegativeFloat = 0.0
    """Price of a million prompt tokens, in any currency. No cost is reported while both prices are 0."""
    completion_price: NonNegativeFloat = 0.0
    """Price of a million completion tokens."""
    most_cost: PositiveFloat | None = None
    """Cost, at these prices, before which the run ends in order: no group is begun that would exceed it, what is under
    way is trained and saved (docs/targets.md). Absent: no limit."""

    @property
    def is_chat(self) -> bool:
        """True if the target is asked in messages."""
        return self.api == "chat"

    @property
    def has_extensions(self) -> bool:
        """True if requests have vLLM's own keys."""
        return (self.dialect or ("openai" if self.is_chat else "vllm")) == "vllm"

    @property
    def is_limited(self) -> bool:
        """True if requests wait for their turn."""
        return self.requests_per_minute is not None or self.tokens_per_minute is not None

    @property
    def limit_words(self) -> str:
        """The limits by key and value."""
        keys = ("requests_per_minute", "tokens_per_minute")
        values = {key: value for key in keys if (value := getattr(self, key)) is not None}
        return " and ".join(f"{self.NAME}.{key} = {value}" for key, value in values.items())

    def cost(self, prompt_tokens: float, completion_tokens: float) -> float:
        """Return the cost of tokens."""
        prompts, completions = (
            prompt_tokens * self.prompt_price,
            completion_tokens * self.completion_price,
        )
        return (prompts + completions) / 1e6

    @property
    def has_price(self) -> bool:
        """True if tokens cost something."""
        return self.prompt_price > 0 or self.completion_price > 0

    def _check_prices(self) -> None:
        self.refuse_if(
            self.most_cost is not None and not self.has_price,
            "most_cost prompt_price completion_price",
            "nothing costs anything without a price; give the prices of a million tokens, or leave most_cost out",
        )

    def _check_extra(self) -> None:
        own_keys = sorted(set(self.extra) & OWN_KEYS)
        if own_keys:
            raise ValueError(
                f"extra sets {', '.join(own_keys)}: this software sets them itself; use the key of the run file"
            )
