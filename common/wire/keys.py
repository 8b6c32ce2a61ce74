"""The keys of a run: who may connect to it, and in which role.

RUN/keys/         0700: only the user who runs it may look
  server.key      the run's own pair, for broker and weight server
  clients         a line per key that is let in: its name, its role, its public half; read again when it changes
  NAME.key        a client's pair with the run's public half: all that a process needs (0600)
"""

import fcntl
import logging
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from prefixrl.common.errors import ConfigError, to_copy

log = logging.getLogger(__name__)

ZAP_DOMAIN = "prefixrl"
KEYS_FOLDER = "keys"
CLIENTS_FILE = "clients"
SERVER = "server"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

Kind = TypeVar("Kind", bound=msgspec.Struct)
KeyRole = Literal["worker", "rank", "operator"]
ROLES: tuple[KeyRole, ...] = ("worker", "rank", "operator")
KEY_CHARS = 40
Z85 = Annotated[str, msgspec.Meta(min_length=KEY_CHARS, max_length=KEY_CHARS)]


class Pair(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A key pair of CurveZMQ."""

    public: Z85
    secret: Z85


class ClientKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a client's key file."""

    name: str
    role: KeyRole
    pair: Pair
    server: Z85
    """The public half of the run's own key: a peer that cannot prove it is not the run."""


@dataclass(frozen=True)
class Listed:
    """A client that is let in."""

    name: str
    role: KeyRole


class ClientList:
    """The clients that are let in, by public key, as the file has them now."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / KEYS_FOLDER / CLIENTS_FILE
        self._path_name = str(self._path)
        self._seen: tuple[int, ...] = ()
        self._clients: dict[str, Listed] = {}
        self._lock = threading.Lock()  # the authenticator asks from a thread of its own

    def find_client(self, public: str) -> Listed | None:
        """Return the client with this public key, or None where it is not let in (any more)."""
        with self._lock:
            try:
                state = os.stat(self._path_name)  # for every message: a Path costs twice as much
                now = state.st_mtime_ns, state.st_size, state.st_ino
                if now != self._seen:
                    self._read()
                    self._seen = now
            except OSError as error:
                # No descriptor may be free, or a file server away: the next message tries again.
                log.error("the list of keys cannot be read and stays as it was: %s", error)
            return self._clients.get(public)

    def _read(self) -> None:
        try:
            self._clients = _read_clients(self._path)
        except (ValueError, ConfigError) as error:
            # A slip in an editor, or a file half written, must not end the run, nor lock its processes out.
            log.error("the list of keys stays as it was: %s", error)


@dataclass(frozen=True)
class ServerKeys:
    """The run's own pair, and the clients that it lets in."""

    pair: Pair
    clients: ClientList
    roles: frozenset[KeyRole] = frozenset(ROLES)
    """Roles that this server lets in."""


def make_keys(directory: Path) -> None:
    """Make the keys of a run where they are missing."""
    folder = directory / KEYS_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    with _locked(folder):
        if not (folder / f"{SERVER}.key").exists():
            _write_private(folder / f"{SERVER}.key", _new_pair())
        by_public = _read_clients(folder / CLIENTS_FILE) if (folder / CLIENTS_FILE).exists() else {}
        for role in ROLES:
            path = client_key_file(directory, role)
            if not path.exists():
                _write_private(
                    path, ClientKey(role, role, _new_pair(), _server_pair(directory).public)
                )
            # Listed also where a crash came between its file and the list; removing a key removes its file.
            by_public[read_client_key(path).pair.public] = Listed(role, role)
        _write_clients(folder / CLIENTS_FILE, by_public)


def add_client(directory: Path, name: str) -> Path:
    """Let a worker's new key in; returns its file, to be copied to its host; raises ConfigError."""
    folder = directory / KEYS_FOLDER
    path = client_key_file(directory, name)
    if not NAME.fullmatch(name) or name == SERVER:
        raise ConfigError(
            f"a key's name has up to 64 letters, digits, '.', '_' and '-', and is not {SERVER}: {name!r}"
        )
    if path.exists():
        raise ConfigError(
            f"{path} is there already; remove that key first (--remove {name}), or choose another name"
        )
    pair = _new_pair()
    with _locked(folder):
        by_public = _read_clients(folder / CLIENTS_FILE)
        _write_private(path, ClientKey(name, "worker", pair, _server_pair(directory).public))
        _write_clients(folder / CLIENTS_FILE, by_public | {pair.public: Listed(name, "worker")})
    return path


def remove_client(directory: Path, name: str) -> None:
    """Remove a key: its peers are refused at their next message; raises ConfigError."""
    path = directory / KEYS_FOLDER / CLIENTS_FILE
    with _locked(path.parent):
        by_public = _read_clients(path)
        remaining = {public: each for public, each in by_public.items() if each.name != name}
        if remaining == by_public:
            names = ", ".join(sorted(each.name for each in by_public.values()))
            raise ConfigError(f"{path} lists no key named {name!r}; it lists {names}")
        client_key_file(directory, name).unlink(missing_ok=True)
        _write_clients(path, remaining)


def clients(directory: Path) -> list[Listed]:
    """Return the clients that are let in."""
    return list(_read_clients(directory / KEYS_FOLDER / CLIENTS_FILE).values())


def client_key_file(directory: Path, name: str) -> Path:
    """Return the path of a client's key in its run's directory."""
    return directory / KEYS_FOLDER / f"{name}.key"


def read_client_key(path: Path) -> ClientKey:
    """Read a client's key; raises ConfigError, also where other users can read it."""
    return _read(path, ClientKey)


def server_keys(directory: Path, *roles: KeyRole) -> ServerKeys:
    """Return what a server of a run needs; it lets in these roles, or all."""
    return ServerKeys(_server_pair(directory), ClientList(directory), frozenset(roles or ROLES))


def _server_pair(directory: Path) -> Pair:
    return _read(directory / KEYS_FOLDER / f"{SERVER}.key", Pair)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other processes from changing the keys meanwhile."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _new_pair() -> Pair:
    public, secret = zmq.curve_keypair()
    return Pair(public.decode(), secret.decode())


def _read(path: Path, kind: type[Kind]) -> Kind:
    try:
        mode = path.stat().st_mode
        content = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(
            f"there is no key {path}; a run makes its keys at its start, `prefixrl keygen RUN --new` before"
        ) from None
    except OSError as error:
        raise ConfigError(f"the key {path} cannot be read: {error.strerror}") from None
    if mode & 0o077:
        raise ConfigError(
            f"other users can read the key {path} (mode {mode & 0o777:04o}): {to_copy('chmod 600', path)}"
        )
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} is no key of a run: {error}; copy it again, or make a new one"
        ) from None


