from pathlib import Path

import pytest

from support.models.process_models import STEP_TAG_MODEL, trained_two_class


@pytest.fixture
def step_tag_model() -> Path:
    return STEP_TAG_MODEL


@pytest.fixture(scope="session")
def two_class_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_two_class(tmp_path_factory.mktemp("two_class"))
