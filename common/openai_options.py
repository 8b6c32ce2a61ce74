"""The `[scorer.openai]` section of a run file: where a target that is served elsewhere is, and how it is asked."""

import re
from typing import Literal
from urllib.parse import urlsplit

from pydantic import field_validator

from prefixrl.common.section import NonNegativeFloat, Positive, PositiveFloat, Section

_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*")


def _problem(url: str) -> str:
    """What makes an address none that can be asked, as the end of a sentence; "" where it is one."""
    from httpx2 import URL, InvalidURL  # seldom needed, slow to import

    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
        URL(url)
    except (ValueError, InvalidURL) as error:
        return f": {error}"
    return "" if parts.scheme in ("http", "https") and host else "; scheme or host is missing"


class OpenAIConfig(Section):
    """For `scorer.engine = "openai"`."""

    url: str | None = None
    """Address under which the endpoint has `/completions`, for example "http://node7:8000/v1"."""
    model: str | None = None
    """The target's name there; absent: the one model that the endpoint lists."""
    key_variable: str | None = None
    """Name of the environment variable, on the scorers' hosts, that holds the key. Absent: no key is sent."""
    dialect: Literal["vllm", "openai"] = "vllm"
    """vllm: with vLLM's extensions, so that token ids come back, the target's own stop tokens end a row, and top_k and min_p
    are to be had. openai: only what OpenAI's own API has."""
    prompt: Literal["tokens", "text"] = "tokens"
    """tokens: the prompt is sent as token ids. text: as text, for endpoints that take no ids; where prefix and prompt meet, the
    endpoint's tokenizer may then read other tokens."""
    requests: Positive = 64
    """Rows asked for at once, per scorer."""
    request_s: PositiveFloat = 300.0
    """A request without an answer for this long is given up and made again; a row that has no answer in time twice, while
    others are answered, is left without a verdict."""
    patience_s: PositiveFloat = 600.0
    """An endpoint that answers no request for this long ends the scorer; one row that fails for so long while others are
    answered is left without a verdict."""
    seeded: bool = True
    """Send each row's own seed, so that a request made again says the same, as far as the endpoint keeps to seeds."""
    prompt_price: NonNegativeFloat = 0.0
    """Per million prompt tokens, in whatever currency; 0 everywhere: no cost is told."""
    completion_price: NonNegativeFloat = 0.0
    """Per million completion tokens."""

    @field_validator("url")
    @classmethod
    def _is_an_address(cls, url: str | None) -> str | None:
        if url is None:
            return None
        problem = _problem(url)
        if set(url) & set("?#") or "@" in (url if problem else urlsplit(url).netloc):
            raise ValueError(
                "an address with a user, a password or a query is kept in files and logs (it is not shown here); put the key "
                "into an environment variable and name that in key_variable"
            )
        if problem:
            raise ValueError(f"{url!r} is no address like http://HOST:PORT/v1{problem}")
        return url.rstrip("/")

    @field_validator("key_variable")
    @classmethod
    def _is_a_name(cls, name: str | None) -> str | None:
        if name is not None and not _VARIABLE.fullmatch(name):
            raise ValueError(
                "this is no name of an environment variable in capitals, such as OPENAI_API_KEY (what was given is not shown: "
                "it may be the key itself, which belongs into the environment)"
            )
        return name
