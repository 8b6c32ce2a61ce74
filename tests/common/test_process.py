"""The conduct that all processes of a run share."""

import os
from pathlib import Path

import pytest

from prefixrl.common.process import write_atomically


def test_a_file_is_on_disk_before_its_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    path.write_text("before")
    synced: list[tuple[str, str]] = []

    def fsync(descriptor: int) -> None:
        what = os.readlink(f"/proc/self/fd/{descriptor}")
        synced.append(("folder" if what == str(tmp_path) else "file", path.read_text()))

    monkeypatch.setattr(os, "fsync", fsync)
    write_atomically(path, "after")
    assert synced == [("file", "before"), ("folder", "after")]
    assert [each.name for each in tmp_path.iterdir()] == ["config.json"]
