"""The memory of a process, where the system does not tell it."""

import resource
from pathlib import Path

import pytest

from prefixrl.common.host import memory_use
from prefixrl.common.host.memory_use import memory_now


@pytest.mark.parametrize("name", ["", "missing"])
def test_memory_that_cannot_be_read_is_none_and_ends_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_use, "ROLLUP", tmp_path / name)
    assert memory_now() is None


@pytest.mark.skipif(not memory_use.ROLLUP.exists(), reason="the system does not tell the memory of a process")
def test_a_process_without_descriptors_left_goes_on_without_its_memory() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert memory_now() is not None
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        found = memory_now()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert found is None
