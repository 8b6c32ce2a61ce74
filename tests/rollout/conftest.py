"""A weight server of one test file, and versions that it never had."""

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from prefixrl.common.weights.folders import prune
from support.fakes import weight_server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def endpoint(folder: Path) -> Iterator[str]:
    with weight_server(folder) as (address, _):
        yield address


NUMBERS = count(1)


@pytest.fixture
def next_version(folder: Path) -> Callable[[], int]:
    """Make versions higher than any that a test before used; no snapshot is there."""

    def make_version() -> int:
        prune(folder, set())
        return 100 * next(NUMBERS)

    return make_version


@pytest.fixture
def version(next_version: Callable[[], int]) -> int:
    return next_version()
