"""The connected ranks and operators, and the requests that each role may send. Pure."""

from typing import Literal

from prefixrl.common.wire.keys import Listed
from prefixrl.common.wire.messages.fields import Role
from prefixrl.common.wire.messages.learner import FromOperator, ToBroker

MOST_PEERS = 4096
"""Most peers remembered. Each request for the status comes from a new one."""
PeerRole = Literal["rank", "operator"]


class Peers:
    """Learner ranks and operators, by identity."""

    def __init__(self) -> None:
        self._roles: dict[bytes, tuple[PeerRole, str]] = {}
        """Role and key name of each peer."""
        self.tags: dict[bytes, bytes] = {}
        """Number of the newest request of each peer; it goes back with the answer."""

    def __contains__(self, peer: bytes) -> bool:
        return peer in self._roles

    def add(self, peer: bytes, role: PeerRole, key: str) -> None:
        """Remember a peer and forget the oldest, which sends Hello again if it lives."""
        self._roles.pop(peer, None)
        while len(self._roles) >= MOST_PEERS:
            self.drop(next(iter(self._roles)))
        self._roles[peer] = role, key

    def drop(self, peer: bytes) -> None:
        """Forget a peer."""
        self._roles.pop(peer, None)
        self.tags.pop(peer, None)

    def name(self, peer: bytes) -> str:
        """Return the role of a peer, for messages."""
        return self._roles[peer][0] if peer in self._roles else "stranger"

    def key(self, peer: bytes) -> str:
        """Return the name of the key that a peer joined with, "" for a stranger."""
        return self._roles[peer][1] if peer in self._roles else ""

    def check(self, peer: bytes, message: ToBroker) -> None:
        """Raise ValueError for a request that the peer's role may not send."""
        if self._roles[peer][0] == "operator" and not isinstance(message, FromOperator):
            raise ValueError(f"an operator may not send {type(message).__name__}")


def why_not(role: Role, key: Listed | None) -> str:
    """Return why a key does not allow a role, "" if it does."""
    needed = "worker" if role in ("rollout", "scorer") else role
    if key is not None and key.role == needed:
        return ""
    fault = f"{key.name!r} is a key for the role {key.role}" if key else "there is no key"
    return f"{fault}, a {role} needs one for the role {needed}"
