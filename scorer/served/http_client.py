"""One HTTP request: key, proxies, time limit; every fault on the way is a `Retry`."""

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import TypeVar
from urllib.parse import urlsplit

import httpx2

from prefixrl.common.config.workers.served import ServerConfig
from prefixrl.common.errors import UserError
from prefixrl.common.wire.address import is_loopback
from prefixrl.scorer.served import protocol
from prefixrl.scorer.served.protocol import EndpointRefused, Retry, RowRefused, ServedModel

log = logging.getLogger(__name__)

CONNECT_S = 10.0
MOST_BYTES = 64 * 2**20
"""Longest body of an answer that is read; a completion has thousands of times less."""

T = TypeVar("T")
Reader = Callable[[int, Mapping[str, str], bytes, datetime], T]
"""A function that reads an answer's status, headers and content at a time."""


class HttpClient:
    """The sockets to an endpoint. Reasons in outcomes never show the key."""

    def __init__(self, section: ServerConfig) -> None:
        """Open the client; raises UserError if there is no key or a proxy cannot be used."""
        self._section = section
        self._key = _key_of(section)
        # It logs a line per request at level INFO.
        logging.getLogger("httpx2").setLevel(logging.WARNING)
        try:
            self._client = httpx2.AsyncClient(
                headers={"authorization": f"Bearer {self._key}"} if self._key else {},
                timeout=httpx2.Timeout(
                    None, connect=CONNECT_S
                ),  # `_exchange` limits the whole request
                limits=httpx2.Limits(
                    max_connections=section.requests, max_keepalive_connections=section.requests
                ),
                # Proxies of the environment, but none to this very host.
                trust_env=not _is_loopback(section),
            )
        except (ValueError, ImportError, httpx2.InvalidURL) as error:
            # Do not show an invalid URL: it may hold a password.
            reason = "an address is not a URL" if isinstance(error, httpx2.InvalidURL) else error
            raise UserError(
                f"{section.NAME}.url = {section.url!r} cannot be reached through the proxies of the environment: "
                f"{reason}; check HTTP_PROXY, HTTPS_PROXY, ALL_PROXY (http://HOST:PORT), or name the host in NO_PROXY"
            ) from None

    async def post(self, url: str, content: bytes, read: Reader[T]) -> T | Retry:
        """Send JSON."""
        headers = {"content-type": "application/json"}
        return await self._exchange(
            self._client.build_request("POST", url, content=content, headers=headers), read
        )

    async def models(self) -> list[ServedModel] | Retry | EndpointRefused:
        """Request the list of models."""
        return await self._exchange(
            self._client.build_request("GET", f"{self._section.url}/models"), protocol.read_models
        )

    async def close(self) -> None:
        """Close the sockets."""
        await self._client.aclose()

    async def _exchange(self, request: httpx2.Request, read: Reader[T]) -> T | Retry:
        outcome: T | Retry
        try:
            # One limit for the whole exchange: an answer that comes slowly is late as well.
            async with asyncio.timeout(self._section.request_s):
                answer = await self._client.send(request, stream=True)
                content = await _content(answer)
            if len(content) > MOST_BYTES:
                outcome = Retry(f"an answer of more than {MOST_BYTES // 2**20} MiB")
            else:
                outcome = read(answer.status_code, answer.headers, content, datetime.now(UTC))
        except TimeoutError:
            limit = f"{self._section.NAME}.request_s = {self._section.request_s:g}"
            outcome = Retry(f"no answer within {limit}", is_late=True)
        except (httpx2.HTTPError, OSError) as error:
            outcome = Retry(
                f"{type(error).__name__}: {error}".removesuffix(": "),
                is_unconnected=isinstance(error, httpx2.ConnectError),
                is_unresolved=_is_unresolved(error),
            )
        # An endpoint may repeat the request in its reason, and no log may hold the key.
        if isinstance(outcome, Retry | RowRefused | EndpointRefused):
            return replace(outcome, reason=protocol.redacted(outcome.reason, self._key))
        return outcome


async def _content(answer: httpx2.Response) -> bytes:
    """Return the body of an answer, or a beginning of more than `MOST_BYTES`."""
    content = bytearray()
    try:
        async for part in answer.aiter_bytes():
            content += part
            if len(content) > MOST_BYTES:
                break
    finally:
        await answer.aclose()
    return bytes(content)


def _key_of(section: ServerConfig) -> str:
    """Return the key, "" if no key is to be sent; raises UserError if the key cannot be sent."""
    if section.key_variable is None:
        return ""
    key = os.environ.get(section.key_variable, "").strip()
    if not key or not (key.isascii() and key.isprintable()):
        problem = "does not hold a key" if key else "is not set on this host"
        raise UserError(
            f"{section.NAME}.key_variable = {section.key_variable!r}: this environment variable {problem}"
        )
    if urlsplit(section.url or "").scheme == "http" and not _is_loopback(section):
        log.warning(
            "the key of %s is sent to %s without encryption", section.key_variable, section.url
        )
    return key


def _is_loopback(section: ServerConfig) -> bool:
    return is_loopback(urlsplit(section.url or "").hostname or "")


def _is_unresolved(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, socket.gaierror):
        error = error.__cause__ or error.__context__
    return error is not None
