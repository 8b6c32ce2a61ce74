"""One tiny adapter for every file that trains it; nobody writes to its folder."""

from pathlib import Path

import pytest

from support.models.tiny_model import save_model


@pytest.fixture(scope="session")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("adapter"))
