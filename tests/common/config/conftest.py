"""A run file that the tests of single sections change by settings."""

from pathlib import Path

import pytest


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    (tmp_path / "train.jsonl").write_text("{}\n", encoding="utf-8")
    (tmp_path / "mine.py").write_text("def advantages(rewards, groups):\n    return rewards\n")
    path = tmp_path / "run.toml"
    path.write_text(
        'directory = "run"\nadapter.model = "a/b"\ntarget.model = "a/c"\ndata.train = "train.jsonl"\n'
        "algorithm.iterations = 3\n",
        encoding="utf-8",
    )
    return path