def _write_private(path: Path, content: msgspec.Struct) -> None:
    """Write a file that only this user can read, whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(content)) + b"\n")
    temporary.replace(path)


def _read_clients(path: Path) -> dict[str, Listed]:
    clients: dict[str, Listed] = {}
    text = path.read_text(encoding="utf-8")
    if not text.endswith("\n"):
        raise ConfigError(f"{path} does not end with a line break: it is half written, or was cut")
    for number, line in enumerate(text.splitlines(), 1):
        match line.split():
            case [name, "worker" | "rank" | "operator" as role, public] if len(public) == KEY_CHARS:
                clients[public] = Listed(name, role)
            case _:
                raise ConfigError(
                    f"{path}, line {number}: {line!r} is not NAME ROLE PUBLIC_KEY, with ROLE of {ROLES}"
                )
    return clients


def _write_clients(path: Path, clients: dict[str, Listed]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    lines = "".join(f"{each.name} {each.role} {public}\n" for public, each in clients.items())
    temporary.write_text(lines or "\n", encoding="utf-8")
    temporary.replace(path)


class Authenticator(ThreadAuthenticator):
    """Lets in the keys of a run's list, in a thread of its own; asked once per connection."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: ServerKeys) -> None:
        super().__init__(context)
        self._run_keys = keys
        self._refused = 0
        self.start()
        self.configure_curve_callback(ZAP_DOMAIN, self)

    def end(self, socket: "zmq.Socket[bytes]", context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        """End with the socket that it lets into, and their context."""
        socket.close(linger=0)
        self.stop()
        context.term()

    def callback(self, domain: str, key: bytes) -> bool:
        """Return True for a key that may come in here."""
        client = self._run_keys.clients.find_client(key.decode())
        is_let_in = client is not None and client.role in self._run_keys.roles
        if not is_let_in:
            self._refused += 1
            key_words = (
                f"the key {client.name!r} of the role {client.role}" if client else "an unknown key"
            )
            log.warning("refused a connection with %s, %d so far", key_words, self._refused)
        return is_let_in
