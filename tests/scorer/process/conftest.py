from pathlib import Path

import pytest

from support.models.process_models import trained_step_tag, trained_two_class


@pytest.fixture(scope="session")
def step_tag_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_step_tag(tmp_path_factory.mktemp("step_tag"))


@pytest.fixture(scope="session")
def two_class_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_two_class(tmp_path_factory.mktemp("two_class"))
