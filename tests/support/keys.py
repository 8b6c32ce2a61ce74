"""One set of keys for every run of the tests."""

import atexit
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

from prefixrl.common.wire.address import Address
from prefixrl.common.wire.keys import (
    KEYS_FOLDER,
    ClientKey,
    KeyRole,
    ServerKeys,
    client_key_file,
    make_keys,
    read_client_key,
    server_keys,
)
from prefixrl.rollout.host import HostShare
from prefixrl.rollout.weights import WeightsSource

VARIABLE = "PREFIXRL_TESTS_KEYS"


@cache
def folder() -> Path:
    """A folder that holds them as a run directory does."""
    if VARIABLE in os.environ:
        return Path(os.environ[VARIABLE])  # this is a process that a test started
    made = Path(tempfile.mkdtemp(prefix="prefixrl-tests-"))
    os.environ[VARIABLE] = str(made)
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    make_keys(made)
    return made


ALONE = HostShare(Path(os.devnull) / "alone")
"""A host whose rollouts share nothing, as if each had one of its own."""


def give_keys(directory: Path) -> None:
    """Give a run directory the keys of the tests."""
    shutil.copytree(folder() / KEYS_FOLDER, directory / KEYS_FOLDER, dirs_exist_ok=True)


def keys() -> ServerKeys:
    """The keys of a server."""
    return server_keys(folder())


def key(role: KeyRole = "worker") -> ClientKey:
    """The key of a client."""
    return read_client_key(client_key_file(folder(), role))


def address(endpoint: str, role: KeyRole = "worker") -> Address:
    """An endpoint with a client's key."""
    return Address(endpoint, key(role))


def source(endpoint: str) -> WeightsSource:
    """A weight server as a rollout on another host reaches it."""
    return WeightsSource(endpoint, key())
