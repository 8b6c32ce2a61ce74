"""One set of keys for every run of the tests."""

import atexit
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

from prefixrl.common.wire import keys as wire_keys
from prefixrl.common.wire.address import Address
from prefixrl.rollout.host import HostShare
from prefixrl.rollout.weights import WeightsSource

VARIABLE = "PREFIXRL_TESTS_KEYS"


@cache
def folder() -> Path:
    """A folder that holds them as a run directory does."""
    if VARIABLE in os.environ:
        return Path(os.environ[VARIABLE])  # this is a process that a test started
    directory = Path(tempfile.mkdtemp(prefix="prefixrl-tests-"))
    os.environ[VARIABLE] = str(directory)
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    wire_keys.make_keys(directory)
    return directory


ALONE = HostShare(Path(os.devnull) / "alone")
"""A host whose rollouts share nothing, as if each had one of its own."""


def give_keys(directory: Path) -> None:
    """Give a run directory the keys of the tests."""
    shutil.copytree(
        folder() / wire_keys.KEYS_FOLDER, directory / wire_keys.KEYS_FOLDER, dirs_exist_ok=True
    )


def keys() -> wire_keys.ServerKeys:
    """The keys of a server."""
    return wire_keys.server_keys(folder())


def key(role: wire_keys.KeyRole = "worker") -> wire_keys.ClientKey:
    """The key of a client."""
    return wire_keys.read_client_key(wire_keys.client_key_file(folder(), role))


def address(endpoint: str, role: wire_keys.KeyRole = "worker") -> Address:
    """An endpoint with a client's key."""
    return Address(endpoint, key(role))


def source(endpoint: str) -> WeightsSource:
    """A weight server as a rollout on another host reaches it."""
    return WeightsSource(endpoint, key())
