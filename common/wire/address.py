"""The place where a run's broker listens, and the key it lets in."""

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple, TypeVar

from prefixrl.common.errors import ConfigError
from prefixrl.common.wire import interfaces
from prefixrl.common.wire.keys import ClientKey, KeyRole, client_key_file, read_client_key
from prefixrl.common.wire.transport import check_endpoint

MOST_PORT = 65535
ENDPOINT_FILE = "endpoint"
"""File in the run directory that a broker writes at each start; it may name another endpoint each time."""

REBIND_S = 10.0
"""Time for which the port of an earlier server may stay taken: it was killed, its memory is being freed."""
Bound = TypeVar("Bound")


class Address(NamedTuple):
    """A broker's endpoint, and the key that proves one to the other."""

    endpoint: str
    key: ClientKey


Find = Callable[[], Address]


def fixed_address(endpoint: str, key_file: Path) -> Find:
    """Return the finder of an endpoint that stays; raises ConfigError."""
    address = Address(check_endpoint(endpoint), read_client_key(key_file))
    return lambda: address


def address_in(directory: Path, role: KeyRole) -> Address:
    """Return the address of a run directory's broker; FileNotFoundError before it listens."""
    path = directory / ENDPOINT_FILE
    try:
        endpoint = check_endpoint(path.read_text(encoding="utf-8").strip())
    except FileNotFoundError:
        raise
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read ({error}); every process of a run needs to read its directory, as a file that the "
            "broker wrote"
        ) from None
    return Address(endpoint, read_client_key(client_key_file(directory, role)))


def mark_of(endpoint_file: Path) -> str:
    """Return a mark that differs after each write of a file, whatever the clock says; "" without a file."""
    with suppress(FileNotFoundError):
        status = endpoint_file.stat()
        return f"{status.st_ino}-{status.st_mtime_ns}"
    return ""


def bindable(listen: str) -> str:
    """Return `broker.listen` with the IPv4 address of its host; raises ConfigError."""
    host, port = _host_and_port(check_endpoint(listen))
    if port is None:
        return listen
    try:
        return f"tcp://{interfaces.address_here(host)}:{port}"
    except ConfigError as error:
        raise ConfigError(
            f"broker.listen = {listen!r}: {error}; 0.0.0.0 listens on every interface"
        ) from None


def weights_listen(listen: str) -> str:
    """Return where weights are served: at a free port, or the one after a fixed one."""
    host, port = _host_and_port(check_endpoint(listen))
    if port is None:
        return f"{listen}.weights"
    if port == MOST_PORT:
        raise ConfigError(
            f"broker.listen = {listen!r}: weights need the port after it, and there is none"
        )
    return f"tcp://{host}:{port + 1 if port else 0}"


def advertised(bound: str) -> str:
    """Return a bound endpoint as other hosts reach it; raises ConfigError."""
    host, _, port = bound.removeprefix("tcp://").rpartition(":")
    if not bound.startswith("tcp://") or host != "0.0.0.0":
        return bound
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        raise ConfigError(
            f"broker.listen = {bound!r} would be told to workers as {name}:{port}, but that name is unknown here "
            f"({error}); listen on an address of this host instead, tcp://10.0.0.7:0 for example"
        ) from None
    return f"tcp://{name}:{port}"


def beside(endpoint: str, other: str) -> str:
    """Return an endpoint with the host of another one, which is on the same machine."""
    if not (endpoint.startswith("tcp://") and other.startswith("tcp://")):
        return endpoint
    return f"{other.rpartition(':')[0]}:{endpoint.rpartition(':')[2]}"


def is_on_this_host(endpoint: str) -> bool:
    """Return True if no other host can reach an endpoint."""
    if not endpoint.startswith("tcp://"):
        return True
    return is_loopback(_host_and_port(endpoint)[0])


def is_loopback(host: str) -> bool:
    """Return True for a name or address that every host has for itself."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _host_and_port(endpoint: str) -> tuple[str, int | None]:
    if not endpoint.startswith("tcp://"):
        return endpoint, None
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host, int(port)


def bound_within(patience_s: float, bind: Callable[[], Bound]) -> Bound:
    """Return what `bind` opens; ConfigError where its port stays taken for so long."""
    deadline_s = time.monotonic() + patience_s
    while True:
        try:
            return bind()
        except ConfigError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.1)
