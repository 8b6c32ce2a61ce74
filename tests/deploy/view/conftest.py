"""`prefixrl dashboard` as its users have it: a process."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def dashboard() -> Callable[..., AbstractContextManager[str]]:
    return _dashboard


@contextmanager
def _dashboard(folder: Path, *options: str, **environment: str) -> Iterator[str]:
    """The address of a dashboard under way; asked to stop, it ends well."""
    command = ("dashboard", str(folder), "--port", "0", *options)
    with subprocess.Popen(
        [sys.executable, "-m", "prefixrl.deploy", *command],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    ) as process:
        assert process.stderr
        try:
            yield process.stderr.readline().split(": ")[1].split("/ ")[0]
        finally:
            process.terminate()
            assert process.wait(30) == 0 and process.stderr.read() == ""
