"""The socket, the key of who may ask, and time limits of connections."""

import asyncio
import contextlib
import os
import signal
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from prefixrl.common.errors import ConfigError
from prefixrl.common.host.process import handle_stops
from prefixrl.deploy.serve.app import is_loopback

HEADER_S = 10.0
"""Longest time for the head of a request to arrive."""
KEEP_ALIVE_S = 30
MOST_CONNECTIONS = 2048
BACKLOG = 512
LEAST_KEY_CHARS = 16


def key_of(host: str, variable: str | None, file: Path | None) -> str | None:
    """Return the API key; raises ConfigError for one that is none, or where one is needed."""
    if variable is not None and file is not None:
        raise ConfigError("--key-variable and --key-file: two sources of one key; give one")
    if variable is None and file is None:
        if is_loopback(host):
            return None
        raise ConfigError(
            f"--host {host}: other machines reach it, so that a key is needed; give --key-variable NAME or --key-file "
            f"FILE (mode 0600), or --host 127.0.0.1"
        )
    if file is not None:
        key, source = _read(file), f"--key-file {file}"
    else:
        assert variable is not None
        # Processes of the engines need not have it.
        key, source = os.environ.pop(variable, ""), "--key-variable (the name is not shown: it may be the key itself)"
    if len(key) < LEAST_KEY_CHARS or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(
            f"{source}: holds no key of at least {LEAST_KEY_CHARS} printable ASCII characters without spaces; make one "
            f"with `openssl rand -hex 32`"
        )
    return key


def _read(file: Path) -> str:
    try:
        mode = file.stat().st_mode
        if stat.S_IMODE(mode) & 0o077:
            raise ConfigError(
                f"--key-file {file}: has mode {stat.S_IMODE(mode):04o}, others may read it; chmod 600 {file}"
            )
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--key-file {file}: cannot be read ({error})") from None


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; raises ConfigError where there is none to have."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"--host {host} --port {port}: cannot listen there ({error.strerror}); give another, or --port 0"
        ) from None


class Connection(H11Protocol):
    """A connection whose client must send a whole head in time."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first head."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Take bytes; once they end a head, its time limit is over."""
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:
            self._unwatch()
        elif self.cycle is None or self.cycle.response_complete:
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._unwatch()
        super().connection_lost(exc)

    def _watch(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(HEADER_S, self.transport.close)

    def _unwatch(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


class HttpServer(uvicorn.Server):
    """A server that any stop signal ends in order, with exit code 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take stop signals, and unlike uvicorn do not raise them again at the end."""
        before = handle_stops(self.handle_exit)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def server_of(app: Any, drain_s: float) -> HttpServer:
    """Return a server; once it is asked to stop, open requests have `drain_s` to end."""
    config = uvicorn.Config(
        app,
        loop="asyncio",
        http=Connection,
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
    return HttpServer(config)
