"""A worker finds its run, or says what it waits for."""

import os
from pathlib import Path

import pytest

from prefixrl.common.errors import RunIsOver
from prefixrl.common.run.documents import END_FILE
from prefixrl.common.wire.address import ENDPOINT_FILE, mark_of
from prefixrl.common.worker.join import find_broker


def test_a_worker_whose_run_directory_is_missing_says_so_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(RunIsOver, match="before a run had begun"):
        find_broker(tmp_path / "mistyped", None, None, lambda: True, None)
    (line,) = caplog.messages
    assert line.startswith(
        f"there is no run directory {tmp_path}/mistyped (yet): waiting 600 s for a learner"
    )
    caplog.clear()
    with pytest.raises(RunIsOver):
        find_broker(tmp_path, None, None, lambda: True, None)
    assert not caplog.messages, "one that is there may be waited for"


def test_a_worker_of_a_run_that_has_ended_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / ENDPOINT_FILE).write_text("tcp://127.0.0.1:1")
    find_broker(tmp_path, None, None, lambda: True, None)
    assert not caplog.messages
    (tmp_path / END_FILE).write_text("{}")
    find_broker(tmp_path, None, None, lambda: True, None)
    assert "has ended" in caplog.text and "waiting for a learner to go on with it" in caplog.text


def test_a_worker_that_a_launch_starts_ahead_waits_past_the_endpoint_of_an_earlier_broker(
    tmp_path: Path,
) -> None:
    endpoint_file = tmp_path / ENDPOINT_FILE
    endpoint_file.write_text("tcp://127.0.0.1:1")
    old, old_ns = mark_of(endpoint_file), endpoint_file.stat().st_mtime_ns

    def stopping() -> bool:
        os.utime(endpoint_file, ns=(old_ns, old_ns + 1))
        return False

    find_broker(tmp_path, None, None, stopping, old)
    with pytest.raises(RunIsOver):
        find_broker(tmp_path, None, None, lambda: True, mark_of(endpoint_file))
