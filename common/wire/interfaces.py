"""The network interfaces of this host and their IPv4 addresses."""

import fcntl
import socket
import struct
from ipaddress import ip_address

from prefixrl.common.errors import ConfigError

_SIOCGIFADDR = 0x8915
_ELSEWHERE = "198.51.100.1"
"""An address that is kept for examples (RFC 5737); nothing is sent there."""
_ANY_PORT = 9


def names() -> list[str]:
    """Return the names of the interfaces."""
    return [name for _, name in socket.if_nameindex()]


def address_of(interface: str) -> str | None:
    """Return the first IPv4 address of an interface, None where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def address_here(host: str) -> str:
    """Return the IPv4 address of an interface, a host name or an address; raises ConfigError."""
    if host == "*":
        return "0.0.0.0"
    if host in names():
        address = address_of(host)
        if address is None:
            raise ConfigError(f"the interface {host} has no IPv4 address now")
        return address
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise ConfigError(
            f"{host!r} is no address, no interface of this host ({', '.join(names())}) and no name it knows ({error})"
        ) from None


def towards(host: str) -> str | None:
    """Return the interface from which this host reaches another one, None without a way."""
    source = _source(host)
    if source is not None and ip_address(source).is_loopback:
        source = _source(_ELSEWHERE)
    return next(
        (name for name in names() if source is not None and address_of(name) == source), None
    )


def _source(host: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect((host, _ANY_PORT))  # looks for the way, and sends nothing
        except OSError:
            return None
        address: str = asking.getsockname()[0]
    return address
