"""A config on disk and a broker that serves it, for every file that talks to one."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from prefixrl.common.config.run import RunConfig
from prefixrl.learner.broker.server import Broker
from support.fakes import run_on_disk, serving


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return run_on_disk(tmp_path)


@pytest.fixture
def broker(config: RunConfig) -> Iterator[Broker]:
    with serving(config) as served:
        yield served
