"""A dispatcher of a run with eight groups per iteration."""

from pathlib import Path

import pytest

from support.broker.dispatch_desk import Desk
from support.fakes import run_on_disk


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(run_on_disk(tmp_path, algorithm={"groups_per_iteration": 8}))
