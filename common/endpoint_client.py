"""The sockets to a completions endpoint: the key, the proxies, how many connections."""

import logging
import os
from ipaddress import ip_address
from urllib.parse import urlsplit

import httpx2

from prefixrl.common.errors import UserError
from prefixrl.common.openai_options import OpenAIConfig

log = logging.getLogger(__name__)

CONNECT_S = 10.0


def key_of(section: OpenAIConfig) -> str:
    """The key, "" where none is to be sent; raises UserError where there is none that can be sent."""
    if section.key_variable is None:
        return ""
    key = os.environ.get(section.key_variable, "").strip()
    if not key or not (key.isascii() and key.isprintable()):
        problem = "holds what is no key" if key else "is not set on this host"
        raise UserError(
            f"scorer.openai.key_variable = {section.key_variable!r}: this environment variable {problem}"
        )
    if urlsplit(section.url or "").scheme == "http" and not _is_loopback(section):
        log.warning(
            "the key of %s goes to %s without encryption", section.key_variable, section.url
        )
    return key


def http_client(section: OpenAIConfig, key: str) -> httpx2.AsyncClient:
    """Raises UserError where a proxy of the environment cannot be used."""
    # It says a line per request, at the level of a run's own news.
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    limits = httpx2.Limits(
        max_connections=section.requests, max_keepalive_connections=section.requests
    )
    try:
        return httpx2.AsyncClient(
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=httpx2.Timeout(
                None, connect=CONNECT_S
            ),  # a request's whole time is its caller's
            limits=limits,
            # Proxies of the environment, but none to this very host.
            trust_env=not _is_loopback(section),
        )
    except (ValueError, ImportError, httpx2.InvalidURL) as error:
        # What is no URL may be a piece of a password.
        reason = "an address is no URL" if isinstance(error, httpx2.InvalidURL) else error
        raise UserError(
            f"scorer.openai.url = {section.url!r} cannot be reached through the proxies of the environment: {reason}; check "
            "HTTP_PROXY, HTTPS_PROXY and ALL_PROXY (http://HOST:PORT), or name the host in NO_PROXY"
        ) from None


def _is_loopback(section: OpenAIConfig) -> bool:
    host = urlsplit(section.url or "").hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
