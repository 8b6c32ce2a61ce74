"""Tests that need a CUDA device, which `make gpu` runs, fail where there is none."""

import pytest
import torch


@pytest.hookimpl(trylast=True)  # after others are deselected
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available() and any(item.get_closest_marker("gpu") for item in items):
        raise pytest.UsageError(
            "torch sees no CUDA device here, and `make gpu` is nothing without one"
        )
