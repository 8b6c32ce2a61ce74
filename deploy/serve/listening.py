"""The common part of both HTTP servers: it checks key and Host, listens, limits connections and ends in order."""

import asyncio
import base64
import contextlib
import logging
import os
import signal
import socket
import stat
from collections.abc import Iterator
from hmac import compare_digest
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from prefixrl.common.errors import ConfigError, to_copy
from prefixrl.common.host.log_lines import LineBudget
from prefixrl.common.host.process import handle_stops
from prefixrl.common.wire.address import is_loopback

HEADER_S = 10.0
"""Longest time in which the headers of a request must arrive."""
KEEP_ALIVE_S = 30
MOST_CONNECTIONS = 2048
BACKLOG = 512
LEAST_KEY_CHARS = 16


def key_of(host: str, variable: str | None, file: Path | None) -> str | None:
    """Return the API key, None where none is needed; raise ConfigError for a weak or missing key."""
    if variable is not None and file is not None:
        raise ConfigError("--key-variable and --key-file: two sources of one key; give one")
    if file is not None:
        key = _read(file)
        source = f"--key-file {file}"
    elif variable is not None:
        # Processes of the engines need not have it.
        key = os.environ.pop(variable, "")
        source = "--key-variable (the name is not shown: it may be the key itself)"
    elif is_loopback(host):
        return None
    else:
        raise ConfigError(
            f"--host {host}: other machines reach it, so that a key is needed; give --key-variable NAME or --key-file "
            f"FILE (mode 0600), or --host 127.0.0.1"
        )
    if len(key) < LEAST_KEY_CHARS or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(
            f"{source}: holds no key of at least {LEAST_KEY_CHARS} printable ASCII characters without spaces; make one "
            f"with `openssl rand -hex 32`"
        )
    return key


def _read(file: Path) -> str:
    try:
        mode = stat.S_IMODE(file.stat().st_mode)
        if mode & 0o077:
            raise ConfigError(
                f"--key-file {file}: has mode {mode:04o}, others may read it; {to_copy('chmod 600', file)}"
            )
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--key-file {file}: cannot be read ({error})") from None


def listening(host: str, port: int) -> socket.socket:
    """Return a listening socket; raise ConfigError where host and port cannot be bound."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"--host {host} --port {port}: cannot listen there ({error.strerror}); give another, or --port 0"
        ) from None


def address_of(listener: socket.socket) -> str:
    """Return the URL of a server, without a path."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def refusal(
    host: str, authorization: str | None, key: str | None, needs_key: bool = True
) -> tuple[int, str] | None:
    """Return status and reason of a refusal, by Host and key of a request; None for a request that may be answered."""
    if key is None and not is_loopback(host):
        # A web page may have its own name point to loopback.
        said = f"Host {host!r}: without a key only localhost, 127.0.0.1 and ::1 are allowed; use one of them"
        return 403, said
    if key is None or not needs_key:
        return None
    scheme, _, password = (authorization or "").partition(" ")
    password = password.strip()
    if scheme.lower() == "basic":  # a browser asks for it, under any user's name
        with contextlib.suppress(ValueError):
            password = base64.b64decode(password).decode(errors="replace").partition(":")[2]
    if scheme.lower() in ("bearer", "basic") and compare_digest(password.encode(), key.encode()):
        return None
    return 401, "the API key is missing or wrong; send it as `Authorization: Bearer KEY`"


class _Connection(H11Protocol):
    """A connection whose client must send all headers in time: uvicorn has no such limit."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._late = self.loop.call_later(HEADER_S, transport.close)

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        super().data_received(data)
        is_waiting = self.cycle is None or self.cycle.response_complete
        if self._late and self.cycle is not before:
            self._late.cancel()
            self._late = None
        elif self._late is None and is_waiting:
            self._late = self.loop.call_later(HEADER_S, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._late:
            self._late.cancel()
        super().connection_lost(exc)


class _Server(uvicorn.Server):
    """A server that ends in order at any stop signal, with exit code 0: uvicorn alone would raise the signal again."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        before = handle_stops(self.handle_exit)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def server_of(app: ASGIApp, drain_s: float) -> uvicorn.Server:
    """Return a server; when it is asked to stop, open requests have `drain_s` to finish."""
    # uvicorn has a line for each connection that is too many.
    logging.getLogger("uvicorn.error").addFilter(LineBudget())
    config = uvicorn.Config(
        app,
        loop="asyncio",
        http=_Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=MOST_CONNECTIONS,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(drain_s),
    )
    return _Server(config)
