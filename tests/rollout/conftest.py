"""A weight server of one test file, and versions that it never had."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.broker.puller import fresh
from support.fakes import weight_server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def endpoint(folder: Path) -> Iterator[str]:
    with weight_server(folder) as (address, _):
        yield address


@pytest.fixture
def version(folder: Path) -> int:
    return fresh(folder)
