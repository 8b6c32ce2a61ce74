"""Tests that need a CUDA device are skipped where there is none; `make gpu` runs them, and fails without."""

import pytest
import torch


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    if config.option.markexpr == "gpu":
        raise pytest.UsageError("torch sees no CUDA device here, and `make gpu` is nothing without one")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="torch sees no CUDA device here"))
